"""Between engine and controller: who may be drafted for and by which draft, what of a proposal is verified, what came of it."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from foredraft.trees.draft_tree import DraftTree
from verify_service.controller.controller import Controller
from verify_service.controller.messages import (
    NO_WAIT,
    DraftHistory,
    Observed,
    Offer,
    Plan,
    Wait,
    Want,
)
from verify_service.drafts.drafting import Drafting
from verify_service.drafts.proposals import NOTHING, Drafted, Tried, Wanted
from verify_service.drafts.several import Drafts
from verify_service.executor.sampler import VerifyRows
from verify_service.metrics import MIXED_STEPS, AnyMetrics
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.request import Status
from verify_service.scheduler.step_plan import DecodeSlot

Judge = Callable[[DraftTree, Sequence[int]], tuple[int, list[int]]]


class TreeSizes:
    """Asks the controller once per step.

    Args:
        drafting: The draft's side, or that of several, or None for plain decoding.
        probes: Numbers of requests that are the engine's own, for which everything is drafted.
        named: The draft that a sequence asks for by name, if any.

    Attributes:
        controller: How much to draft.
        judge: `known_outcome`; benchmarks that simulate acceptance put in what they draw.
    """

    def __init__(
        self,
        controller: Controller,
        drafting: Drafting | Drafts | None,
        probes: AbstractSet[int],
        named: Callable[[RequestSequence], str] = lambda sequence: "",
    ) -> None:
        self.controller = controller
        self.judge: Judge = known_outcome
        self._several = drafting if isinstance(drafting, Drafts) else None
        self._each: tuple[Drafting, ...] = ()
        if drafting is not None:
            self._each = drafting.each if isinstance(drafting, Drafts) else (drafting,)
        self._probes = probes
        self._named = named
        self._histories: dict[int, DraftHistory] = {}
        self._cut: dict[int, DraftTree] = {}  # proposals that were verified in part
        # By draft with a trial under way: what has come of it, None before its answer.
        self._trials: dict[int, list[Tried] | None] = {}
        self._num_changes = [0] * len(self._each)

    def plan(
        self, sequences: Sequence[RequestSequence], other_rows: int = 0, is_ahead: bool = False
    ) -> Plan:
        """Tree nodes that sequences should verify in the coming step, in which all of them decode.

        Args:
            other_rows: Rows of prompts in the same step.
            is_ahead: The step is to be started behind one under way.
        """
        available = [one.available for one in self._each]
        if not any(available):
            return Plan([0] * len(sequences), 1)
        controller = self.controller
        for number in list(self._trials):
            self._judge(number, len(sequences))
        if controller.rests_on and not self._probes:
            for one in self._each:
                one.is_resting, one.is_deaf = True, controller.is_deaf
            return Plan([0] * len(sequences), 1)
        for number, one in enumerate(self._each):
            is_first = one.is_cheap
            controller.drafts[number] = controller.drafts[number]._replace(
                is_asked_first=is_first, is_beside=controller.is_padded and not is_first
            )
        wanted = [self._want(one, available) for one in sequences]
        plan = controller.plan(wanted, other_rows, is_ahead)
        if self._several is not None:
            self._assign(self._several, sequences, wanted)
        for number, one in enumerate(self._each):
            one.is_resting, one.is_deaf = not controller.is_drafting[number], False
        for number, tried in plan.tried.items():
            self._trials[number] = None
            limits = dict.fromkeys(tried, controller.drafts[number].max_nodes)
            self._each[number].ask(
                [
                    Wanted(one, min(limits.get(i, 0), self.limit(one)), is_trial=True)
                    for i, one in enumerate(sequences)
                ],
                (),
            )
        return plan

    def trees(self, slots: Sequence[DecodeSlot], drafted: dict[int, Drafted]) -> list[DraftTree]:
        """What of the proposals is worth verifying; a draft that costs something was asked for no more than that."""
        proposals = [drafted.get(slot.seq.request_id, NOTHING) for slot in slots]
        trees = [proposal.tree for proposal in proposals]
        if not any(slot.max_tree_nodes for slot in slots):
            return trees
        numbers = [self._number(slot.seq) for slot in slots]
        MIXED_STEPS.inc(len({n for n, tree in zip(numbers, trees, strict=True) if tree.tokens}) > 1)
        first = [self._each[number].is_cheap for number in numbers]
        if not any(first):
            return trees
        offers = [
            Offer(
                self._history(slot.seq),
                len(proposal.tree) * is_first,
                proposal.confidence,
                slot.seq.request_id in self._probes,
                is_first and slot.max_tree_nodes > 0,
            )
            for slot, proposal, is_first in zip(slots, proposals, first, strict=True)
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

    def wait(
        self, slots: Sequence[DecodeSlot], drafted: dict[int, Drafted], seconds: float
    ) -> Wait:
        """What a step waited for that took `seconds` to begin."""
        asked: dict[int, list[int]] = {}
        for slot in slots:
            if slot.max_tree_nodes:
                asked.setdefault(self._number(slot.seq), []).append(slot.max_tree_nodes)
        waits = {0: seconds}
        if self._several is not None:
            waits = self._several.waits
            # Planning, which no step waits for that a draft follows on the device.
            rest = max(seconds - max(waits.values(), default=0.0), 0.0)
            waits = {number: waited + rest for number, waited in waits.items()}
        parts = []
        for number, waited in waits.items():
            one, nodes = self._each[number] if self._each else None, asked.get(number)
            if one is None or not nodes or not (drafted or one.is_cheap):
                continue
            levels = 1 if one.is_cheap else min(max(nodes), one.depth)
            parts.append((number, Wait(levels, len(nodes), waited, lead=seconds)))
        if not parts:
            return NO_WAIT._replace(lead=seconds)
        levels = max(part.levels for _, part in parts)
        sequences = sum(part.sequences for _, part in parts)
        return Wait(levels, sequences, seconds, tuple(parts), seconds)

    def draft_everything(self) -> None:
        """From now on the whole tree is drafted in each step, whether it pays or not: for benchmarks."""
        self.controller.draft_everything()

    def draft_of(self, sequence: RequestSequence) -> str:
        """Name of the draft that drafted for a sequence last, where there are several."""
        return "" if self._several is None else self._several.names[self._number(sequence)]

    def publish(self, metrics: AnyMetrics) -> None:
        """Says which drafts are attached, and how many sequences each drafts for."""
        if self._several is None:
            metrics.of("").available.set(any(one.available for one in self._each))
            return
        given = list(self._several.assigned.values())
        for number, (name, one) in enumerate(zip(self._several.names, self._each, strict=True)):
            figures = metrics.of(name)
            figures.available.set(one.available)
            figures.sequences.set(given.count(number))
            figures.changes.inc(self._num_changes[number])
            self._num_changes[number] = 0

    @property
    def records_all(self) -> bool:
        """Whether `record` wants outcomes of steps without a tree too; with several drafts, each of them counts its own."""
        return bool(self._cut) or self._several is not None

    def record(self, rows: VerifyRows, accepted: Sequence[int], tokens: Sequence[int]) -> None:
        """Takes the outcome of one verification: which nodes were right, and all tokens that it gave."""
        if not (rows.tree.tokens or self._cut):  # as in most plain steps
            return
        num_nodes, brought = len(rows.tree), len(accepted)
        cut = self._cut.pop(rows.sequence.request_id, None)
        if cut is not None:
            num_nodes, accepted = known_outcome(cut, tokens)
        if num_nodes:
            number, history = self._number(rows.sequence), self._history(rows.sequence)
            self.controller.record(history, num_nodes, accepted, rows.confidence, brought, number)

    def forget(self, sequence: RequestSequence) -> None:
        """The sequence has ended."""
        self._cut.pop(sequence.request_id, None)
        history = self._histories.pop(sequence.request_id, None)
        if history is not None:
            self.controller.forget(history)

    def observe(self, batch: int, num_rows: int, seconds: float, tokens: int, wait: Wait) -> None:
        """Takes a step that only decoded; `num_rows` of all sequences, see `Observed` for the rest."""
        controller = self.controller
        if not self._each or controller.passes(seconds + wait.lead):
            return
        if self._several is not None and wait.levels and not wait.parts:
            wait = wait._replace(parts=((self._several.followed_draft, wait),))
        rows = num_rows // batch if controller.is_padded else num_rows
        controller.observe(Observed(batch, rows, seconds, tokens, wait))

    def interrupted(self, wait: Wait) -> None:
        """Takes a step with prompts."""
        self.controller.interrupted(wait)

    def _want(self, sequence: RequestSequence, available: Sequence[bool]) -> Want:
        limit = self.limit(sequence)
        history = self._history(sequence)
        is_probe, left = sequence.request_id in self._probes, sequence.num_output_left
        if self._several is None:
            behind = self._each[0].behind(sequence)
            return Want(history, limit, is_probe, behind, left, len(sequence.tokens))
        name, names = self._named(sequence), self._several.names
        limits = [
            min(limit, kind.max_nodes) if is_there and name in ("", own) else 0
            for kind, own, is_there in zip(self.controller.drafts, names, available, strict=True)
        ]
        behinds = [one.behind(sequence) for one in self._each]
        context = len(sequence.tokens)
        return Want(history, limit, is_probe, 0, left, context, limits, behinds)

    def limit(self, sequence: RequestSequence) -> int:
        """Nodes that a tree of a sequence may have."""
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
        return 0 if self._several is None else self._several.proposer(sequence)

    def _assign(
        self, drafts: Drafts, sequences: Sequence[RequestSequence], wanted: Sequence[Want]
    ) -> None:
        for sequence, want in zip(sequences, wanted, strict=True):
            number = max(want.history.chosen, 0)
            before = drafts.assigned.get(sequence.request_id, number)
            self._num_changes[number] += number != before
            drafts.assigned[sequence.request_id] = number

    def _judge(self, number: int, batch: int) -> None:
        """Tells the controller what has come of a trial, once all of it is known: those that are wrong are known first."""
        drafting, found = self._each[number], self._trials[number]
        if found is None:
            if not drafting.has_tried():
                return
            found = self._trials[number] = drafting.take_tried()
        outcomes = []
        for tried in found:
            tree, sequence = tried.drafted.tree, tried.sequence
            num_known, right = self.judge(tree, sequence.tokens[tried.position :])
            if num_known == len(tree):
                outcomes.append((sequence, tried.drafted, right))
            elif sequence.status is Status.RUNNING:
                return
        del self._trials[number]
        for sequence, drafted, right in outcomes:
            if (history := self._histories.get(sequence.request_id)) is not None:
                offer = Offer(history, len(drafted.tree), drafted.confidence)
                self.controller.tried(offer, number, len(drafted.tree), right, batch)
        self.controller.ended_trial(number)


def known_outcome(tree: DraftTree, tokens: Sequence[int]) -> tuple[int, list[int]]:
    """What tokens say of a tree that was not verified, or in part: they follow its root.

    Returns:
        How many leading nodes they judge, and the nodes that were right.
    """
    children: Mapping[tuple[int, int], int] = {
        (parent, token): node
        for node, (token, parent) in reversed(
            list(enumerate(zip(tree.tokens, tree.parents, strict=True)))
        )
    }
    at = -1
    right: list[int] = []
    for token in tokens:
        node = children.get((at, token))
        if node is None:
            return len(tree), right
        right.append(node)
        at = node
    num_known = next((i for i, parent in enumerate(tree.parents) if parent == at), len(tree))
    return num_known, right
