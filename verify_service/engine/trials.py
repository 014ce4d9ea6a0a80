"""Trials that run beside plain steps: no step waits for their trees, later tokens judge them."""

from collections.abc import Sequence
from typing import NamedTuple

from verify_service.drafts.proposals import Drafted, DraftRequest, Trial
from verify_service.drafts.proxy import DraftProxy
from verify_service.engine.judging import Judge
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.request import Status


class TrialOutcome(NamedTuple):
    """The outcome of a tree that was drafted for a trial.

    Attributes:
        sequence: Sequence that the tree continues.
        drafted: The tree.
        right: Nodes that were right.
    """

    sequence: RequestSequence
    drafted: Drafted
    right: list[int]


class RunningTrials:
    """Starts trials, at most one for each draft at a time, and judges them.

    Args:
        drafts: The engine's drafts.
        judge: Determines the outcome of a tree.
    """

    def __init__(self, drafts: Sequence[DraftProxy], judge: Judge) -> None:
        self._drafts, self._outcome_of = drafts, judge
        # By number of the draft: its trees; None before they have come.
        self._running: dict[int, list[Trial] | None] = {}

    @property
    def are_running(self) -> bool:
        """Whether a trial is running."""
        return bool(self._running)

    def is_running(self, number: int) -> bool:
        """Returns whether a trial of the draft with this number is running."""
        return number in self._running

    def start(self, number: int, requests: Sequence[DraftRequest]) -> None:
        """Starts a trial of a draft.

        Args:
            number: Number of the draft.
            requests: All sequences that decode now.
        """
        self._running[number] = None
        self._drafts[number].ask(requests, ())

    def take_ended(self) -> dict[int, list[TrialOutcome]]:
        """Returns the outcomes of trials that have ended since the last call, by number of the
        draft.

        A trial ends once all of its outcomes are known. Wrong proposals are known first, so that
        early outcomes alone would be biased.
        """
        ended = {}
        for number in list(self._running):
            outcomes = self._outcomes(number)
            if outcomes is not None:
                del self._running[number]
                ended[number] = outcomes
        return ended

    def _outcomes(self, number: int) -> list[TrialOutcome] | None:
        """Returns the outcomes of a draft's trial; None while one of them is open."""
        found = self._running[number]
        if found is None:
            found = self._running[number] = self._drafts[number].take_trials()
            if found is None:
                return None
        outcomes = []
        for trial in found:
            tree, sequence = trial.drafted.tree, trial.sequence
            num_known, right = self._outcome_of(tree, sequence.tokens[trial.position :])
            if num_known == len(tree):
                outcomes.append(TrialOutcome(sequence, trial.drafted, right))
            elif sequence.status is Status.RUNNING:
                return None
        return outcomes
