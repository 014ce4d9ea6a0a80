"""How many rows each sequence gets where steps are padded to captured shapes and follow one another on the device, as on a GPU."""

import math
from collections.abc import Mapping, Sequence

from verify_service.policy.acceptance import Acceptance
from verify_service.policy.interruptions import Interruptions
from verify_service.policy.messages import Observed, Plan, Wait, Want
from verify_service.policy.probing import Probing
from verify_service.policy.step_time import DraftTimes, GridTimes

START_MARGIN = 1.03  # by which drafting must be faster before it starts
DOUBTED = 0.5  # standard deviations of what drafts seem to bring that they must do without then
CHANGE_MARGIN = 1.02  # and another size of trees before it is taken instead
TRIAL_SEQUENCES = 16  # drafted for at a time to find out, at most
TRIAL_TOKENS = 2000  # that their draft has to read first, of several
# Seconds that a draft takes to read a token, about, and within how many what it has to read must have paid: within that share of what
# answers may take, and at most.
READ_SECONDS, PAYS_SHARE, MOST_PAYS_WITHIN = 4e-6, 0.5, 20.0
# Outcomes for which trials go on, while the best size promises so much, as a factor.
TRIAL_OUTCOMES, OPEN = 64, (0.9, 1.12)
# Drafting steps after which the next larger and smaller trees are tried, once each; each time in vain doubles them.
NEAR_STEPS, MOST_NEAR_STEPS = 24, 192
LOOK_SECONDS = 0.04  # for which nothing is considered anew while drafting rests
FORGET_SECONDS = 30.0  # while drafting rests, in which what drafts took counts a third: it is tried again, whatever was learnt
# Between two trials where prompts come so often that these would disturb each other, and what a trial costs would not be known.
BUSY_SECONDS = 2.0
# A plain step that is shorter is the host's: it then does nothing for a draft that rests until so many seconds before the next trial, in
# which sequences begin that the draft will know from their first token on.
SHORT_STEP, LISTEN_SECONDS = 1.5e-3, 0.25
BESIDE_PROMPTS = 0.2  # of steps with prompts that a trial is taken to cost: it is not known there
LEAD_WEIGHT = 0.3  # of one step that began with the host, in what its beginning takes
# Seconds, and times what is known, that one beginning may count as.
MOST_LEAD, MOST_LEAD_TIMES = 1e-3, 2.0
LEAD_STEPS = 100  # beginnings without drafts in which two thirds of what those with drafts take are forgotten: it is tried again
WAITED_STEPS = 8  # with drafts, one after the other, after which nobody is expected to follow on the device any more


