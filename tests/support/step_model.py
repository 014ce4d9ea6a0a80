"""A model of what steps cost and bring, for policies: times from a table, acceptance from a seeded generator, no clock."""

import functools
import heapq
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from foredraft.runner.decode_graphs import row_sizes
from verify_service.policy.acceptance import DraftHistory
from verify_service.policy.messages import Observed, Wait, Want
from verify_service.policy.policy import DraftPolicy
from verify_service.policy.step_time import GridTimes, RowTimes, StepTimes

TABLES = Path(__file__).parents[2] / "benchmarks/step_tables"
STALL = 0.01  # seconds
PROMPT = 256  # tokens, which a draft reads with the first tree that it is asked for
SIBLINGS = 0.3  # of a node's acceptance that the next of its siblings has


@dataclass(frozen=True)
class StepModel:
    """Seconds of steps.

    Attributes:
        target: By rows in all, or by (batch, rows of each sequence) where `is_padded`; as measured at start.
        draft: [seconds of a step, of each level, and of each sequence in each level]; not where `is_padded`.
        tree: (steps, topk, nodes) of the largest tree.
        extra: By (batch, rows), what a real step takes beyond the one measured at start, its draft included.
        context: Seconds that a token of context adds to a step.
        change: Seconds of a change between steps with drafts and without, and besides for each sequence asked.
        read: Seconds of letting a draft read what it was not told of, and of each token.
    """

    name: str
    is_padded: bool
    target: dict[Any, float]
    draft: tuple[float, float, float]
    tree: tuple[int, int, int]
    extra: dict[tuple[int, int], float] = field(default_factory=dict)
    context: float = 0.0
    change: tuple[float, float] = (0.0, 0.0)
    read: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def from_json(cls, path: Path, tree: tuple[int, int, int]) -> "StepModel":
        """Reads a table of milliseconds: {"rows": {"1": ...}, "draft": [...]} or as h200.json says of itself."""
        table = json.loads(path.read_text())
        if "rows" in table:
            rows = {int(key): ms * 1e-3 for key, ms in table["rows"].items()}
            step, level, row = (ms * 1e-3 for ms in table["draft"])
            return cls(path.stem, False, rows, (step, level, row), tree)
        target = {
            (int(batch), rows): of_rows[str(rows)] * 1e-3
            for batch, of_rows in table["grid"].items()
            for rows in row_sizes(int(batch), tree[2] + 1)
        }
        extra = {(int(batch), 1): ms * 1e-3 for batch, ms in table["real"].items()}
        for batch, of_rows in table["drafts"]["/".join(map(str, tree))].items():
            extra |= {(int(batch), int(rows)): ms * 1e-3 for rows, ms in of_rows.items()}
        change, asked = (ms * 1e-3 for ms in table["change"])
        read, token = (ms * 1e-3 for ms in table["read"])
        return cls(
            path.stem, True, target, (0.0, 0.0, 0.0), tree,
            extra, table["context"] * 1e-3, (change, asked), (read, token),
        )  # fmt: skip

    def times(self, error: Callable[[], float] = lambda: 1.0) -> StepTimes:
        """The table as measured at start, every entry wrong by a factor `error()`."""
        if self.is_padded:
            return GridTimes({shape: seconds * error() for shape, seconds in self.target.items()})
        widths = sorted(self.target)
        return RowTimes(widths, [self.target[width] * error() for width in widths])

    def seconds(self, batch: int, rows: int, context: float = 0.0) -> float:
        """Of the target's part of a step; where steps are padded, of a whole one.

        Args:
            rows: Of each sequence where steps are padded, else of all.
            context: Tokens of all sequences.
        """
        return self._exact.seconds(batch, rows) + self._extra(batch, rows) + self.context * context

    @functools.cached_property
    def _exact(self) -> StepTimes:
        return self.times()

    def _extra(self, batch: int, rows: int) -> float:
        """Between batches that were measured, interpolated; of the next larger rows that were."""
        if not self.extra:
            return 0.0
        key = batch, rows
        if key not in self._extras:
            kind = [one for one in self.extra if (one[1] > 1) == (rows > 1)]
            known = sorted({one[0] for one in kind})
            seconds = []
            for size in known:
                sizes = [one[1] for one in kind if one[0] == size]
                nearest = min(sizes, key=lambda n: (n < rows, abs(n - rows)))
                seconds.append(self.extra[size, nearest])
            self._extras[key] = float(np.interp(batch, known, seconds))
        return self._extras[key]

    @functools.cached_property
    def _extras(self) -> dict[tuple[int, int], float]:
        return {}

    def draft_seconds(self, num_sequences: int, levels: int) -> float:
        """The wait for trees of so many levels for so many sequences; where steps are padded it is in their own time."""
        step, level, row = self.draft
        return step + levels * (level + row * num_sequences) if levels else 0.0

    def change_seconds(self, num_asked: int, num_unread: int) -> float:
        """What a change between steps with drafts and without takes besides.

        Args:
            num_asked: Sequences that are drafted for.
            num_unread: Tokens that the draft has to read for them first.
        """
        seconds = self.change[0] + self.change[1] * num_asked
        return seconds + (self.read[0] + self.read[1] * num_unread if num_unread else 0.0)


