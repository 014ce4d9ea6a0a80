"""Connects engine and controller: gathers a step's facts, applies the plan, reports outcomes."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from foredraft.trees.draft_tree import DraftTree
from verify_service.controller.controller import Controller
from verify_service.controller.messages import (
    Candidate,
    DraftHistory,
    Observed,
    Offer,
    Plan,
    Wait,
)
from verify_service.drafts.drafts import Drafts
from verify_service.drafts.proposals import DraftRequest, Proposals
from verify_service.engine.draft_waits import wait_for_drafts
from verify_service.engine.judging import Judge, known_outcome
from verify_service.engine.trials import RunningTrials
from verify_service.executor.choice.sampler import VerifyRows
from verify_service.metrics import MIXED_STEPS
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.step_plan import DecodeSlot


class TreeSizes:
    """Asks the controller once per step for the sizes of trees.

    Args:
        controller: Chooses how much to draft.
        drafts: The engine's drafts.
        probes: Numbers of the engine's own requests, whose whole trees are drafted.
        named: Returns the name of the draft that a sequence's request names; empty for none.
        judge: Determines the outcome of proposals that are not verified, or only in part.

    Attributes:
        controller: The controller.
        is_silent: Whether the newest planned step neither asks drafts nor tells them tokens.
    """

    def __init__(
        self,
        controller: Controller,
        drafts: Drafts,
        probes: AbstractSet[int],
        named: Callable[[RequestSequence], str] = lambda sequence: "",
        judge: Judge = known_outcome,
    ) -> None:
        self.controller = controller
        self._outcome_of = judge
        self._drafts, self._each = drafts, drafts.each
        self._probes = probes
        self._named = named
        self._trials = RunningTrials(drafts.each, judge)
        self._histories: dict[int, DraftHistory] = {}
        self._cut: dict[int, DraftTree] = {}  # proposals that were verified in part
        self._is_resumed = True  # whether drafts were told anything but that they are suspended
        self.is_silent = False
        self._is_probing = False  # whether the newest plan was for the engine's own requests
        self._newest: Observed | None = None  # a step that the controller was not told of yet
        # By draft: extra tokens that it reads in the newest step that the host begins.
        self._unread = [0] * len(self._each)

    # Before a step.

    def plan(
        self, sequences: Sequence[RequestSequence], other_rows: int = 0, is_ahead: bool = False
    ) -> Plan:
        """Plans how many tree nodes sequences verify in the coming step; starts trials.

        Args:
            sequences: Sequences that decode in the step.
            other_rows: Number of rows of prompts in the same step.
            is_ahead: Whether the step is started before the running one is done.
        """
        controller = self.controller
        is_settled = not (self._trials.are_running or self._probes or self._is_resumed)
        self.is_silent = False
        if is_settled and controller.stays_suspended:  # most steps while drafting is suspended
            self.is_silent = not any(one.capabilities.is_free for one in self._each)
            return Plan([0] * len(sequences), 1)
        available = [one.epoch > 0 for one in self._each]
        if not sequences or not any(available):
            return Plan([0] * len(sequences), 1)
        self._report_trials(len(sequences))
        if controller.stays_suspended and not self._probes:
            for one in self._each:
                one.suspend(True, controller.keeps_states)
            self._is_resumed = False
            return Plan([0] * len(sequences), 1)
        self._describe_drafts()
        candidates = [self._candidate(one, available) for one in sequences]
        self._is_probing = any(one.forced for one in candidates)
        if self._is_probing:
            self.think()
        plan = controller.plan(candidates, other_rows, is_ahead)
        if not is_ahead:
            self._unread = controller.unread(candidates, plan.nodes)
        if self._drafts.are_several:
            for sequence, candidate in zip(sequences, candidates, strict=True):
                self._drafts.assign(sequence, max(candidate.history.chosen, 0))
        for draft, is_drafting in zip(self._each, controller.is_drafting, strict=True):
            draft.suspend(not is_drafting)
        self._is_resumed = True
        for number, tried in plan.tried.items():
            self._start_trial(number, tried, sequences)
        return plan

    def trees(self, slots: Sequence[DecodeSlot], proposals: Proposals) -> list[DraftTree]:
        """Returns the parts of the proposals that are worth verifying.

        Only proposals of drafts without cost are cut; others were requested in the right size.
        """
        drafted = [proposals.of(slot.seq) for slot in slots]
        trees = [one.tree for one in drafted]
        if not any(slot.max_tree_nodes for slot in slots):
            return trees
        numbers = self._drafts.proposers(slots)
        MIXED_STEPS.inc(len({n for n, tree in zip(numbers, trees, strict=True) if tree.tokens}) > 1)
        first = [self._each[number].capabilities.is_free for number in numbers]
        if not any(first):
            return trees
        offers = [
            Offer(
                self._history(slot.seq),
                len(one.tree) * is_first,
                one.confidence,
                slot.seq.request_id in self._probes,
                is_first and slot.max_tree_nodes > 0,
            )
            for slot, one, is_first in zip(slots, drafted, first, strict=True)
        ]
        others = sum(len(tree) for tree, is_first in zip(trees, first, strict=True) if not is_first)
        nodes = self.controller.trim(offers, others)
        for i, (slot, is_first) in enumerate(zip(slots, first, strict=True)):
            if not is_first:
                continue
            if nodes[i] < len(trees[i]) and slot.seq.grammar is None:
                self._cut[slot.seq.request_id] = trees[i]
            trees[i] = trees[i].first(nodes[i])
        return trees

    def wait(self, slots: Sequence[DecodeSlot], proposals: Proposals, seconds: float) -> Wait:
        """Returns a step's wait for its drafts; see `wait_for_drafts`."""
        return wait_for_drafts(self._drafts, slots, proposals, seconds, self._unread)

    def limit(self, sequence: RequestSequence) -> int:
        """Returns the maximum number of nodes for a sequence's tree."""
        asked, most = sequence.speculation, self.controller.max_nodes
        if asked.enabled is False or sequence.num_output_left <= 1:
            return 0
        if asked.num_draft_tokens is None:
            return most
        return min(most, asked.num_draft_tokens - 1)

    def draft_everything(self) -> None:
        """Drafts whole trees in each step from now on, whether it pays or not; for benchmarks."""
        self.controller.draft_everything()

    # After a step.

    @property
    def records_all(self) -> bool:
        """Whether `record` needs the outcomes of steps without a tree too.

        With several drafts it does, since each draft counts its own.
        """
        return bool(self._cut) or self._drafts.are_several

    def record(self, rows: VerifyRows, accepted: Sequence[int], tokens: Sequence[int]) -> None:
        """Records the outcome of one verification.

        Args:
            rows: The sequence and its verified tree.
            accepted: Nodes that were right.
            tokens: All tokens that the verification gave.
        """
        if not (rows.tree.tokens or self._cut):  # true in most plain steps
            return
        num_nodes, brought = len(rows.tree), len(accepted)
        cut = self._cut.pop(rows.sequence.request_id, None)
        if cut is not None:
            num_nodes, accepted = self._outcome_of(cut, tokens)
        if num_nodes:
            number, history = self._drafts.proposer(rows.sequence), self._history(rows.sequence)
            self.controller.record(history, num_nodes, accepted, rows.confidence, brought, number)

    def forget(self, sequence: RequestSequence) -> None:
        """Drops the state of a sequence that has ended."""
        self._cut.pop(sequence.request_id, None)
        history = self._histories.pop(sequence.request_id, None)
        if history is not None:
            self.controller.forget(history)

    def observe(self, batch: int, num_rows: int, seconds: float, tokens: int, wait: Wait) -> None:
        """Records a step that only decoded.

        `num_rows` counts the rows of all sequences; see `Observed` for the other arguments.
        """
        self._tell()
        controller = self.controller
        if not self._each or controller.passes(seconds + wait.lead):
            return
        rows = num_rows // batch if controller.is_padded else num_rows
        self._newest = Observed(batch, rows, seconds, tokens, wait)
        # The next step with drafts waits for them, which is time to learn from this one.
        if self._is_probing or controller.is_padded or not wait.levels:
            self._tell()

    def think(self) -> None:
        """Does the work of the controller that can be done while a step waits for its drafts."""
        self._tell()
        self.controller.think()

    def _tell(self) -> None:
        if self._newest is not None:
            step, self._newest = self._newest, None
            self.controller.observe(step)

    def interrupted(self, wait: Wait) -> None:
        """Records a step with prompts."""
        self.controller.interrupted(wait)

    # Parts of a plan.

    def _report_trials(self, batch: int) -> None:
        """Reports the trials that have ended to the controller.

        Args:
            batch: Number of sequences that decode now.
        """
        for number, outcomes in self._trials.take_ended().items():
            for one in outcomes:
                history = self._histories.get(one.sequence.request_id)
                if history is not None:
                    num_nodes = len(one.drafted.tree)
                    offer = Offer(history, num_nodes, one.drafted.confidence)
                    self.controller.tried(offer, number, num_nodes, one.right, batch)
            self.controller.ended_trial(number)
        has_trial = [self._trials.is_running(number) for number in range(len(self._each))]
        self.controller.has_trial[:] = has_trial

    def _describe_drafts(self) -> None:
        """Lets the controller know what the attached drafts can do."""
        controller = self.controller
        for number, one in enumerate(self._each):
            is_first = one.capabilities.is_free
            controller.drafts[number] = controller.drafts[number]._replace(
                is_asked_first=is_first, is_beside=controller.is_padded and not is_first
            )

    def _candidate(self, sequence: RequestSequence, available: Sequence[bool]) -> Candidate:
        limits = [self.limit(sequence)]
        if self._drafts.are_several:
            name = self._named(sequence)
            trio = zip(self.controller.drafts, self._drafts.names, available, strict=True)
            limits = [
                min(limits[0], kind.max_nodes) if is_there and name in ("", own) else 0
                for kind, own, is_there in trio
            ]
        return Candidate(
            self._history(sequence),
            limits,
            [one.lag(sequence) for one in self._each],
            sequence.num_output_left,
            len(sequence.tokens),
            sequence.request_id in self._probes,
        )

    def _start_trial(
        self, number: int, tried: Sequence[int], sequences: Sequence[RequestSequence]
    ) -> None:
        """Requests whole trees for some of the sequences.

        Args:
            number: Number of the draft.
            tried: Indices of the sequences to draft for.
            sequences: All sequences that decode now.
        """
        limits = dict.fromkeys(tried, self.controller.drafts[number].max_nodes)
        requests = [
            DraftRequest(one, min(limits.get(i, 0), self.limit(one)), is_trial=True)
            for i, one in enumerate(sequences)
        ]
        self._trials.start(number, requests)

    def _history(self, sequence: RequestSequence) -> DraftHistory:
        history = self._histories.get(sequence.request_id)
        if history is None:
            history = DraftHistory(int(sequence.sampling.temperature > 0))
            self._histories[sequence.request_id] = history
        return history
