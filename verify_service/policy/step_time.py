"""What a step costs: the target's forward by its rows, and the wait for a draft. Measured at start, corrected by real steps."""

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

S = TypeVar("S")

FINE_SIZES = 12  # trees whose sizes are told apart one by one, where each row costs
# Of one real plain step in the time of all widths; of the first after steps with drafts, which shows what these are worth.
LEVEL_WEIGHT, FIRST_WEIGHT = 0.2, 0.4
# Of one real step with drafts in what such steps take beyond the table, and in all times.
MORE_WEIGHT, COMMON_WEIGHT = 0.15, 0.05
FORGET_STEPS = 400  # plain ones, in which two thirds of the former are forgotten: else nothing might show that it has changed
GRID_WEIGHT = 0.1  # on a GPU, of one real step in the time of its shape
# Tokens: with more, a plain step teaches what each of them takes, the more of it the more tokens it has than those before it.
MUCH_CONTEXT = 4000
AGED = 0.99  # of what plain steps taught of that, after each step with drafts: few plain ones come then
BUSY_TOLERANCE = 1.1  # of times measured at start, against CPU time
OVERHEAD_LEVELS = 2.0  # that a draft costs beside its levels
DRAFT_WEIGHT = 0.1  # of one real wait for a draft
# Steps by which what was learnt of padded ones counts less, and what half the sequences take, where only more are known.
UNSURE_STEPS, FEWER = 0.5, 0.7
FIRST_DRAFT = 1.0  # most plain steps that a draft's first answer, which may compile, counts as


