"""Selects the sequences of trials: a few, for which a draft has the fewest tokens to read."""

from collections.abc import Collection, Sequence

from verify_service.controller.acceptance import Acceptance
from verify_service.controller.bank import Bank
from verify_service.controller.config import ControllerConfig
from verify_service.controller.costs import CostModel
from verify_service.controller.messages import Candidates, DraftKind


class Trials:
    """Selects sequences for trials, as far as the bank pays for them.

    Args:
        drafts: The drafts.
        has_trial: For each draft, whether a trial beside steps is running.
        acceptance: Acceptance of each draft.
        bank: Bank that pays for trials.
        costs: Cost model.
        config: Numbers of the policy.
    """

    def __init__(
        self,
        drafts: Sequence[DraftKind],
        has_trial: list[bool],
        acceptance: Sequence[Acceptance],
        bank: Bank,
        costs: CostModel,
        config: ControllerConfig,
    ) -> None:
        self._drafts = drafts
        self._has_trial = has_trial
        self._acceptance = acceptance
        self._bank = bank
        self._costs = costs
        self._config = config

    def probed(self, candidates: Candidates, limits: Sequence[int]) -> list[int] | None:
        """Selects sequences for a trial within a step, which drafts one token for each of them.

        Returns the number of nodes by sequence; None where the bank could not pay for a trial
        without hits.
        """
        config, batch = self._config, len(candidates)
        if self._bank.is_suspended or any(kind.is_beside for kind in self._drafts):
            return None
        num = min(config.probed_sequences, batch)
        more = self._costs.target(batch, batch + num) - self._bank.step
        waits = [self._costs.draft(number, num, 1) for number in range(len(self._drafts))]
        if not self._bank.affords(more + max(waits)):
            return None
        order = sorted(
            (one.behind_of(one.history.chosen), i)
            for i, one in enumerate(candidates)
            if limits[i] and not self._drafts[one.history.chosen].is_asked_first
        )
        nodes = [0] * batch
        for behind, i in order[:num]:
            if i == order[0][1] or behind <= config.close_tokens:
                nodes[i] = 1
        return nodes

    def beside(
        self, candidates: Candidates, numbers: Collection[int], are_others: bool = False
    ) -> dict[int, list[int]]:
        """Selects the sequences of a trial beside steps, by number of the draft: one at most.

        Args:
            candidates: Sequences that decode.
            numbers: Numbers of the drafts to choose from.
            are_others: Whether to take sequences of other drafts, instead of the draft's own.
        """
        for number in numbers:
            if not self._has_trial[number] and (own := self._tried(candidates, number, are_others)):
                self._has_trial[number] = True
                return {number: own}
        return {}

    def others(self, candidates: Candidates) -> dict[int, list[int]]:
        """Selects the sequences of a trial with a draft that is not their own.

        Such a draft is tried while it has few outcomes, or when the bank is full.
        """
        if len(self._drafts) == 1 or not self._bank.has_any:
            return {}
        known = [acceptance.num_outcomes for acceptance in self._acceptance]
        for number in sorted(range(len(self._drafts)), key=known.__getitem__):
            is_due = known[number] < self._config.seen_enough or self._bank.is_full
            if is_due and (found := self.beside(candidates, {number}, are_others=True)):
                return found
        return {}

    def _tried(self, candidates: Candidates, number: int, are_others: bool) -> list[int]:
        """Selects as many sequences as the draft reads within a plain step, at least one."""
        order = sorted(
            (one.behind_of(number), i)
            for i, one in enumerate(candidates)
            if one.limit_of(number) and (one.history.chosen == number) is not are_others
        )
        found: list[int] = []
        num_tokens = 0
        for behind, i in order[: self._config.tried_sequences]:
            num_tokens += behind
            if found and self._costs.reading(num_tokens) > self._bank.step:
                break
            found.append(i)
        return found
