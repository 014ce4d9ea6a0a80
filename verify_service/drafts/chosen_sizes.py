"""Between engine and policies where several drafts are attached: each has a policy of its own, for the sequences given to it."""

import copy
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from foredraft.trees.draft_tree import DraftTree
from verify_service.drafts.drafting import Drafting
from verify_service.drafts.proposals import Drafted, Tried
from verify_service.drafts.several import Drafts
from verify_service.drafts.tree_sizes import TreeSizes
from verify_service.drafts.trial import known_outcome
from verify_service.executor.sampler import VerifyRows
from verify_service.metrics import MIXED_STEPS, AnyMetrics
from verify_service.policy.choice import ChoiceHistory, DraftChoice
from verify_service.policy.messages import NO_WAIT, Offer, Plan, Wait
from verify_service.policy.policy import DraftPolicy
from verify_service.policy.step_time import GridTimes, StepTimes
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.request import Status
from verify_service.scheduler.step_plan import DecodeSlot


@dataclass(frozen=True, slots=True)
class SizeRules:
    """What trees may be, and what is known of steps.

    Attributes:
        times: Of the target's steps; None where the largest trees are always drafted and only one draft is there.
        shapes: Nodes and levels of the largest tree of each draft.
        is_adaptive: Whether policies choose by `times`; otherwise they draft everything.
    """

    times: StepTimes | None
    shapes: Sequence[tuple[int, int]]
    is_adaptive: bool = True

    def policies(self) -> list[DraftPolicy]:
        """One for each draft, each with a table of its own to correct."""
        return [
            DraftPolicy(copy.deepcopy(self.times) if self.is_adaptive else None, nodes, levels)
            for nodes, levels in self.shapes
        ]


@dataclass(slots=True)
class _Share:
    """What the sequences of one draft had of a step."""

    sequences: int = 0
    tokens: int = 0
    nodes: int = 0
    widest: int = 0


