"""Connects engine and controller: gathers a step's facts, applies the plan, reports outcomes."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from foredraft.trees.draft_tree import DraftTree
from verify_service.controller.controller import Controller
from verify_service.controller.messages import (
    NO_WAIT,
    Candidate,
    DraftHistory,
    Observed,
    Offer,
    Plan,
    Wait,
)
from verify_service.drafts.drafts import Drafts
from verify_service.drafts.proposals import DraftRequest, Proposals, Trial
from verify_service.executor.choice.sampler import VerifyRows
from verify_service.metrics import MIXED_STEPS, AnyMetrics
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.request import Status
from verify_service.scheduler.step_plan import DecodeSlot

Judge = Callable[[DraftTree, Sequence[int]], tuple[int, list[int]]]
"""Determines the outcome of a tree that is not verified; see `known_outcome`."""


def known_outcome(tree: DraftTree, tokens: Sequence[int]) -> tuple[int, list[int]]:
    """Judges a tree that was not verified, or only in part, by the tokens that followed its root.

    Returns:
        The number of leading nodes that can be judged, and the nodes that were right.
    """
    right = tree.follow(tokens)
    if len(right) < len(tokens):
        return len(tree), right
    last = right[-1] if right else -1
    num_known = next((i for i, parent in enumerate(tree.parents) if parent == last), len(tree))
    return num_known, right


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
        self._histories: dict[int, DraftHistory] = {}
        self._cut: dict[int, DraftTree] = {}  # proposals that were verified in part
        # By number of a draft with a running trial: its proposals; None before the answer.
        self._trials: dict[int, list[Trial] | None] = {}
        self._is_resumed = True  # whether drafts were told anything but that they are suspended
        self._num_changes = [0] * len(self._each)
        self.is_silent = False
        self._is_probing = False  # whether the newest plan was for the engine's own requests
        self._newest: Observed | None = None  # a step that the controller was not told of yet
        # By draft: extra tokens that it reads in the newest step that the host begins.
        self._unread = [0] * len(self._each)

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
        is_settled = not (self._trials or self._probes or self._is_resumed)
        self.is_silent = False
        if is_settled and controller.stays_suspended:  # most steps while drafting is suspended
            self.is_silent = not any(one.capabilities.is_free for one in self._each)
            return Plan([0] * len(sequences), 1)
        available = [one.epoch > 0 for one in self._each]
        if not sequences or not any(available):
            return Plan([0] * len(sequences), 1)
        for number in list(self._trials):
            self._judge(number, len(sequences))
        controller.has_trial[:] = [number in self._trials for number in range(len(self._each))]
        if controller.stays_suspended and not self._probes:
            for one in self._each:
                one.suspend(True, controller.keeps_states)
            self._is_resumed = False
            return Plan([0] * len(sequences), 1)
        for number, one in enumerate(self._each):
            is_first = one.capabilities.is_free
            controller.drafts[number] = controller.drafts[number]._replace(
                is_asked_first=is_first, is_beside=controller.is_padded and not is_first
            )
        candidates = [self._candidate(one, available) for one in sequences]
        self._is_probing = any(one.forced for one in candidates)
        if self._is_probing:
            self.think()
        plan = controller.plan(candidates, other_rows, is_ahead)
        if not is_ahead:
            self._unread = controller.unread(candidates, plan.nodes)
        if self._drafts.are_several:
            self._assign(sequences, candidates)
        for one, is_drafting in zip(self._each, controller.is_drafting, strict=True):
            one.suspend(not is_drafting)
        self._is_resumed = True
        for number, tried in plan.tried.items():
            self._trials[number] = None
            limits = dict.fromkeys(tried, controller.drafts[number].max_nodes)
            self._each[number].ask(
                [
                    DraftRequest(one, min(limits.get(i, 0), self.limit(one)), is_trial=True)
                    for i, one in enumerate(sequences)
                ],
                (),
            )
        return plan

    def trees(self, slots: Sequence[DecodeSlot], proposals: Proposals) -> list[DraftTree]:
        """Returns the parts of the proposals that are worth verifying.

        Only proposals of drafts without cost are cut; others were requested in the right size.
        """
        drafted = [proposals.of(slot.seq) for slot in slots]
        trees = [one.tree for one in drafted]
        if not any(slot.max_tree_nodes for slot in slots):
            return trees
        numbers = [self._number(slot.seq) for slot in slots]
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
        """Returns a step's wait for its drafts.

        Args:
            slots: Sequences that decode in the step.
            proposals: The drafts' proposals.
            seconds: Seconds that passed before the target's part.
        """
        asked: dict[int, list[int]] = {}
        for slot in slots:
            if slot.max_tree_nodes:
                asked.setdefault(self._number(slot.seq), []).append(slot.max_tree_nodes)
        # Time of planning, which steps that follow on the device do not wait for.
        rest = max(seconds - max(proposals.waits.values(), default=0.0), 0.0)
        parts = []
        for number, waited in proposals.waits.items():
            one, nodes = self._each[number], asked.get(number)
            is_free = one.capabilities.is_free
            if not nodes or not (proposals.trees or is_free):
                continue
            levels = 1 if is_free else min(max(nodes), one.depth)
            unread = self._unread[number]
            wait = Wait(levels, len(nodes), waited + rest, lead=seconds, unread=unread)
            parts.append((number, wait))
        if not parts:
            return NO_WAIT._replace(lead=seconds)
        levels = max(part.levels for _, part in parts)
        sequences = sum(part.sequences for _, part in parts)
        unread = max(part.unread for _, part in parts)
        return Wait(levels, sequences, seconds, tuple(parts), seconds, unread)

    def draft_everything(self) -> None:
        """Drafts whole trees in each step from now on, whether it pays or not; for benchmarks."""
        self.controller.draft_everything()

    def draft_of(self, sequence: RequestSequence) -> str:
        """Returns the name of a sequence's newest draft; empty where there is a single draft."""
        drafts = self._drafts
        return drafts.names[drafts.proposer(sequence)] if drafts.are_several else ""

    def publish(self, metrics: AnyMetrics) -> None:
        """Publishes which drafts are attached, and how many sequences each drafts for."""
        given = list(self._drafts.assigned.values())
        for number, one in enumerate(self._each):
            figures = metrics.of(one.name)
            figures.available.set(one.epoch > 0)
            if self._drafts.are_several:
                figures.sequences.set(given.count(number))
                figures.changes.inc(self._num_changes[number])
                self._num_changes[number] = 0

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
            number, history = self._number(rows.sequence), self._history(rows.sequence)
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

    def _candidate(self, sequence: RequestSequence, available: Sequence[bool]) -> Candidate:
        limit = self.limit(sequence)
        history = self._history(sequence)
        is_probe, left = sequence.request_id in self._probes, sequence.num_output_left
        if not self._drafts.are_several:
            lag = self._each[0].lag(sequence)
            return Candidate(history, limit, is_probe, lag, left, len(sequence.tokens))
        name, names = self._named(sequence), self._drafts.names
        limits = [
            min(limit, kind.max_nodes) if is_there and name in ("", own) else 0
            for kind, own, is_there in zip(self.controller.drafts, names, available, strict=True)
        ]
        behinds = [one.lag(sequence) for one in self._each]
        context = len(sequence.tokens)
        return Candidate(history, limit, is_probe, 0, left, context, limits, behinds)

    def limit(self, sequence: RequestSequence) -> int:
        """Returns the maximum number of nodes for a sequence's tree."""
        asked, most = sequence.speculation, self.controller.max_nodes
        if asked.enabled is False or sequence.num_output_left <= 1:
            return 0
        if asked.num_draft_tokens is None:
            return most
        return min(most, asked.num_draft_tokens - 1)

    def _history(self, sequence: RequestSequence) -> DraftHistory:
        history = self._histories.get(sequence.request_id)
        if history is None:
            history = DraftHistory(int(sequence.sampling.temperature > 0))
            self._histories[sequence.request_id] = history
        return history

    def _number(self, sequence: RequestSequence) -> int:
        return self._drafts.proposer(sequence) if self._drafts.are_several else 0

    def _assign(
        self, sequences: Sequence[RequestSequence], candidates: Sequence[Candidate]
    ) -> None:
        assigned = self._drafts.assigned
        for sequence, one in zip(sequences, candidates, strict=True):
            number = max(one.history.chosen, 0)
            before = assigned.get(sequence.request_id, number)
            self._num_changes[number] += number != before
            assigned[sequence.request_id] = number

    def _judge(self, number: int, batch: int) -> None:
        """Reports a trial's outcomes to the controller, once all of them are known.

        Wrong proposals are known first, so that early outcomes alone would be biased.
        """
        draft, found = self._each[number], self._trials[number]
        if found is None:
            found = self._trials[number] = draft.take_trials()
            if found is None:
                return
        outcomes = []
        for trial in found:
            tree, sequence = trial.drafted.tree, trial.sequence
            num_known, right = self._outcome_of(tree, sequence.tokens[trial.position :])
            if num_known == len(tree):
                outcomes.append((sequence, trial.drafted, right))
            elif sequence.status is Status.RUNNING:
                return
        del self._trials[number]
        for sequence, drafted, right in outcomes:
            if (history := self._histories.get(sequence.request_id)) is not None:
                offer = Offer(history, len(drafted.tree), drafted.confidence)
                self.controller.tried(offer, number, len(drafted.tree), right, batch)
        self.controller.ended_trial(number)