class GridChoice:
    """Chooses one number of rows for all sequences of a step.

    A step behind another one is started before that has ended, and its draft follows on the device. Where that cannot be, as where
    a prompt is computed and in the step after it, the host would wait for the draft: there it decodes plainly, unless the wait
    pays. Meanwhile the draft reads, so that it can follow in the step behind.

    While drafting rests, a few sequences' draft is asked beside plain steps now and then, and nobody waits for it.

    Args:
        depth: Levels of the largest tree.

    Attributes:
        rows: That steps have now, but for trials and the like; 1 while drafting rests.
        has_trial: Whether the outcome of a trial is to come.
        follows: Whether drafts follow on the device.
    """

    def __init__(
        self, acceptance: Acceptance, draft_times: DraftTimes, probing: Probing, depth: int
    ) -> None:
        self._acceptance = acceptance
        self._draft_times = draft_times
        self._probing = probing
        self._depth = depth
        self._interruptions = Interruptions()
        self._steps_to_near = self._near_steps = NEAR_STEPS
        self._near: list[int] = []  # rows of steps that are to show what they take
        self._look_at = 0.0  # when to choose anew, while drafting rests
        self._try_at = 0.0  # when to try next, at the latest, however many prompts come
        self._forgot_at = 0.0  # when something of what drafts take was forgotten last
        self._price = 0.0  # seconds of a token of steps that nothing interrupts
        # Seconds before the target's part where the host begins, without drafts and with.
        self._leads = [0.0, 0.0]
        self._is_spared = False  # a step decodes plainly, lest the host wait, and the one behind was not started yet
        self._is_short = False  # a plain step
        self._num_outcomes = 0  # of trials that have left open whether drafting pays
        self._num_waited = 0  # steps with drafts that were waited for, since the last that was not
        self.rows = 1
        self.has_trial = False
        self.follows = False

    @property
    def is_deaf(self) -> bool:
        """Whether a draft that rests need hear nothing for now, since very many prompts come to a fast target."""
        if self.rows > 1 or self.has_trial or not self._is_short:
            return False
        return self._interruptions.is_frequent and self._probing.now < self._try_at - LISTEN_SECONDS

    def passes(self, seconds: float, tokens: int) -> bool:
        """Takes a step that only decoded, if nothing is to be learnt of it."""
        if not self.is_deaf:
            return False
        self._interruptions.step(seconds, tokens)
        self._interruptions.skip()
        self._probing.plain_step(seconds)
        return True

    @property
    def rests_on(self) -> bool:
        """Whether nothing is to be found out by the next plan: what it would be told of was considered just now. A plan takes a fast
        target's host as long as a step: it is not made for a trial that cannot begin."""
        if self.rows > 1:
            return False
        if self._probing.now >= self._look_at:
            return self.is_deaf
        return not self._may_try or not self._probing.has_time(self._num_outcomes > 0)

    @property
    def _may_try(self) -> bool:
        """Whether a trial would be left alone by prompts, or has not been for long."""
        interruptions = self._interruptions
        if self.has_trial or interruptions.is_settling:
            return False
        return not interruptions.is_frequent or self._probing.now >= self._try_at

    def plan(
        self, times: GridTimes, wanted: Sequence[Want], has_prompts: bool, is_ahead: bool
    ) -> Plan:
        """See `DraftPolicy.plan`."""
        batch, probing = len(wanted), self._probing
        totals = self.totals(wanted)
        shapes = times.rows(batch)
        raw = {rows: self.rate(times, batch, rows, totals) for rows in shapes}
        current = max(rows for rows in shapes if rows <= self.rows)
        rates = {
            rows: self._interruptions.rate(raw[rows], rows > 1, rows > current == 1)
            for rows in shapes
        }
        best = max(rates, key=rates.__getitem__)
        is_usual = not has_prompts and not self._interruptions.is_settling
        if probing.is_stopped:
            current = 1
        elif best != current:
            margin = CHANGE_MARGIN
            if best == 1:
                margin = self._bad_luck(batch, self._brought(totals, current))
            elif current == 1:
                margin = START_MARGIN + _reading(wanted, raw[1])
                margin *= self._luck(batch, self._brought(totals, best))
            if rates[best] > margin * rates[current]:
                current, self._near_steps, self._near = best, NEAR_STEPS, []
        self.rows, self._price = current, 1 / raw[current]
        self._is_short = times.seconds(batch, 1) < SHORT_STEP
        self._look_at = probing.now + LOOK_SECONDS
        rows, tried = current, []
        if current == 1:
            if is_usual and self._may_try and probing.has_time(self._is_open(rates)):
                tried = _least_behind(wanted)
                self.has_trial = bool(tried)
                self._try_at = probing.now + BUSY_SECONDS
        elif (is_usual and probing.must_check(rates[current] / rates[1])) or (
            not is_ahead and self._spares(times, batch, current, totals, has_prompts)
        ):
            rows = 1
        else:
            self._steps_to_near -= 1
            if self._steps_to_near <= 0:
                self._near = [rows for rows in shapes if rows > current][:1]
                self._near += [rows for rows in shapes if 1 < rows < current][-1:]
                self._steps_to_near = self._near_steps
                self._near_steps = min(2 * self._near_steps, MOST_NEAR_STEPS)
            if self._near and (near := self._near.pop(0)) in shapes:
                rows = near
        return Plan([min(want.limit, rows - 1) for want in wanted], rows, tried)

    def ended_trial(self, num_outcomes: int) -> None:
        """So many outcomes of the trial were recorded."""
        self.has_trial, self._look_at = False, 0.0
        self._num_outcomes += num_outcomes
        seconds, self._forgot_at = self._probing.now - self._forgot_at, self._probing.now
        self._draft_times.forget(1 - math.exp(-seconds / FORGET_SECONDS))

    def interrupted(
        self, times: GridTimes, batch: int, tokens: int, seconds: float, wait: Wait
    ) -> None:
        """Takes a step with prompts; see `DraftPolicy.interrupted`."""
        lost = wait.lead - tokens * self._price_now(times, batch)
        if batch and wait.levels:
            lost += times.seconds(batch, 1 + wait.levels) - times.seconds(batch, 1)
        if batch:
            self._learn_lead(wait)
        self._interruptions.step(wait.lead + seconds, tokens)
        if self.has_trial:
            self._probing.owe(BESIDE_PROMPTS * seconds)
        # What a trial beside it costs is no sign of what prompts cost.
        self._interruptions.begin(self.rows > 1, None if self.has_trial else lost)

    def settles(self, times: GridTimes, step: Observed) -> bool:
        """Takes a step that only decoded, and says whether it belongs to an interruption, so that nothing else is learnt of it."""
        wait, interruptions = step.wait, self._interruptions
        seconds = step.seconds + wait.lead
        if wait.seconds is None:
            if not self.follows:
                self._draft_times.clear()  # the host's wait is another one
            self.follows, self._is_spared, self._num_waited = True, False, 0
        else:
            self._learn_lead(wait)
            self._num_waited += wait.levels > 0 and not interruptions.is_settling
            self.follows &= self._num_waited < WAITED_STEPS
        interruptions.step(seconds, step.tokens)
        if not interruptions.is_settling:
            return False
        lost = seconds - step.tokens * self._price_now(times, step.batch)
        interruptions.settle(lost)
        if self.has_trial:
            self._probing.owe(max(lost, 0.0))
        return True

    def rate(self, times: GridTimes, batch: int, rows: int, totals: Sequence[float]) -> float:
        """Tokens per second of steps of so many rows, given what each rung brings all sequences."""
        seconds = times.seconds(batch, rows)
        if rows > 1:
            levels = min(rows - 1, self._depth)
            seconds += self._draft_times.steps(batch, levels) * times.unit
        return (batch + self._brought(totals, rows)) / seconds

    def totals(self, wanted: Sequence[Want]) -> list[float]:
        """Tokens that each rung brings to all sequences."""
        ladder, now = self._acceptance.ladder, self._probing.now
        totals = [0.0] * len(ladder)
        for want in wanted:
            gains = self._acceptance.gains(want.history, 0, now)
            for i in range(ladder.num_within(want.limit)):
                totals[i] += gains[i]
        return totals

    def _price_now(self, times: GridTimes, batch: int) -> float:
        """Seconds of a token; while drafting rests the newest plan may be old, and its batch another one."""
        return self._price if self.rows > 1 or not batch else times.seconds(batch, 1) / batch

    def _brought(self, totals: Sequence[float], rows: int) -> float:
        return sum(totals[: self._acceptance.ladder.num_within(rows - 1)])

    def _luck(self, batch: int, brought: float) -> float:
        """What so many tokens may owe to the luck of the outcomes that they are known by, as a factor of the rate."""
        gain = brought / batch
        return (1 + gain) / (1 + max(gain - DOUBTED * self._deviation(gain), 0.0))

    def _bad_luck(self, batch: int, brought: float) -> float:
        """The same the other way round, before drafting stops: then there are outcomes of each sequence."""
        gain = brought / batch
        return 1 + DOUBTED * self._deviation(gain) / math.sqrt(batch) / (1 + gain)

    def _deviation(self, gain: float) -> float:
        """Of the mean of what all sequences' outcomes brought, as of chains."""
        return math.sqrt(gain * (1 + gain) / self._acceptance.num_outcomes(self._probing.now))

    def _is_open(self, rates: Mapping[int, float]) -> bool:
        """Whether trials showed too little, or leave open if drafting pays; once the draft has read, others cost little."""
        best = max((rate for rows, rate in rates.items() if rows > 1), default=0.0)
        is_open = OPEN[0] * rates[1] < best < OPEN[1] * rates[1]
        if self._num_outcomes >= (TRIAL_OUTCOMES if is_open else TRIAL_SEQUENCES):
            self._num_outcomes = 0
        return self._num_outcomes > 0

    def _spares(
        self, times: GridTimes, batch: int, rows: int, totals: Sequence[float], has_prompts: bool
    ) -> bool:
        """Whether a step that the host begins decodes plainly, since trees are worth less than the wait for them."""
        if not self.follows and not has_prompts:
            return False
        was_spared, self._is_spared = self._is_spared and not has_prompts, False
        worth = self._brought(totals, rows) * self._price
        cost = self._leads[True] - self._leads[False]
        cost += times.seconds(batch, rows) - times.seconds(batch, 1)
        # One behind the other would not be drafted for at all.
        if was_spared or worth > cost:
            return False
        self._leads[True] *= 1 - 1 / LEAD_STEPS
        self._is_spared = not has_prompts
        return True

    def _learn_lead(self, wait: Wait) -> None:
        if wait.lead:
            known = self._leads[wait.levels > 0]
            lead = min(wait.lead, MOST_LEAD_TIMES * known + MOST_LEAD)
            self._leads[wait.levels > 0] += LEAD_WEIGHT * (lead - known)


def _reading(wanted: Sequence[Want], rate: float) -> float:
    """What a draft has to read first, as a share of the time in which that must have paid; `rate` is of plain decoding."""
    seconds = PAYS_SHARE * sum(want.left for want in wanted) / rate
    behind = sum(want.behind for want in wanted)
    return READ_SECONDS * behind / max(min(seconds, MOST_PAYS_WITHIN), READ_SECONDS)


def _least_behind(wanted: Sequence[Want]) -> list[int]:
    """Whom to try: a draft has less to read for a few, least for those whom it was told of last."""
    order = sorted((want.behind, i) for i, want in enumerate(wanted) if want.limit)
    num_tokens = 0
    tried: list[int] = []
    for behind, i in order[:TRIAL_SEQUENCES]:
        num_tokens += behind
        if tried and num_tokens > TRIAL_TOKENS:
            break
        tried.append(i)
    return tried