class ChosenSizes:
    """Has the interface of `TreeSizes`.

    Args:
        rules: `times` must be there.
        probes: Numbers of requests that are the engine's own, for which everything is drafted.
        named: The draft that a sequence asks for by name, if any.

    Attributes:
        records_all: `record` wants outcomes of steps without a tree too.
    """

    records_all = True

    def __init__(
        self,
        rules: SizeRules,
        drafts: Drafts,
        probes: AbstractSet[int],
        named: Callable[[RequestSequence], str],
    ) -> None:
        assert rules.times is not None
        self._drafts = drafts
        self._times = copy.deepcopy(rules.times)
        self._choice = DraftChoice(len(drafts.each), self._times)
        self._named = named
        self._histories: dict[int, ChoiceHistory] = {}
        self._tried: list[list[Tried]] = [[] for _ in drafts.each]  # not judged yet
        self._shares = [_Share() for _ in drafts.each]
        self._planned: Sequence[RequestSequence] = ()
        self._num_changes = [0] * len(drafts.each)
        self._each = [
            TreeSizes(policy, drafting, nodes, probes, self._serving(number))
            for number, (policy, drafting, (nodes, _)) in enumerate(
                zip(rules.policies(), drafts.each, rules.shapes, strict=True)
            )
        ]

    def plan(
        self, sequences: Sequence[RequestSequence], other_rows: int = 0, is_ahead: bool = False
    ) -> Plan:
        """Gives each sequence a draft, and says what to draft; see `TreeSizes.plan`."""
        batch, drafts = len(sequences), self._drafts
        self._planned = sequences
        self._shares = [_Share() for _ in self._each]
        if not sequences:
            return Plan([], 1)
        if isinstance(self._times, GridTimes):
            self._times.context = sum(len(one.tokens) for one in sequences)
        for number, one in enumerate(drafts.each):
            self._judge(number, one, batch)
        available = [one.available for one in drafts.each]
        counts = [0] * len(available)
        for sequence in sequences:
            counts[self._assign(sequence, available, batch)] += 1
        for number, count in enumerate(counts):
            others = batch - count
            if available[number] and others and self._choice.may_try(number, others):
                drafts.trials[number] = self._each[number].limit
        nodes, rows = [0] * batch, 1
        for number, count in enumerate(counts):
            if not count:
                drafts.each[number].is_resting = True  # it is told of sequences when it is tried
            else:
                # Where steps are padded, other drafts' rows are in no one's way.
                beside = 0 if self._times.is_padded else sum(nodes)
                plan = self._each[number].plan(sequences, other_rows + beside, is_ahead)
                nodes = [a + b for a, b in zip(nodes, plan.nodes, strict=True)]
                rows = max(rows, plan.rows)
        return Plan(nodes, rows)

    def trees(self, slots: Sequence[DecodeSlot], drafted: dict[int, Drafted]) -> list[DraftTree]:
        """What of the proposals is worth verifying."""
        numbers = [self._drafts.proposer(slot.seq) for slot in slots]
        by_draft = {number: self._each[number].trees(slots, drafted) for number in set(numbers)}
        trees = [by_draft[number][i] for i, number in enumerate(numbers)]
        proposed = {number for number, tree in zip(numbers, trees, strict=True) if tree.tokens}
        MIXED_STEPS.inc(len(proposed) > 1)
        return trees

    def wait(
        self, slots: Sequence[DecodeSlot], drafted: dict[int, Drafted], seconds: float
    ) -> Wait:
        """What a step waited for that took `seconds` to begin."""
        parts = []
        waits = self._drafts.waits
        # Planning, which no step waits for that a draft follows on the device.
        rest = max(seconds - max(waits.values(), default=0.0), 0.0)
        for number, waited in waits.items():
            part = self._each[number].wait(slots, drafted, waited + rest)
            if part.levels:
                parts.append((number, part))
        if not parts:
            return NO_WAIT._replace(lead=seconds)
        levels = max(part.levels for _, part in parts)
        sequences_asked = sum(part.sequences for _, part in parts)
        return Wait(levels, sequences_asked, seconds, tuple(parts), seconds)

    @property
    def depth(self) -> int:
        """Levels of a tree that is drafted on the device."""
        return self._drafts.depth

    def draft_everything(self) -> None:
        """From now on the whole tree is drafted in each step, whether it pays or not: for benchmarks."""
        for sizes in self._each:
            sizes.draft_everything()

    def draft_of(self, sequence: RequestSequence) -> str:
        """Name of the draft that drafted for a sequence last."""
        return self._drafts.names[self._drafts.proposer(sequence)]

    def record(self, rows: VerifyRows, accepted: Sequence[int], tokens: Sequence[int]) -> None:
        """Takes the outcome of one verification; see `TreeSizes.record`."""
        sequence, num_nodes = rows.sequence, len(rows.tree)
        number = self._drafts.proposer(sequence)
        self._each[number].record(rows, accepted, tokens)
        history = self._histories.get(sequence.request_id)
        if history is not None and self._each[number].limit(sequence):
            self._choice.record(history, number, num_nodes, len(accepted))
        share = self._shares[number]
        share.sequences += 1
        share.tokens += len(tokens)
        share.nodes += num_nodes
        share.widest = max(share.widest, num_nodes)

    def forget(self, sequence: RequestSequence) -> None:
        """The sequence has ended."""
        self._histories.pop(sequence.request_id, None)
        for sizes in self._each:
            sizes.forget(sequence)

    def observe(self, batch: int, num_rows: int, seconds: float, tokens: int, wait: Wait) -> None:
        """Takes a step that only decoded, after the outcomes of its sequences; see `TreeSizes.observe`."""
        parts = dict(wait.parts)
        if wait.levels and not parts:
            parts = {self._drafts.followed_draft: wait}
        rows = num_rows // batch if self._times.is_padded else num_rows
        expected = self._times.seconds(batch, rows)
        for number, part in parts.items():
            waited = part.seconds
            if waited is None:  # it is in the step's own time
                waited = max(seconds - expected, 0.0)
            self._choice.waited(number, part.sequences, waited)
        self._choice.stepped(seconds + (wait.seconds or 0.0))
        shares, self._shares = self._shares, [_Share() for _ in self._each]
        for number, (sizes, share) in enumerate(zip(self._each, shares, strict=True)):
            part = parts.get(number, NO_WAIT)._replace(lead=wait.lead)
            others = sum(other.nodes for other in shares) - share.nodes
            if not others and len(parts) <= (number in parts):
                sizes.observe(batch, num_rows, seconds, tokens, part)
                continue
            # As if the sequences of other drafts had decoded plainly.
            own_rows = 1 + share.widest if self._times.is_padded else batch + share.nodes
            scale = self._times.seconds(batch, own_rows) / expected
            sizes.observe(
                batch,
                own_rows * batch if self._times.is_padded else own_rows,
                seconds * scale,
                share.tokens + batch - share.sequences,
                part,
            )
        if wait.seconds is not None:
            self._times.observe(batch, rows, seconds)
        if self._drafts.trials:
            # The step behind is on its way already, and asks nobody.
            going = [one for one in self._planned if one.status is Status.RUNNING]
            self._drafts.try_now(going)

    def interrupted(self, batch: int, seconds: float, tokens: int, wait: Wait) -> None:
        """Takes a step with prompts; see `TreeSizes.interrupted`."""
        parts = dict(wait.parts)
        for number, sizes in enumerate(self._each):
            part = parts.get(number, NO_WAIT)._replace(lead=wait.lead)
            sizes.interrupted(batch, seconds, tokens, part)

    def publish(self, metrics: AnyMetrics) -> None:
        """Says which drafts are attached, and how many sequences each drafts for."""
        drafts = self._drafts
        given = list(drafts.assigned.values())
        for number, (name, one) in enumerate(zip(drafts.names, drafts.each, strict=True)):
            figures = metrics.of(name)
            figures.available.set(one.available)
            figures.sequences.set(given.count(number))
            figures.changes.inc(self._num_changes[number])
            self._num_changes[number] = 0

    def _assign(self, sequence: RequestSequence, available: Sequence[bool], batch: int) -> int:
        request, drafts = sequence.request_id, self._drafts
        if name := self._named(sequence):
            drafts.assigned[request] = drafts.names.index(name)
            return drafts.assigned[request]
        history = self._histories.get(request)
        if history is None:
            history = self._choice.begin(available, batch)
            self._histories[request] = history
        before = history.chosen
        number = self._choice.choose(history, available, batch)
        self._num_changes[number] += number != before
        drafts.assigned[request] = number
        return number

    def _judge(self, number: int, drafting: Drafting, batch: int) -> None:
        """Takes what came of trials, as far as the tokens since then say it."""
        if (own := drafting.take_own_time()) is not None:
            self._choice.answered(number, own.sequences, own.usual, own.whole)
        policy, left = self._each[number].policy, []
        for tried in (*self._tried[number], *self._each[number].take_tried()):
            sequence, drafted = tried.sequence, tried.drafted
            history = self._histories.get(sequence.request_id)
            if history is None:
                continue
            tokens = sequence.tokens[tried.position :]
            num_known, right = known_outcome(drafted.tree, tokens)
            if num_known < len(drafted.tree):
                left.append(tried)
                continue
            offer = Offer(drafting.history(sequence), len(drafted.tree), drafted.confidence)
            nodes, brought = policy.tried(offer, num_known, right, batch)
            self._choice.record(history, number, nodes, brought)
        self._tried[number] = left

    def _serving(self, number: int) -> Callable[[RequestSequence], bool]:
        assigned = self._drafts.assigned
        return lambda sequence: assigned.get(sequence.request_id, 0) == number


def sizes_of(
    rules: DraftPolicy | SizeRules,
    drafting: Drafting | Drafts | None,
    max_nodes: int,
    probes: AbstractSet[int],
    named: Callable[[RequestSequence], str],
) -> TreeSizes | ChosenSizes:
    """What the engine asks how much to draft, for one draft or none, or for several."""
    if isinstance(drafting, Drafts):
        assert isinstance(rules, SizeRules)
        return ChosenSizes(rules, drafting, probes, named)
    assert isinstance(rules, DraftPolicy)
    return TreeSizes(rules, drafting, max_nodes, probes)
