"""Tables of the target's seconds, measured at start, by total rows or by padded shapes; and the
trees that a step may have.
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from verify_service.controller.acceptance import Array, SizeBins, falling


class Choices(NamedTuple):
    """Sets of nodes that a step may verify.

    Attributes:
        added: Expected number of accepted nodes of each set.
        rows: Number of rows of the step with each set, as `Table.seconds` takes them.
        levels: Maximum number of levels of each set's trees.
        nodes: Returns the number of nodes of each sequence, for the index of a set.
    """

    added: Array
    rows: Array
    levels: Array
    nodes: Callable[[int], list[int]]


class Table(Protocol):
    """Seconds of target steps.

    Attributes:
        is_padded: Whether all sequences of a step have the same number of rows. True on a GPU
            alone, where steps are captured graphs. Comments here say "on a GPU" and "on a CPU" for
            it: a GPU without captured graphs counts as a CPU.
        row: Seconds of one more row in a step of very many rows.
        unit: Seconds of a plain step of one sequence.
    """

    is_padded: bool
    row: float
    unit: float

    def plain_rows(self, batch: int) -> int:
        """Returns the number of rows of a step without drafts, as `seconds` takes them."""

    def seconds(self, batch: int, rows: int) -> float:
        """Returns the seconds of a step of `batch` sequences.

        `rows` is the number of rows of each sequence where steps are padded, else of all.
        """

    def many(self, batch: int, rows: Array) -> Array:
        """Returns the seconds for several numbers of rows."""

    def bucket(self, batch: int, rows: int) -> int:
        """Returns the number of rows that `rows` rows of each sequence are padded to."""

    def bins(self, max_nodes: int, depth: int = 0) -> SizeBins:
        """Returns the tree sizes to distinguish."""

    def choices(self, gains: Array, bins: SizeBins, depth: int, others: int) -> Choices:
        """Returns the sets of nodes that a step may verify.

        Args:
            gains: Expected accepted nodes by sequence and bin; 0 for bins that a sequence may not
                have.
            bins: Tree sizes of the bins.
            depth: Number of levels of the largest tree; shallower trees have one node per level.
            others: Number of rows of the step beside the sequences' own.
        """


class RowTable:
    """Seconds by the total number of rows, as on a CPU; they never fall as rows are added.

    Args:
        widths: Measured numbers of rows, rising.
        seconds: Seconds for each number of rows.

    Attributes:
        measured: Seconds by width, for logs and benchmarks.
    """

    is_padded = False

    def __init__(self, widths: Sequence[int], seconds: Sequence[float]) -> None:
        self._widths, self._seconds = list(widths), rising(seconds)
        self.measured = dict(zip(widths, self._seconds, strict=True))
        self.unit = self._seconds[0]
        self.row = 0.0
        if len(widths) > 1:
            span = self._widths[-1] - self._widths[-2]
            self.row = (self._seconds[-1] - self._seconds[-2]) / span

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
        return np.interp(rows, self._widths, self._seconds) + self.row * beyond

    def bucket(self, batch: int, rows: int) -> int:
        """See `Table`."""
        return rows

    def bins(self, max_nodes: int, depth: int = 0) -> SizeBins:
        """See `Table`."""
        sizes, size = [], 1  # each about a tenth larger than the one before
        while size < max_nodes:
            sizes.append(size)
            size += 1 + size // 10
        return SizeBins([*sizes, max(max_nodes, 1)], depth)

    def choices(self, gains: Array, bins: SizeBins, depth: int, others: int) -> Choices:
        """See `Table`; for each number of levels, sets take the likeliest nodes first."""
        batch, num_bins = gains.shape
        density = (gains / bins.widths).ravel()
        order = np.argsort(-density, kind="stable")
        order = order[: np.count_nonzero(density > 0)]
        numbers = order % num_bins
        sizes, widths = np.array(bins.sizes)[numbers], bins.widths[numbers]
        depth = min(depth, bins.sizes[-1])
        # [levels, nodes in order]: whether trees of so many levels may have the node.
        within = sizes <= np.arange(1, depth + 1)[:, None]
        within[-1] = True
        counts = within.sum(axis=1)
        ends = counts.cumsum()
        added = np.where(within, gains.ravel()[order], 0.0).cumsum(axis=1)[within]
        rows = np.where(within, widths, 0.0).cumsum(axis=1)[within]
        levels = np.repeat(np.arange(1.0, depth + 1), counts)

        def nodes(index: int) -> list[int]:
            which = int(np.searchsorted(ends, index, side="right"))
            start = int(ends[which - 1]) if which else 0
            chosen = [0] * batch
            for item in order[within[which]][: index - start + 1].tolist():
                i, number = divmod(item, num_bins)
                chosen[i] = max(chosen[i], bins.sizes[number])
            return chosen

        return Choices(added, batch + others + rows, levels, nodes)


class GridTable:
    """Seconds of steps that are padded to captured shapes, as on a GPU.

    Args:
        seconds: Seconds by (batch, rows of each sequence); every batch has at least one row.

    Attributes:
        measured: Seconds by shape, for logs and benchmarks.
    """

    is_padded = True

    def __init__(self, seconds: Mapping[tuple[int, int], float]) -> None:
        self._seconds = self.measured = dict(seconds)
        self.unit = self._seconds.get((1, 1)) or min(self._seconds.values())
        self._batches = sorted({batch for batch, _ in seconds})
        self._rows = {b: [num for of, num in sorted(seconds) if of == b] for b in self._batches}
        batch = self._batches[-1]
        few, many = self._rows[batch][0], self._rows[batch][-1]
        more = max(many - few, 1) * batch
        self.row = max(self._seconds[batch, many] - self._seconds[batch, few], 0.0) / more

    def batch(self, num_sequences: int) -> int:
        """Returns the batch that sequences are padded to; the largest batch for more sequences."""
        i = bisect.bisect_left(self._batches, num_sequences)
        return self._batches[min(i, len(self._batches) - 1)]

    def rows(self, num_sequences: int) -> list[int]:
        """Returns the captured numbers of rows per sequence, rising; the first is 1."""
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
        return np.array([self.seconds(batch, num) for num in rows.tolist()])

    def bucket(self, batch: int, rows: int) -> int:
        """See `Table`."""
        return next(size for size in self.rows(batch) if size >= rows)

    def bins(self, max_nodes: int, depth: int = 0) -> SizeBins:
        """See `Table`."""
        sizes = {rows - 1 for _, rows in self._seconds if 1 < rows <= max_nodes}
        return SizeBins(sorted(sizes | {max(max_nodes, 1)}), depth)

    def choices(self, gains: Array, bins: SizeBins, depth: int, others: int) -> Choices:
        """See `Table`; all sequences have the same number of rows."""
        shapes = self.rows(len(gains))[1:]
        totals = [0.0, *gains.sum(axis=0).cumsum().tolist()]
        added = np.array([totals[bins.num_within(rows - 1)] for rows in shapes])
        rows = np.array(shapes, float)

        def nodes(index: int) -> list[int]:
            return [shapes[index] - 1 if first > 0 else 0 for first in gains[:, 0].tolist()]

        return Choices(added, rows, np.minimum(rows - 1, depth), nodes)


def rising(values: Sequence[float]) -> list[float]:
    """Returns the non-decreasing sequence nearest to `values` in least squares."""
    backwards = falling(np.array([values[::-1]], float), np.ones(len(values)))
    found: list[float] = backwards[0, ::-1].tolist()
    return found
