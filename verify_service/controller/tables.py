"""Seconds of one target forward as measured at start: by rows in all, or by padded shapes; and which trees a step may have."""

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from verify_service.controller.acceptance import Array, Ladder

S = TypeVar("S")

FINE_SIZES = 12  # trees whose sizes are told apart one by one, where each row costs
BUSY_TOLERANCE = 1.1  # of times measured at start, against CPU time


class Choices(NamedTuple):
    """Sets of nodes that a step may verify.

    Attributes:
        added: Expected accepted nodes of each set.
        rows: Rows of the step, as `Table.seconds` wants them.
        levels: Levels of the deepest tree, at most.
        nodes: Gives the nodes of each sequence for a set.
    """

    added: Array
    rows: Array
    levels: Array
    nodes: Callable[[int], list[int]]


class Table(Protocol):
    """Seconds of target steps."""

    is_padded: bool

    def plain_rows(self, batch: int) -> int:
        """Rows of a step without drafts, as `seconds` wants them."""

    def seconds(self, batch: int, rows: int) -> float:
        """Seconds of a step of `batch` sequences: with `rows` rows of each where steps are padded, else with so many in all."""

    def many(self, batch: int, rows: Array) -> Array:
        """The same for several numbers of rows."""

    def bucket(self, batch: int, rows: int) -> int:
        """Rows of each sequence that a step with so many has."""

    def ladder(self, max_nodes: int) -> Ladder:
        """The sizes of trees that it makes sense to tell apart."""

    def choices(self, gains: Array, ladder: Ladder, depth: int, others: int) -> Choices:
        """Sets of nodes of a step.

        Args:
            gains: Expected accepted nodes by sequence and bin; 0 for bins that a sequence may not have.
            depth: Levels of the largest tree; trees of fewer levels have one node in each.
            others: Rows of the step beside the sequences' own.
        """

    @property
    def row(self) -> float:
        """Seconds of one more row where very many are computed."""

    @property
    def unit(self) -> float:
        """Seconds of a plain step of one sequence."""