def tree_shape(tree: tuple[int, int, int]) -> tuple[list[int], list[int]]:
    """Parents and ranks among siblings of the nodes of a tree in order of value, as a draft sure of 0.6 would order them."""
    steps, topk, num_nodes = tree
    parents: list[int] = []
    ranks: list[int] = []
    depths: list[int] = []
    heap = [(-0.6, -1, 0, 1)]  # value, parent, rank, depth
    while heap and len(parents) < num_nodes:
        value, parent, rank, depth = heapq.heappop(heap)
        node = len(parents)
        parents.append(parent)
        ranks.append(rank)
        depths.append(depth)
        if rank + 1 < topk:
            heapq.heappush(heap, (value * SIBLINGS, parent, rank + 1, depth))
        if depth < steps:
            heapq.heappush(heap, (value * 0.6, node, 0, depth + 1))
    return parents, ranks


def expected_tokens(model: StepModel, nodes: int, acceptance: float) -> float:
    """Tokens of a step of one sequence on average, with a tree of so many nodes."""
    parents, ranks = tree_shape(model.tree)
    tokens = 1.0
    right: list[float] = []
    for parent, rank in zip(parents[:nodes], ranks[:nodes], strict=True):
        above = 1.0 if parent < 0 else right[parent]
        right.append(above * _share(acceptance, rank))
        tokens += right[-1]
    return tokens


def fixed_seconds(model: StepModel, batch: int, nodes: int, context: float) -> float:
    """Of a step with trees of always the same size."""
    rows = 1 + nodes if model.is_padded else batch * (1 + nodes)
    levels = min(nodes, model.tree[0])
    return model.seconds(batch, rows, context) + model.draft_seconds(batch, levels)


def sizes(model: StepModel, batch: int) -> list[int]:
    """Nodes that trees of a step can be of one size of; 0 first."""
    times = model.times()
    if isinstance(times, GridTimes):
        return [rows - 1 for rows in times.rows(batch)]
    return list(range(model.tree[2] + 1))


def _share(acceptance: float, rank: int) -> float:
    if rank == 0:
        return acceptance
    return min(
        acceptance * SIBLINGS**rank, (1 - acceptance) * (1 - SIBLINGS) * SIBLINGS ** (rank - 1)
    )


def accepted_nodes(
    parents: Sequence[int], ranks: Sequence[int], acceptance: float, rng: random.Random
) -> list[int]:
    """A walk: the target's token is a node's first child with probability `acceptance`, later ones are rarer."""
    path: list[int] = []
    at = -1
    while True:
        draw, rank = rng.random(), 0
        while rank < 8 and draw >= (share := _share(acceptance, rank)):
            draw -= share
            rank += 1
        at = next(
            (i for i, of in enumerate(zip(parents, ranks, strict=True)) if of == (at, rank)), -1
        )
        if at < 0:
            return path
        path.append(at)


