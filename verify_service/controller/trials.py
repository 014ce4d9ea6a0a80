"""Selects the sequences of trials: a few, for which a draft has the fewest tokens to read."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from verify_service.controller.acceptance import Acceptance
from verify_service.controller.bank import Bank
from verify_service.controller.config import ControllerConfig
from verify_service.controller.costs import CostModel
from verify_service.controller.messages import Candidates, DraftKind


@dataclass
class Trials:
    """Selects sequences for trials, as far as the bank pays for them.

    Attributes:
        drafts: The drafts.
        has_trial: For each draft, whether a trial beside steps is running.
        acceptance: Acceptance of each draft.
        bank: Bank that pays for trials.
        costs: Cost model.
        config: Numbers of the policy.
    """

    drafts: Sequence[DraftKind]
    has_trial: list[bool]
    acceptance: Sequence[Acceptance]
    bank: Bank
    costs: CostModel
    config: ControllerConfig

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
            if not self.has_trial[number] and (own := self._tried(candidates, number, are_others)):
                self.has_trial[number] = True
                return {number: own}
        return {}

    def others(self, candidates: Candidates) -> dict[int, list[int]]:
        """Selects the sequences of a trial with a draft that is not their own.

        Such a draft is tried while it has few outcomes, or when the bank is full.
        """
        if len(self.drafts) == 1 or not self.bank.has_any:
            return {}
        known = [acceptance.num_outcomes for acceptance in self.acceptance]
        for number in sorted(range(len(self.drafts)), key=known.__getitem__):
            is_due = known[number] < self.config.seen_enough or self.bank.is_full
            if is_due and (found := self.beside(candidates, {number}, are_others=True)):
                return found
        return {}

    def _tried(self, candidates: Candidates, number: int, are_others: bool) -> list[int]:
        """Selects as many sequences as the draft reads within a plain step, at least one."""
        order = sorted(
            (one.behind[number], i)
            for i, one in enumerate(candidates)
            if one.limits[number] and (one.history.chosen == number) is not are_others
        )
        found: list[int] = []
        num_tokens = 0
        for behind, i in order[: self.config.tried_sequences]:
            num_tokens += behind
            if found and self.costs.reading(num_tokens) > self.bank.plain_seconds:
                break
            found.append(i)
        return found