class RowTable:
    """Rows add up, as on a CPU. A wider forward never counts as faster than a narrower one.

    Args:
        widths: Numbers of rows that were measured, rising.
        seconds: Seconds of each.
    """

    is_padded = False

    def __init__(self, widths: Sequence[int], seconds: Sequence[float]) -> None:
        self._widths = list(widths)
        self._measured = list(seconds)
        self._seconds = rising(self._measured)
        if len(widths) > 1:
            span = self._widths[-1] - self._widths[-2]
            slope = (self._seconds[-1] - self._seconds[-2]) / span
        else:
            slope = 0.0
        self.row = max(slope, 0.0)

    @classmethod
    def measure(
        cls, widths: Sequence[int], run: Callable[[int], float], budget: float = 2.0
    ) -> "RowTable":
        """Calls `run(width)` -> seconds in rounds over all widths and keeps the best of each width.

        After a first round, which warms up, rounds go on for `budget` seconds, five at most.
        """
        return cls(widths, best_of_rounds(widths, run, budget))

    def bounded(self, cpu_seconds: Sequence[float], num_threads: int) -> "RowTable":
        """The same without what was spent waiting for other processes.

        Args:
            cpu_seconds: Of all threads, by width, the least that was seen.
        """
        pairs = list(zip(self._measured, cpu_seconds, strict=True))
        # The width that waited least shows what a second of CPU time takes; with several threads not all work all the time.
        least = min(wall / cpu for wall, cpu in pairs) * BUSY_TOLERANCE * num_threads
        return RowTable(self._widths, [min(wall, least * cpu) for wall, cpu in pairs])

    def plain_rows(self, batch: int) -> int:
        """See `Table`."""
        return batch

    def seconds(self, batch: int, rows: int) -> float:
        """See `Table`."""
        widths, seconds = self._widths, self._seconds
        if rows <= widths[0] or len(widths) == 1:
            return seconds[0]
        i = min(bisect.bisect_left(widths, rows), len(widths) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (widths[i] - widths[i - 1])
        return seconds[i - 1] + slope * (rows - widths[i - 1])

    def many(self, batch: int, rows: Array) -> Array:
        """See `Table`."""
        beyond = np.maximum(rows - self._widths[-1], 0.0)
        found: Array = np.interp(rows, self._widths, self._seconds) + self.row * beyond
        return found

    def bucket(self, batch: int, rows: int) -> int:
        """See `Table`."""
        return rows

    def ladder(self, max_nodes: int) -> Ladder:
        """See `Table`."""
        sizes = set(range(1, min(FINE_SIZES, max_nodes) + 1))
        size = FINE_SIZES
        while size * 4 // 3 < max_nodes:
            size = size * 4 // 3
            sizes.add(size)
        return Ladder(sorted(sizes | {max(max_nodes, 1)}))

    def choices(self, gains: Array, ladder: Ladder, depth: int, others: int) -> Choices:
        """See `Table`: for each number of levels the likeliest nodes first."""
        batch, num_bins = gains.shape
        density = (gains / ladder.widths).ravel()
        order = np.argsort(-density, kind="stable")
        order = order[: np.count_nonzero(density > 0)]
        bins = order % num_bins
        parts, added, rows, levels = [], [], [], []
        depth = min(depth, ladder.sizes[-1])
        for level in range(1, depth + 1):
            within = order if level == depth else order[np.array(ladder.sizes)[bins] <= level]
            parts.append(within)
            added.append(np.cumsum(gains.ravel()[within]))
            rows.append(batch + others + np.cumsum(ladder.widths[within % num_bins]))
            levels.append(np.full(len(within), level, float))
        ends = np.cumsum([len(part) for part in parts])

        def nodes(index: int) -> list[int]:
            which = int(np.searchsorted(ends, index, side="right"))
            start = int(ends[which - 1]) if which else 0
            chosen = [0] * batch
            for item in parts[which][: index - start + 1].tolist():
                i, rung = divmod(item, num_bins)
                chosen[i] = max(chosen[i], ladder.sizes[rung])
            return chosen

        return Choices(np.concatenate(added), np.concatenate(rows), np.concatenate(levels), nodes)

    @property
    def unit(self) -> float:
        """See `Table`."""
        return self._seconds[0]

    def table(self) -> dict[int, float]:
        """Widths and seconds, for logs and benchmarks."""
        return dict(zip(self._widths, self._seconds, strict=True))


class GridTable:
    """Steps are padded to captured shapes, by (sequences, rows of each), as on a GPU.

    Args:
        seconds: By (batch, rows of each sequence); every batch has at least one row.
    """

    is_padded = True

    def __init__(self, seconds: Mapping[tuple[int, int], float]) -> None:
        self._seconds = dict(seconds)
        self._batches = sorted({batch for batch, _ in seconds})
        self._rows = {
            batch: sorted(rows for other, rows in seconds if other == batch)
            for batch in self._batches
        }
        batch = self._batches[-1]
        few, many = self._rows[batch][0], self._rows[batch][-1]
        more = max(many - few, 1) * batch
        self.row = max(self._seconds[batch, many] - self._seconds[batch, few], 0.0) / more

    @classmethod
    def measure(
        cls,
        shapes: Iterable[tuple[int, int]],
        run: Callable[[int, int], float],
        budget: float = 2.0,
    ) -> "GridTable":
        """Calls `run(batch, rows of each)` -> seconds; as `RowTable.measure`."""
        shapes = list(shapes)
        seconds = best_of_rounds(shapes, lambda shape: run(*shape), budget)
        return cls(dict(zip(shapes, seconds, strict=True)))

    def batch(self, num_sequences: int) -> int:
        """The batch that so many sequences are padded to; the largest for more than that."""
        i = bisect.bisect_left(self._batches, num_sequences)
        return self._batches[min(i, len(self._batches) - 1)]

    def rows(self, num_sequences: int) -> list[int]:
        """The captured rows per sequence, rising; the first is the one-row step."""
        return self._rows[self.batch(num_sequences)]

    def plain_rows(self, batch: int) -> int:
        """See `Table`."""
        return 1

    def seconds(self, batch: int, rows: int) -> float:
        """See `Table`."""
        padded = self.batch(batch)
        known = self._rows[padded]
        return self._seconds[padded, known[min(bisect.bisect_left(known, rows), len(known) - 1)]]

    def many(self, batch: int, rows: Array) -> Array:
        """See `Table`."""
        return np.array([self.seconds(batch, int(num)) for num in rows])

    def bucket(self, batch: int, rows: int) -> int:
        """See `Table`."""
        return next(size for size in self.rows(batch) if size >= rows)

    def ladder(self, max_nodes: int) -> Ladder:
        """See `Table`."""
        sizes = {rows - 1 for _, rows in self._seconds if 1 < rows <= max_nodes}
        return Ladder(sorted(sizes | {max(max_nodes, 1)}))

    def choices(self, gains: Array, ladder: Ladder, depth: int, others: int) -> Choices:
        """See `Table`: all sequences have the same number of rows."""
        shapes = [rows for rows in self.rows(len(gains)) if rows > 1]
        totals = np.concatenate([[0.0], np.cumsum(gains.sum(axis=0))])
        added = np.array([totals[ladder.num_within(rows - 1)] for rows in shapes])
        levels = np.array([min(rows - 1, depth) for rows in shapes], float)
        is_within = gains[:, 0] > 0

        def nodes(index: int) -> list[int]:
            return [shapes[index] - 1 if has_any else 0 for has_any in is_within.tolist()]

        return Choices(added, np.array(shapes, float), levels, nodes)

    @property
    def unit(self) -> float:
        """See `Table`."""
        return self._seconds.get((1, 1)) or min(self._seconds.values())

    def table(self) -> dict[tuple[int, int], float]:
        """Shapes and seconds, for logs and benchmarks."""
        return dict(self._seconds)


def best_of_rounds(shapes: Sequence[S], run: Callable[[S], float], budget: float) -> list[float]:
    """The shortest of several runs of each shape, in rounds over all, so that a busy moment slows one of each at most."""
    for shape in shapes:
        run(shape)
    best = [run(shape) for shape in shapes]
    spent = sum(best)
    for _ in range(4):
        if spent > budget:
            break
        times = [run(shape) for shape in shapes]
        best = [min(pair) for pair in zip(best, times, strict=True)]
        spent += sum(times)
    return best


def rising(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in least squares (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        block = (value, 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, count = blocks.pop()
            total = count + block[1]
            block = ((mean * count + block[0] * block[1]) / total, total)
        blocks.append(block)
    return [mean for mean, count in blocks for _ in range(count)]