@dataclass(slots=True)
class Answer:
    """A sequence that runs; its draft has not read the last `behind` tokens."""

    history: DraftHistory = field(default_factory=DraftHistory)
    num_left: int = 512
    context: int = PROMPT
    behind: int = PROMPT


class TraceStep(NamedTuple):
    """What a step gave: its end and length in seconds, its sequences, rows of each, tokens and context of all."""

    end: float
    seconds: float
    batch: int
    rows: int
    tokens: int
    context: int


@dataclass(slots=True)
class Trace:
    """The steps of a run."""

    model: StepModel
    steps: list[TraceStep] = field(default_factory=list)

    def rate(self, start: float, end: float) -> float:
        """Tokens per second of the steps within [start, end]."""
        inside = self._within(start, end)
        return sum(step.tokens for step in inside) / sum(step.seconds for step in inside)

    def fixed_rate(self, start: float, end: float, nodes: int, acceptance: float) -> float:
        """The same with trees of always the same size, at the contexts of these steps."""
        inside, tokens = self._within(start, end), expected_tokens(self.model, nodes, acceptance)
        work = sum(
            step.seconds * step.batch / fixed_seconds(self.model, step.batch, nodes, step.context)
            for step in inside
        )
        return tokens * work / sum(step.seconds for step in inside)

    def of_plain(self, start: float, end: float) -> float:
        """The rate as a share of plain decoding's."""
        return self.rate(start, end) / self.fixed_rate(start, end, 0, 0.0)

    def of_best(self, start: float, end: float, acceptance: float) -> float:
        """The rate as a share of that of the best size, none included, for the batch of the last step within."""
        batch = self._within(start, end)[-1].batch
        rates = [self.fixed_rate(start, end, n, acceptance) for n in sizes(self.model, batch)]
        return self.rate(start, end) / max(rates)

    def windows(self, width: float = 1.0) -> list[tuple[float, float]]:
        """(start, ratio to plain decoding) of the window that begins with each step: the time that its tokens would have
        taken plainly at the same batches, over the time that it took."""
        worth = [
            step.tokens * fixed_seconds(self.model, step.batch, 0, step.context) / step.batch
            for step in self.steps
        ]
        found, last, total = [], 0, 0.0
        for first, step in enumerate(self.steps):
            start = step.end - step.seconds
            while last < len(self.steps) and self.steps[last].end - start <= width:
                total += worth[last]
                last += 1
            if last == len(self.steps):
                break
            if last > first:
                found.append((start, total / (self.steps[last - 1].end - start)))
                total -= worth[first]
        return found

    def _within(self, start: float, end: float) -> list[TraceStep]:
        return [step for step in self.steps if start < step.end <= end]


@dataclass(frozen=True, slots=True)
class Load:
    """From `start` seconds on: so many sequences, drafts right so often; of each sequence, drawn from a range."""

    start: float
    batch: int
    acceptance: tuple[float, float]


