"""Decides what a step drafts: the facts of its sequences and drafts, and the controller's answer.

`tree_sizes` carries the decision out.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from verify_service.controller.controller import Controller
from verify_service.controller.messages import Candidate, DraftHistory, Offer, Plan
from verify_service.drafts.drafts import Drafts
from verify_service.drafts.proposals import DraftRequest
from verify_service.engine.trials import RunningTrials
from verify_service.scheduler.request import Sequence as RequestSequence


class StepDecision(NamedTuple):
    """What a step drafts, and what becomes of the drafts before it.

    Attributes:
        plan: Number of nodes that each sequence verifies.
        assigned: Number of the draft that drafts for each sequence from now on; empty where that
            stays as it is.
        suspended: Whether drafting by each draft is suspended from now on; empty where that stays
            as it is.
        keeps_states: Whether hidden states are kept for suspended drafts.
        trials: Requests of the trials to start, by number of the draft.
        unread: Number of tokens that each draft must read first, beyond what a step commits; empty
            where no step waits for it.
        is_resting: Whether all drafts are suspended until the controller looks at them again.
        is_silent: Whether the step neither asks drafts nor tells them tokens.
        is_probing: Whether the step drafts for the engine's own requests.
    """

    plan: Plan
    assigned: Sequence[int] = ()
    suspended: Sequence[bool] = ()
    keeps_states: bool = True
    trials: Mapping[int, Sequence[DraftRequest]] = {}
    unread: Sequence[int] = ()
    is_resting: bool = False
    is_silent: bool = False
    is_probing: bool = False


class Histories(dict[int, DraftHistory]):
    """Results of drafting for each live sequence, by request id."""

    def of(self, sequence: RequestSequence) -> DraftHistory:
        """Returns the results of a sequence; begins them where there are none."""
        history = self.get(sequence.request_id)
        if history is None:
            history = self[sequence.request_id] = DraftHistory(
                int(sequence.sampling.temperature > 0)
            )
        return history


class StepDecider:
    """Decides once per step. Changes nothing but the controller; takes in trials that have ended.

    Args:
        controller: Chooses how much to draft.
        drafts: The engine's drafts.
        trials: The trials that run.
        histories: Results of drafting.
        probes: Numbers of the engine's own requests, whose whole trees are drafted.
        named: Returns the name of the draft that a sequence's request names; empty for none.
        learn: Lets the controller learn from all steps before.

    Attributes:
        controller: The controller.
    """

    def __init__(
        self,
        controller: Controller,
        drafts: Drafts,
        trials: RunningTrials,
        histories: Histories,
        probes: AbstractSet[int],
        named: Callable[[RequestSequence], str],
        learn: Callable[[], None],
    ) -> None:
        self.controller = controller
        self._drafts, self._each = drafts, drafts.each
        self._trials, self._histories = trials, histories
        self._probes, self._named = probes, named
        self._learn = learn

    def decide(
        self,
        before: StepDecision,
        sequences: Sequence[RequestSequence],
        other_rows: int,
        is_ahead: bool,
    ) -> StepDecision:
        """Decides what the coming step drafts.

        Args:
            before: The decision about the step before.
            sequences: Sequences that decode in the step.
            other_rows: Number of rows of prompts in the same step.
            is_ahead: Whether the step is started before the running one is done.
        """
        controller, nothing = self.controller, Plan([0] * len(sequences), 1)
        is_settled = before.is_resting and not (self._trials.are_running or self._probes)
        if is_settled and controller.stays_suspended:  # most steps while drafting is suspended
            is_silent = not any(one.capabilities.is_free for one in self._each)
            return StepDecision(nothing, is_resting=True, is_silent=is_silent)
        available = [one.epoch > 0 for one in self._each]
        if not sequences or not any(available):
            return StepDecision(nothing, is_resting=before.is_resting)
        self._report_trials(len(sequences))
        if controller.stays_suspended and not self._probes:
            return StepDecision(
                nothing,
                suspended=[True] * len(self._each),
                keeps_states=controller.keeps_states,
                is_resting=True,
            )
        self._describe_drafts()
        candidates = [self._candidate(one, available) for one in sequences]
        is_probing = any(one.forced for one in candidates)
        if is_probing:
            self._learn()
        plan = controller.plan(candidates, other_rows, is_ahead)
        chosen = candidates if self._drafts.are_several else ()
        return StepDecision(
            plan,
            assigned=[max(one.history.chosen, 0) for one in chosen],
            suspended=[not is_drafting for is_drafting in controller.is_drafting],
            trials={n: self._trial(n, tried, sequences) for n, tried in plan.tried.items()},
            unread=() if is_ahead else controller.unread(candidates, plan.nodes),
            is_probing=is_probing,
        )

    def limit(self, sequence: RequestSequence) -> int:
        """Returns the maximum number of nodes for a sequence's tree."""
        asked, most = sequence.speculation, self.controller.max_nodes
        if asked.enabled is False or sequence.num_output_left <= 1:
            return 0
        if asked.num_draft_tokens is None:
            return most
        return min(most, asked.num_draft_tokens - 1)

    def _report_trials(self, batch: int) -> None:
        """Reports the trials that have ended to the controller.

        Args:
            batch: Number of sequences that decode now.
        """
        controller = self.controller
        for number, outcomes in self._trials.take_ended().items():
            for one in outcomes:
                history = self._histories.get(one.sequence.request_id)
                if history is not None:
                    num_nodes = len(one.drafted.tree)
                    offer = Offer(history, num_nodes, one.drafted.confidence)
                    controller.tried(offer, number, num_nodes, one.right, batch)
            controller.ended_trial(number)
        has_trial = [self._trials.is_running(number) for number in range(len(self._each))]
        controller.has_trial[:] = has_trial

    def _describe_drafts(self) -> None:
        """Lets the controller know what the attached drafts can do."""
        controller = self.controller
        for number, one in enumerate(self._each):
            is_first = one.capabilities.is_free
            controller.drafts[number] = controller.drafts[number]._replace(
                is_asked_first=is_first, is_beside=controller.is_padded and not is_first
            )

    def _candidate(self, sequence: RequestSequence, available: Sequence[bool]) -> Candidate:
        """Describes a sequence; `available` says which drafts are attached."""
        limits = [self.limit(sequence)]
        if self._drafts.are_several:
            name = self._named(sequence)
            trio = zip(self.controller.drafts, self._drafts.names, available, strict=True)
            limits = [
                min(limits[0], kind.max_nodes) if is_there and name in ("", own) else 0
                for kind, own, is_there in trio
            ]
        return Candidate(
            self._histories.of(sequence),
            limits,
            [one.lag(sequence) for one in self._each],
            sequence.num_output_left,
            len(sequence.tokens),
            sequence.request_id in self._probes,
        )

    def _trial(
        self, number: int, tried: Sequence[int], sequences: Sequence[RequestSequence]
    ) -> list[DraftRequest]:
        """Returns the requests of a trial: whole trees for some of the sequences.

        Args:
            number: Number of the draft.
            tried: Indices of the sequences to draft for.
            sequences: All sequences that decode now.
        """
        limits = dict.fromkeys(tried, self.controller.drafts[number].max_nodes)
        return [
            DraftRequest(one, min(limits.get(i, 0), self.limit(one)), is_trial=True)
            for i, one in enumerate(sequences)
        ]
