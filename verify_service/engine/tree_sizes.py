"""Connects engine and controller: carries out decisions about steps, cuts trees, reports outcomes.

`step_decision` decides.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from foredraft.trees.draft_tree import DraftTree
from verify_service.controller.controller import Controller
from verify_service.controller.messages import Observed, Offer, Plan, Wait
from verify_service.drafts.drafts import Drafts
from verify_service.drafts.proposals import Proposals
from verify_service.engine.draft_waits import wait_for_drafts
from verify_service.engine.judging import Judge, known_outcome
from verify_service.engine.step_decision import Histories, StepDecider, StepDecision
from verify_service.engine.trials import RunningTrials
from verify_service.executor.choice.sampler import VerifyRows
from verify_service.metrics import MIXED_STEPS
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.step_plan import DecodeSlot


class TreeSizes:
    """Sets the size of each tree, and what each draft does, once per step.

    Args:
        controller: Chooses how much to draft.
        drafts: The engine's drafts.
        probes: Numbers of the engine's own requests, whose whole trees are drafted.
        named: Returns the name of the draft that a sequence's request names; empty for none.
        judge: Determines the outcome of proposals that are not verified, or only in part.
    """

    def __init__(
        self,
        controller: Controller,
        drafts: Drafts,
        probes: AbstractSet[int],
        named: Callable[[RequestSequence], str] = lambda sequence: "",
        judge: Judge = known_outcome,
    ) -> None:
        self._outcome_of = judge
        self._drafts, self._each = drafts, drafts.each
        self._probes = probes
        self._trials = RunningTrials(drafts.each, judge)
        self._histories = Histories()
        self._decider = StepDecider(
            controller, drafts, self._trials, self._histories, probes, named, self.think
        )
        self._decision = StepDecision(Plan([], 1))  # about the newest step
        self._cut: dict[int, DraftTree] = {}  # proposals that were verified in part
        self._untold: Observed | None = None  # a step that the controller was not told of yet

    @property
    def controller(self) -> Controller:
        """The controller."""
        return self._decider.controller

    @property
    def is_silent(self) -> bool:
        """Whether the newest planned step neither asks drafts nor tells them tokens."""
        return self._decision.is_silent

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
        decision = self._decider.decide(self._decision, sequences, other_rows, is_ahead)
        self._decision = decision
        if decision.assigned:
            for sequence, number in zip(sequences, decision.assigned, strict=True):
                self._drafts.assign(sequence, number)
        if decision.suspended:
            for draft, is_suspended in zip(self._each, decision.suspended, strict=True):
                draft.suspend(is_suspended, decision.keeps_states)
        for number, requests in decision.trials.items():
            self._trials.start(number, requests)
        return decision.plan

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
                self._histories.of(slot.seq),
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
        return wait_for_drafts(self._drafts, slots, proposals, seconds, self._decision.unread)

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
            number = self._drafts.proposer(rows.sequence)
            history = self._histories.of(rows.sequence)
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
        if not self._each or controller.passes(seconds + wait.lead, wait.lead):
            return
        rows = num_rows // batch if controller.is_padded else num_rows
        self._untold = Observed(batch, rows, seconds, tokens, wait)
        # The next step with drafts waits for them, which is time to learn from this one.
        if self._decision.is_probing or controller.is_padded or not wait.levels:
            self._tell()

    def think(self) -> None:
        """Does the work of the controller that can be done while a step waits for its drafts."""
        self._tell()
        self.controller.think()

    def _tell(self) -> None:
        if self._untold is not None:
            step, self._untold = self._untold, None
            self.controller.observe(step)

    def interrupted(self, wait: Wait) -> None:
        """Records a step with prompts."""
        self.controller.interrupted(wait)
