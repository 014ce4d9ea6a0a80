"""Costs of switching between drafted and plain steps where steps follow one another on the device,
as on a GPU. A step that the host begins is one that starts after the outcome of the step before is
known, not behind it on the device.
"""

import math
from collections.abc import Sequence

from verify_service.controller.acceptance import Array
from verify_service.controller.config import ControllerConfig
from verify_service.controller.costs import CostModel
from verify_service.controller.messages import DraftKind, Observed, Wait


class Switching:
    """Learns how long steps that the host begins wait, and how often prompts cause such steps.

    Attributes:
        follows: Whether drafts follow on the device, so that only steps that the host begins wait
            for them.
        prompt_rate: Recent number of steps with prompts per second.
    """

    def __init__(self, costs: CostModel, config: ControllerConfig) -> None:
        self.follows, self.prompt_rate = False, 0.0
        self._costs, self._config = costs, config
        # Seconds of decoding over which steps with prompts are counted.
        self._busy_seconds = config.forget_seconds / 8
        # Seconds before the target's part of a step that the host begins: without drafts, and with.
        self._leads = [0.0, config.switch_steps * costs.plain(1)]
        # Seconds that drafting loses by a step with prompts, and since the newest one.
        self._prompt_loss, self._loss_so_far = costs.plain(1), 0.0
        # Drafted steps in a row that waited for their drafts; whether the newest step that the host
        # began decoded plainly.
        self._num_waited, self._is_spared = 0, False

    @property
    def switch_seconds(self) -> float:
        """Extra seconds of a step that the host begins with drafts."""
        return max(self._leads[1] - self._leads[0], 0.0)

    def with_switches(self, seconds: Array, is_start: bool) -> Array:
        """Returns the seconds of drafted steps with their share of the costs of switching.

        Args:
            seconds: Seconds of drafted steps.
            is_start: Whether drafting begins with the step.
        """
        if is_start:
            seconds = seconds + self.switch_seconds / self._config.payback_steps
        return seconds / max(1 - self._prompt_loss * self.prompt_rate, 0.1)

    def spares(self, worth: float, more: float, has_prompts: bool) -> bool:
        """Decides whether a step that the host begins decodes plainly, since its trees are worth
        less than the wait for them.

        Its draft reads meanwhile, so that it can follow on the device in the next step.

        Args:
            worth: Seconds that the trees bring.
            more: Extra seconds of the target with trees.
            has_prompts: Whether the step computes prompts.
        """
        if not self.follows:
            return False
        was_spared, self._is_spared = self._is_spared and not has_prompts, False
        # Two such steps in a row would mean that nothing is drafted at all.
        if was_spared or worth > more + self.switch_seconds:
            return False
        self._is_spared = not has_prompts
        return True

    def observe(
        self, step: Observed, drafts: Sequence[DraftKind], is_switch: bool, has_trial: bool
    ) -> float:
        """Learns the time of a step and its drafts; returns the seconds that such drafts take.

        Args:
            step: The step.
            drafts: The drafts.
            is_switch: Whether drafting began or ended with the step, which takes time.
            has_trial: Whether a trial runs beside the step.
        """
        costs, wait = self._costs, step.wait
        parts = wait.parts or (((0, wait),) if wait.levels else ())
        if wait.seconds is None:  # the draft's time is in the step's own
            self.follows, self._num_waited, self._is_spared = True, 0, False
            [(number, part)] = parts
            levels = min(part.levels, step.rows - 1)
            if not is_switch:
                costs.waited_within(number, part.sequences, levels, step.rows, step.seconds)
            return costs.draft(number, part.sequences, levels, True)
        self.learn(wait)
        self._num_waited += wait.levels > 0
        self.follows &= self._num_waited < self._config.near_steps
        # The host began this step, while others follow one another on the device.
        is_alone = self.follows and wait.lead > 0
        is_unusual = costs.table.is_padded and (is_switch or has_trial or is_alone)
        costs.observe(step.batch, step.rows, step.seconds, not is_unusual)
        for number, part in parts:
            is_first = drafts[number].is_asked_first
            if is_first or not (is_switch or is_alone):
                most = 2 * costs.draft(number, part.sequences, part.levels) + costs.table.unit / 10
                seconds = min(part.seconds or 0.0, most if is_first else 1e9)  # no hiccups
                costs.waited(number, part.sequences, part.levels, seconds, unread=part.unread)
        waits = (costs.draft(n, part.sequences, part.levels, is_alone) for n, part in parts)
        return max(waits, default=0.0)

    def interrupt(self, wait: Wait, is_suspended: bool) -> None:
        """Records a step with prompts."""
        self.prompt_rate += 1 / self._busy_seconds
        if self.follows and not is_suspended:
            self._prompt_loss += (self._loss_so_far - self._prompt_loss) * self._config.newest_share
        self._loss_so_far = 0.0
        self.learn(wait)

    def learn(self, wait: Wait) -> None:
        """Learns the host's time before a step, without the draft's estimated time of reading."""
        if wait.lead and self.follows:
            known = self._leads[wait.levels > 0]
            lead = max(wait.lead - self._costs.reading(wait.unread), wait.lead / 2)
            lead = min(lead, 2 * known + self._costs.table.unit)
            self._loss_so_far += lead
            self._leads[wait.levels > 0] += (lead - known) * self._config.newest_share

    def age_waits(self, seconds: float, plain_seconds: float) -> None:
        """Lets unusually long waits for drafts age while nothing is drafted.

        Args:
            seconds: Seconds that have passed.
            plain_seconds: Seconds of a plain step now.
        """
        usual = self._leads[0] + self._config.switch_steps * plain_seconds
        share = min(seconds / self._config.forget_seconds, 1.0)
        self._leads[1] -= share * max(self._leads[1] - usual, 0.0)
        self._prompt_loss -= share * max(self._prompt_loss - self._leads[0] - plain_seconds, 0.0)

    def age_prompts(self, seconds: float) -> None:
        """Lets the rate of steps with prompts age by `seconds`."""
        self.prompt_rate *= math.exp(-seconds / self._busy_seconds)