class RowTimes:
    """Seconds of one target forward where rows add up, as on a CPU.

    Between measured widths the time is interpolated; beyond the last it grows linearly. A wider forward never
    counts as faster than a narrower one: where the measurements say so, both take their mean. The measurements are of an
    empty cache and an idle machine: what real steps take beyond them is learnt, for plain steps and for those with drafts
    apart.
    """

    is_padded = False

    def __init__(self, widths: Sequence[int], seconds: Sequence[float]) -> None:
        self._widths = list(widths)
        self._measured = list(seconds)
        self._seconds = rising(self._measured)
        self._level, self._steps_alike = 1.0, 0
        self._more = 0.0  # that steps with drafts take beyond the table, in its seconds

    @classmethod
    def measure(
        cls, widths: Sequence[int], run: Callable[[int], float], budget: float = 2.0
    ) -> "RowTimes":
        """Calls `run(width)` -> seconds in rounds over all widths and keeps the best of each width.

        After a first round, which warms up, rounds go on for `budget` seconds, five at most.
        """
        return cls(widths, best_of_rounds(widths, run, budget))

    def bound(self, cpu_seconds: Sequence[float], num_threads: int) -> None:
        """Takes out of the measurements what was spent waiting for other processes.

        Args:
            cpu_seconds: Of all threads, by width, the least that was seen.
        """
        pairs = list(zip(self._measured, cpu_seconds, strict=True))
        # The width that waited least shows what a second of CPU time takes; with several threads not all work all the time.
        least = min(wall / cpu for wall, cpu in pairs) * BUSY_TOLERANCE * num_threads
        self._measured = [min(wall, least * cpu) for wall, cpu in pairs]
        self._seconds = rising(self._measured)

    def observe(self, batch: int, rows: int, seconds: float) -> None:
        """Takes the time of a real forward of `rows` decoding rows in all.

        A plain step moves all widths in proportion, since a machine that has become slower or faster has become so for
        all of them. A step with drafts teaches what such steps take beyond the table, and little of plain ones: else these
        would seem to take longer the longer something is drafted, and whatever is drafted would seem to pay.
        """
        expected = self._level * self._with_drafts(batch, rows)
        surprise = _surprise(seconds, expected, 0.5)
        if rows <= batch:
            self._steps_alike += 1
            self._more *= 1 - 1 / FORGET_STEPS
            self._level *= 1 + max(LEVEL_WEIGHT, FIRST_WEIGHT / self._steps_alike) * surprise
            return
        self._steps_alike = 0
        self._more += MORE_WEIGHT * surprise * expected / self._level
        self._level *= 1 + COMMON_WEIGHT * surprise

    def seconds(self, batch: int, rows: int) -> float:
        """Expected seconds of a forward with `rows` rows in all, of however many sequences."""
        return self._level * max(self._with_drafts(batch, rows), self._in_table(min(batch, rows)))

    def _with_drafts(self, batch: int, rows: int) -> float:
        return self._in_table(rows) + (self._more if rows > batch else 0.0)

    def _in_table(self, rows: int) -> float:
        widths, seconds = self._widths, self._seconds
        if rows <= widths[0] or len(widths) == 1:
            return seconds[0]
        i = min(bisect.bisect_left(widths, rows), len(widths) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (widths[i] - widths[i - 1])
        return seconds[i - 1] + slope * (rows - widths[i - 1])

    @property
    def unit(self) -> float:
        """Seconds of a plain step of one sequence."""
        return self.seconds(1, 1)

    def table(self) -> dict[int, float]:
        """Widths and seconds, for logs and benchmarks."""
        return {rows: self._level * self._in_table(rows) for rows in self._widths}


class GridTimes:
    """Seconds of one target step by (sequences, rows of each), both padded to the shapes that were captured.

    They were measured with short contexts. Reading the KV of longer ones takes all shapes the same besides, which plain
    steps teach; so what steps with drafts take is known however long nothing was drafted, and the other way round.

    Args:
        seconds: By (batch, rows of each sequence); every batch has at least one row.

    Attributes:
        context: Tokens of all sequences now.
        per_token: Seconds that each of them takes.
    """

    is_padded = True

    def __init__(self, seconds: Mapping[tuple[int, int], float]) -> None:
        self._measured = dict(seconds)
        self.per_token = 0.0
        self._known = 0.0  # squares of the contexts that it rests on, earlier ones counting less
        self.context = 0
        self._batches = sorted({batch for batch, _ in seconds})
        self._rows = {
            batch: sorted(rows for other, rows in seconds if other == batch)
            for batch in self._batches
        }

    @classmethod
    def measure(
        cls,
        shapes: Iterable[tuple[int, int]],
        run: Callable[[int, int], float],
        budget: float = 2.0,
    ) -> "GridTimes":
        """Calls `run(batch, rows of each)` -> seconds; as `RowTimes.measure`."""
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

    def observe(self, batch: int, rows: int, seconds: float) -> None:
        """Takes the time of a real step of `batch` sequences of `rows` rows each."""
        expected = self.seconds(batch, rows)
        error = expected * _surprise(seconds, expected, 0.2)
        if rows > 1:
            self._measured[self._shape(batch, rows)] += GRID_WEIGHT * error
            return
        square = self.context**2
        share = square / (square + MUCH_CONTEXT**2)
        self._measured[self._shape(batch, 1)] += GRID_WEIGHT * (1 - share) * error
        if square:
            self._known = (1 - GRID_WEIGHT) * self._known + square
            more = square / max(self._known, MUCH_CONTEXT**2) * share * error / self.context
            self.per_token = max(self.per_token + more, 0.0)

    def age(self) -> None:
        """A step has passed that says nothing of plain ones."""
        self._known *= AGED

    def seconds(self, batch: int, rows: int) -> float:
        """Expected seconds of a step of `batch` sequences of `rows` rows each."""
        return self._measured[self._shape(batch, rows)] + self.per_token * self.context

    @property
    def unit(self) -> float:
        """Seconds of a plain step of one sequence with a short context."""
        return self._measured[1, 1] if (1, 1) in self._measured else min(self._measured.values())

    def table(self) -> dict[tuple[int, int], float]:
        """Shapes and seconds with short contexts, for logs and benchmarks."""
        return dict(self._measured)

    def _shape(self, batch: int, rows: int) -> tuple[int, int]:
        padded = self.batch(batch)
        known = self._rows[padded]
        return padded, known[min(bisect.bisect_left(known, rows), len(known) - 1)]


StepTimes = RowTimes | GridTimes


class DraftTimes:
    """How long a step waits for its drafts, by sequences and levels drafted: learnt, nothing before the first.

    In units of a plain step of one sequence, since a machine that becomes slower does so for both. What was not seen
    yet is taken from the nearest that was; reading what was committed and the message there and back count as
    `OVERHEAD_LEVELS`.

    Args:
        is_padded: Captured steps draft all levels, whatever is verified of them.
    """

    def __init__(self, is_padded: bool = False) -> None:
        self._is_padded = is_padded
        self._contexts: dict[tuple[int, int], int] = {}  # with which they were learnt
        self._steps: dict[tuple[int, int], float] = {}
        self._counts: dict[tuple[int, int], float] = {}

    def observe(self, batch: int, levels: int, steps: float, context: int = 0) -> None:
        """Takes the wait of a real step, of sequences with `context` tokens in all."""
        key = (_size(batch), levels)
        self._contexts[key] = context
        count = self._counts[key] = self._counts.get(key, 0) + 1
        known = self._steps.get(key) or self.steps(batch, levels) or FIRST_DRAFT / 2
        weight = max(DRAFT_WEIGHT, 1 / count)
        if self._is_padded and self._steps and steps > 2 * known:
            weight = DRAFT_WEIGHT  # it was something else: what the draft had to read first
        self._steps[key] = known + weight * (min(steps, 2 * known) - known)

    def clear(self) -> None:
        """Forgets all: something else is waited for now."""
        self._contexts.clear()
        self._steps.clear()
        self._counts.clear()

    def forget(self, share: float) -> None:
        """While nothing is drafted, what was learnt counts so much less: see `steps`."""
        self._counts = {
            key: (1 - share) * min(count, 1 / DRAFT_WEIGHT) for key, count in self._counts.items()
        }

    def take_out(self, steps: float) -> None:
        """What was learnt holds so much for each token of context that is the target's own time, as has turned out."""
        for key, context in self._contexts.items():
            self._steps[key] = max(self._steps[key] - steps * context, 0.0)

    def steps(self, batch: int, levels: int) -> float:
        """Expected wait; 0 while nothing is known."""
        if not self._steps or levels == 0:
            return 0.0
        size = _size(batch)
        if self._is_padded:
            return self._padded(size, levels)
        known = self._steps.get((size, levels))
        if known is not None:
            return known
        nearest = min(self._steps, key=lambda seen: 2 * abs(seen[0] - size) + abs(seen[1] - levels))
        share = (levels + OVERHEAD_LEVELS) / (nearest[1] + OVERHEAD_LEVELS)
        return self._steps[nearest] * share

    def _padded(self, size: int, levels: int) -> float:
        """At its best, since what seems to take too long is never tried: less where it rests on a few steps or old ones, and for
        fewer sequences than those that are known."""
        if (size, levels) in self._steps:
            return self._surely(size, levels)
        near = min(
            (known for known, _ in self._steps), key=lambda known: (abs(known - size), known)
        )
        depths = [depth for known, depth in self._steps if known == near]
        if more := [depth for depth in depths if depth >= levels]:
            best = min(
                self._surely(near, depth) * (levels + OVERHEAD_LEVELS) / (depth + OVERHEAD_LEVELS)
                for depth in more
            )
        else:
            best = self._surely(near, max(depths))
        return best * FEWER ** max(near - size, 0)

    def _surely(self, size: int, levels: int) -> float:
        count = self._counts[size, levels]
        return self._steps[size, levels] * count / (count + UNSURE_STEPS)


def sizes_apart(times: StepTimes | None, max_nodes: int) -> list[int]:
    """Numbers of nodes that it makes sense to tell apart."""
    if isinstance(times, GridTimes):
        sizes = {rows - 1 for batch, rows in times.table() if 1 < rows <= max_nodes}
    else:
        sizes = set(range(1, min(FINE_SIZES, max_nodes) + 1))
        size = FINE_SIZES
        while size * 4 // 3 < max_nodes:
            size = size * 4 // 3
            sizes.add(size)
    return sorted(sizes | {max(max_nodes, 1)})


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


def _size(batch: int) -> int:
    """What is learnt of so many sequences is kept with what is of about as many: one less than a batch of 64 takes as long."""
    return (batch - 1).bit_length()


def _surprise(seconds: float, expected: float, most: float) -> float:
    # An outlier, such as a step that waited for a page fault, must not throw the table.
    return max(min(seconds / expected - 1, most), -most)
