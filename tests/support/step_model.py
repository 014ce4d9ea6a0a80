"""A model of what steps cost and bring, for policies: times from a table, acceptance from a seeded generator, no clock."""

import functools
import heapq
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verify_service.acceptance import DraftHistory
from verify_service.draft_plan import Observed, Wait, Want
from verify_service.draft_policy import DraftPolicy
from verify_service.step_time import GridTimes, RowTimes, StepTimes

TABLES = Path(__file__).parents[2] / "benchmarks/step_tables"
STALL = 0.01  # seconds
SIBLINGS = 0.3  # of a node's acceptance that the next of its siblings has


@dataclass(frozen=True)
class StepModel:
    """Seconds of steps.

    Attributes:
        target: By rows in all, or by (batch, rows of each sequence) where `is_padded`.
        draft: [seconds of a step, of each level, and of each sequence in each level].
        tree: (steps, topk, nodes) of the largest tree.
        change: Seconds that a change between steps with drafts and without takes besides.
    """

    name: str
    is_padded: bool
    target: dict[Any, float]
    draft: tuple[float, float, float]
    tree: tuple[int, int, int]
    change: float = 0.0

    @classmethod
    def from_json(cls, path: Path, tree: tuple[int, int, int]) -> "StepModel":
        """Reads a table: {"rows": {"1": ms, ...}} or {"grid": {"1x4": ms, ...}}, with {"draft": [ms, ms, ms]}."""
        table = json.loads(path.read_text())
        kept: dict[Any, float]
        if "grid" in table:
            shapes = {
                tuple(map(int, key.split("x"))): ms * 1e-3 for key, ms in table["grid"].items()
            }
            kept = {key: ms for key, ms in shapes.items() if key[1] <= tree[2] + 1}
        else:
            kept = {int(key): ms * 1e-3 for key, ms in table["rows"].items()}
        step, level, row = (ms * 1e-3 for ms in table["draft"])
        change = table.get("change", 0.0) * 1e-3
        return cls(path.stem, "grid" in table, kept, (step, level, row), tree, change)

    def times(self, error: Callable[[], float] = lambda: 1.0) -> StepTimes:
        """The table as measured at start, every entry wrong by a factor `error()`."""
        if self.is_padded:
            return GridTimes({shape: seconds * error() for shape, seconds in self.target.items()})
        widths = sorted(self.target)
        return RowTimes(widths, [self.target[width] * error() for width in widths])

    def seconds(self, batch: int, rows: int) -> float:
        """Of the target's part of a step; `rows` of each sequence where steps are padded, else of all."""
        return self._exact.seconds(batch, rows)

    @functools.cached_property
    def _exact(self) -> StepTimes:
        return self.times()

    def draft_seconds(self, num_sequences: int, levels: int) -> float:
        """The wait for trees of so many levels for so many sequences."""
        step, level, row = self.draft
        # A captured draft step always drafts all its levels.
        levels = self.tree[0] if self.is_padded and levels else levels
        return step + levels * (level + row * num_sequences) if levels else 0.0


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


def expected_rate(model: StepModel, batch: int, nodes: int, acceptance: float) -> float:
    """Tokens per second with trees of always the same size."""
    parents, ranks = tree_shape(model.tree)
    tokens = 1.0
    right: list[float] = []
    for parent, rank in zip(parents[:nodes], ranks[:nodes], strict=True):
        above = 1.0 if parent < 0 else right[parent]
        right.append(above * _share(acceptance, rank))
        tokens += right[-1]
    rows = 1 + nodes if model.is_padded else batch * (1 + nodes)
    levels = min(nodes, model.tree[0])
    seconds = model.seconds(batch, rows) + model.draft_seconds(batch, levels)
    return batch * tokens / seconds


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
    """A sequence that runs."""

    history: DraftHistory = field(default_factory=DraftHistory)
    num_left: int = 512


@dataclass(slots=True)
class Trace:
    """What steps gave: for each its end in seconds, its tokens, its rows per sequence and the batch."""

    ends: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)

    def rate(self, start: float, end: float) -> float:
        """Tokens per second of the steps within [start, end]."""
        inside = [i for i, at in enumerate(self.ends) if start < at <= end]
        seconds = self.ends[inside[-1]] - self.ends[inside[0]]
        return sum(self.tokens[i] for i in inside[1:]) / seconds

    def windows(self, model: StepModel, width: float = 1.0) -> list[tuple[float, float]]:
        """(start, ratio to plain decoding) of the window that begins with each step: the time that its tokens would have
        taken plainly at the same batches, over the time that it took."""
        plain = {b: model.seconds(b, 1 if model.is_padded else b) / b for b in set(self.batches)}
        worth = [tokens * plain[b] for tokens, b in zip(self.tokens, self.batches, strict=True)]
        found, last, total = [], 0, 0.0
        for first, start in enumerate([0.0, *self.ends[:-1]]):
            while last < len(self.ends) and self.ends[last] - start <= width:
                total += worth[last]
                last += 1
            if last == len(self.ends):
                break
            if last > first:
                found.append((start, total / (self.ends[last - 1] - start)))
                total -= worth[first]
        return found


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
    trace, now = Trace(), 0.0
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
        wanted = [Want(one.history, min(num_nodes, one.num_left - 1)) for one in answers]
        nodes, rows = policy(wanted)
        is_change = any(nodes) != was_drafted
        if is_change and late:
            # The outcome of the step under way is waited for, and the policy asked again.
            late.pop()()
            nodes, rows = policy(wanted)
        is_change = any(nodes) != was_drafted
        was_drafted = any(nodes)
        levels = min(max(nodes), steps)
        outcomes = []
        for one, num in zip(answers, nodes, strict=True):
            acceptance = rates.setdefault(id(one), rng.uniform(*load.acceptance))
            path: list[int] = []
            if num:
                shape = prefixes.setdefault(num, (parents[:num], ranks[:num]))
                path = accepted_nodes(*shape, acceptance, rng)[: one.num_left - 1]
            outcomes.append((one.history, num, path))
            one.num_left -= len(path) + 1
        tokens = sum(len(path) + 1 for _, _, path in outcomes)
        num_rows = rows if model.is_padded else batch + sum(nodes)
        factor = max(0.7, rng.gauss(1, noise))
        target = factor * model.seconds(batch, num_rows) + STALL * (rng.random() < 0.002)
        drafted = batch if model.is_padded else sum(map(bool, nodes))
        draft = factor * model.draft_seconds(drafted, levels)
        if is_change:
            draft += model.change
        now += target + draft
        took = (batch, num_rows, target, tokens, levels, drafted, draft)

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
                answers[i] = Answer(num_left=answer)
        trace.ends.append(now)
        trace.tokens.append(tokens)
        trace.rows.append(rows)
        trace.batches.append(batch)
    return trace


class Policy:
    """The policy under test."""

    def __init__(self, policy: DraftPolicy, *, overlapped: bool) -> None:
        self.policy, self.overlapped = policy, overlapped

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
    ) -> None:
        """A step's times."""
        if self.overlapped:
            step = Observed(batch, rows, target + draft, tokens, Wait(levels, drafted, None))
        else:
            step = Observed(batch, rows, target, tokens, Wait(levels, drafted, draft))
        self.policy.observe(step)

    def outcome(self, history: DraftHistory, num_nodes: int, accepted: list[int]) -> None:
        """What a tree brought."""
        self.policy.record(history, num_nodes, accepted)