def simulate(
    model: StepModel,
    policy: "Policy",
    loads: Sequence[Load],
    seconds: float,
    *,
    seed: int = 0,
    noise: float = 0.03,
    answer: int = 512,
) -> Trace:
    """Runs a policy against the model.

    Args:
        noise: Standard deviation of a step's time; one step in 500 stalls besides.
        answer: Tokens of an answer; then another sequence takes its place.
    """
    rng = random.Random(seed)
    parents, ranks = tree_shape(model.tree)
    prefixes: dict[int, tuple[list[int], list[int]]] = {}
    trace, now = Trace(model), 0.0
    answers: list[Answer] = []
    rates: dict[int, float] = {}
    pending, was_drafted = list(loads), False
    steps, _, num_nodes = model.tree
    late: list[Callable[[], None]] = []  # what the policy is told of the newest step
    while now < seconds:
        while pending and pending[0].start <= now:
            load = pending.pop(0)
            rates.clear()
            del answers[load.batch :]
            while len(answers) < load.batch:
                answers.append(Answer(num_left=rng.randint(1, answer)))
        batch = len(answers)
        wanted = [
            Want(
                one.history,
                min(num_nodes, one.num_left - 1),
                behind=one.behind * model.is_padded,
                context=one.context,
            )
            for one in answers
        ]
        nodes, rows = policy(wanted)
        # A step of whom the draft has read all can be started before the one before it has ended.
        can_follow = was_drafted and not any(one.behind for one in answers)
        is_change = any(nodes) and not can_follow
        if (is_change or was_drafted != any(nodes)) and late:
            # The outcome of the step under way is waited for, and the policy asked again.
            late.pop()()
            nodes, rows = policy(wanted)
            is_change = any(nodes) and not can_follow
        levels = min(max(nodes), steps)
        outcomes, unread = [], 0
        for one, num in zip(answers, nodes, strict=True):
            acceptance = rates.setdefault(id(one), rng.uniform(*load.acceptance))
            path: list[int] = []
            unread += one.behind * (num > 0)
            one.behind *= num == 0
            if num:
                shape = prefixes.setdefault(num, (parents[:num], ranks[:num]))
                path = accepted_nodes(*shape, acceptance, rng)[: one.num_left - 1]
            outcomes.append((one.history, num, path))
            tokens = len(path) + 1
            one.num_left -= tokens
            one.context += tokens
            one.behind += tokens * (num == 0)
        tokens = sum(len(path) + 1 for _, _, path in outcomes)
        context = sum(one.context for one in answers)
        num_rows = rows if model.is_padded else batch + sum(nodes)
        num_asked = sum(map(bool, nodes))
        factor = max(0.7, rng.gauss(1, noise))
        target = factor * model.seconds(batch, num_rows, context)
        target += STALL * (rng.random() < 0.002)
        draft = factor * model.draft_seconds(num_asked, levels)
        if is_change:
            draft += model.change_seconds(num_asked, unread)
        elif was_drafted and not any(nodes):
            draft += model.change_seconds(0, 0)
        now += target + draft
        took = (batch, num_rows, target, tokens, levels, num_asked, draft, is_change)
        was_drafted = any(nodes)

        def tell(took: Any = took, outcomes: Any = tuple(outcomes)) -> None:
            policy.took(*took)
            for outcome in outcomes:
                policy.outcome(*outcome)

        if late:
            late.pop()()
        if policy.overlapped:
            late.append(tell)
        else:
            tell()
        for i, one in enumerate(answers):
            if one.num_left <= 0:
                rates.pop(id(one), None)
                answers[i] = Answer(num_left=answer, behind=PROMPT * (not was_drafted))
        rows_each = num_rows if model.is_padded else num_rows // batch
        trace.steps.append(TraceStep(now, target + draft, batch, rows_each, tokens, context))
    return trace


class Policy:
    """The policy under test."""

    def __init__(self, policy: DraftPolicy, model: StepModel) -> None:
        self.policy, self.overlapped, self.depth = policy, model.is_padded, model.tree[0]

    def __call__(self, wanted: list[Want]) -> tuple[list[int], int]:
        return self.policy.plan(wanted)

    def took(
        self,
        batch: int,
        rows: int,
        target: float,
        tokens: int,
        levels: int,
        drafted: int,
        draft: float,
        is_waited_for: bool,
    ) -> None:
        """A step's times."""
        if self.overlapped and levels and not is_waited_for:
            # A captured draft step always drafts all its levels.
            levels = self.depth
            step = Observed(batch, rows, target + draft, tokens, Wait(levels, drafted, None))
        else:
            step = Observed(batch, rows, target, tokens, Wait(levels, drafted, draft))
        self.policy.observe(step)

    def outcome(self, history: DraftHistory, num_nodes: int, accepted: list[int]) -> None:
        """What a tree brought."""
        self.policy.record(history, num_nodes, accepted)
