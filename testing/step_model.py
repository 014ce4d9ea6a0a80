"""A model of the cost and gain of steps, for policies: times from a table, acceptance from a
seeded generator, no clock.
"""

import functools
import heapq
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verify_service.controller.tables import GridTable, RowTable
from verify_service.executor.captured.shapes import row_sizes

TABLES = Path(__file__).parents[1] / "benchmarks/step_tables"
SIBLINGS = 0.3  # acceptance of a node's next sibling over its own


@dataclass(frozen=True)
class StepModel:
    """Models the seconds of steps.

    Attributes:
        target: Seconds measured at start, by rows in all, or by (batch, rows of each sequence)
            where `is_padded`.
        draft: [seconds of a step, of each level, and of each sequence in each level]; unused where
            `is_padded`.
        tree: (steps, topk, nodes) of the largest tree.
        extra: Additional seconds of a real step over the measured one, its draft included, by
            (batch, rows).
        context: Seconds that a token of context adds to a step, by number of sequences.
        change: Seconds of a change between steps with drafts and without, and further ones for each
            sequence drafted for.
        read: Seconds for a draft to catch up, and for each token that it reads.
        told: Additional seconds of a plain step whose draft is synced while it runs.
        kept: Maximum number of tokens that a draft can be sent later; beyond it all are dropped.
        beside: Share that a draft beside it adds to a step's time, and the step to the draft's.
        host: Seconds of the host for planning a sequence, and for requesting drafts beside steps;
            hidden where steps take longer.
        prompt: Seconds of the target's part of a step with prompts.
        stall: Additional seconds of one step in 500.
        first: Additional seconds of the first three steps of each shape with drafts, as on a card
            that loads kernels then.
    """

    name: str
    is_padded: bool
    target: dict[Any, float]
    draft: tuple[float, float, float]
    tree: tuple[int, int, int]
    extra: dict[tuple[int, int], float] = field(default_factory=dict)
    context: dict[int, float] = field(default_factory=lambda: {1: 0.0})
    change: tuple[float, float] = (0.0, 0.0)
    read: tuple[float, float] = (0.0, 0.0)
    told: float = 0.0
    kept: int = 1 << 30
    beside: float = 0.0
    host: tuple[float, float] = (1.2e-5, 1.5e-4)
    prompt: float = 0.0
    stall: float = 0.01
    first: float = 0.0

    @classmethod
    def from_json(cls, path: Path, tree: tuple[int, int, int]) -> "StepModel":
        """Reads a table of milliseconds: {"rows": {"1": ...}, "draft": [...]}, or in the form
        of h200.json.
        """
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
        context = {int(batch): ms * 1e-3 for batch, ms in table["context"].items()}
        change, asked = (ms * 1e-3 for ms in table["change"])
        read, token = (ms * 1e-3 for ms in table["read"])
        return cls(
            path.stem, True, target, (0.0, 0.0, 0.0), tree,
            extra, context, (change, asked), (read, token), table["told"] * 1e-3, table["kept"], table["beside"],  # noqa: E501
        )  # fmt: skip

    def times(self, error: Callable[[], float] = lambda: 1.0) -> GridTable | RowTable:
        """Returns the table as measured at start, every entry wrong by a factor `error()`."""
        if self.is_padded:
            return GridTable({shape: seconds * error() for shape, seconds in self.target.items()})
        widths = sorted(self.target)
        return RowTable(widths, [self.target[width] * error() for width in widths])

    def seconds(self, batch: int, rows: int, context: float = 0.0) -> float:
        """Returns the seconds of the target's part of a step; where steps are padded, of a
        whole one.

        Args:
            rows: Rows of each sequence where steps are padded, else of all.
            context: Number of tokens of all sequences.
        """
        key = batch, rows
        if key not in self._known:
            per_token = np.interp(batch, list(self.context), list(self.context.values()))
            without = self._exact.seconds(batch, rows) + self._extra(batch, rows)
            self._known[key] = without, float(per_token)
        without, of_token = self._known[key]
        return without + of_token * context

    @functools.cached_property
    def _known(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Seconds without context, and of a token of context, by (batch, rows)."""
        return {}

    @functools.cached_property
    def _exact(self) -> GridTable | RowTable:
        return self.times()

    def _extra(self, batch: int, rows: int) -> float:
        """Returns additional seconds: interpolated between measured batches, for the next
        larger measured rows.
        """
        if not self.extra:
            return 0.0
        kind = [one for one in self.extra if (one[1] > 1) == (rows > 1)]
        known = sorted({one[0] for one in kind})
        seconds = []
        for size in known:
            sizes = [one[1] for one in kind if one[0] == size]
            nearest = min(sizes, key=lambda n: (n < rows, abs(n - rows)))
            seconds.append(self.extra[size, nearest])
        return float(np.interp(batch, known, seconds))

    def draft_seconds(self, num_sequences: int, levels: int) -> float:
        """Returns the wait for trees of this many levels and sequences; where steps are padded
        it is part of their own time.
        """
        step, level, row = self.draft
        return step + levels * (level + row * num_sequences) if levels else 0.0

    def change_seconds(self, num_asked: int, num_unread: int) -> float:
        """Returns the additional seconds of a change between steps with drafts and without.

        Args:
            num_asked: Number of sequences that are drafted for.
            num_unread: Number of tokens that the draft has to read for them first.
        """
        seconds = self.change[0] + self.change[1] * num_asked
        return seconds + (self.read[0] + self.read[1] * num_unread if num_unread else 0.0)


def tree_shape(tree: tuple[int, int, int]) -> tuple[list[int], list[int]]:
    """Returns parents and ranks among siblings of a tree's nodes by value, as a draft sure of
    0.6 would order them.
    """
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
    """Returns the mean tokens of a step of one sequence, with a tree of this many nodes."""
    parents, ranks = tree_shape(model.tree)
    tokens = 1.0
    right: list[float] = []
    for parent, rank in zip(parents[:nodes], ranks[:nodes], strict=True):
        above = 1.0 if parent < 0 else right[parent]
        right.append(above * _share(acceptance, rank))
        tokens += right[-1]
    return tokens


def fixed_seconds(model: StepModel, batch: int, nodes: int, context: float) -> float:
    """Returns the seconds of a step with trees of always the same size."""
    rows = 1 + nodes if model.is_padded else batch * (1 + nodes)
    levels = min(nodes, model.tree[0])
    return model.seconds(batch, rows, context) + model.draft_seconds(batch, levels)


def sizes(model: StepModel, batch: int) -> list[int]:
    """Returns the numbers of nodes that all trees of a step can have; 0 first."""
    times = model.times()
    if isinstance(times, GridTable):
        return [rows - 1 for rows in times.rows(batch)]
    return list(range(model.tree[2] + 1))


@functools.cache
def _share(acceptance: float, rank: int) -> float:
    if rank == 0:
        return acceptance
    return min(
        acceptance * SIBLINGS**rank, (1 - acceptance) * (1 - SIBLINGS) * SIBLINGS ** (rank - 1)
    )


def accepted_nodes(
    tree: Mapping[tuple[int, int], int], num_nodes: int, acceptance: float, rng: random.Random
) -> list[int]:
    """Draws a walk through a tree's first nodes: the target's token is a node's first child with
    probability `acceptance`, later ones are rarer.

    Args:
        tree: Each node by its parent, -1 for the root, and its rank among siblings.
    """
    path: list[int] = []
    at = -1
    while True:
        draw, rank = rng.random(), 0
        # A node's later siblings come after it: where one is missing, all further ones are.
        while (node := tree.get((at, rank), num_nodes)) < num_nodes:
            if draw < (share := _share(acceptance, rank)):
                break
            draw -= share
            rank += 1
        else:
            return path
        path.append(node)
        at = node
