"""Stores hidden states step by step, and sorts them by sequence only when they are read.

They are not read while drafting is suspended.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.request import Status

# Maximum rows and bytes in the buffer, rows of ended sequences included.
MOST_ROWS, MOST_BYTES = 16384, 64 << 20
# From this many rows on, a sequence's rows are copied, so that they do not keep other rows' memory.
MANY_ROWS = 32


@dataclass(slots=True)
class _Part:
    """Rows of a sequence at positions [start, end); `where` has their indices among all rows."""

    sequence: RequestSequence
    start: int
    end: int
    where: list[int]


class HiddenStateBuffer:
    """Stores the rows of steps. Belongs to the engine's thread.

    Attributes:
        num_rows: Number of rows of all steps.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[list[RequestSequence], list[int], torch.Tensor]] = []
        self._begins: dict[RequestSequence, int] = {}  # first positions of prompts
        self.num_rows = 0

    def is_full(self, row_bytes: int) -> bool:
        """Returns whether it is time to `prune` or to `take` the rows."""
        return self.num_rows >= MOST_ROWS or self.num_rows * row_bytes >= MOST_BYTES

    def add(self, sequences: list[RequestSequence], starts: list[int], rows: torch.Tensor) -> None:
        """Stores the rows of a step with one row for each sequence.

        Args:
            sequences: Sequence of each row; it may have ended since.
            starts: Position of each row.
            rows: [n, width], in memory that nothing else writes to.
        """
        self._steps.append((sequences, starts, rows))
        self.num_rows += len(sequences)

    def add_prompt(self, sequence: RequestSequence, start: int, rows: torch.Tensor) -> None:
        """Stores rows [n, width] of one sequence, from position `start` on."""
        self._steps.append(([sequence], [start], rows))
        self._begins.setdefault(sequence, start)
        self.num_rows += len(rows)

    def begin_of(self, sequence: RequestSequence) -> int | None:
        """Returns the first position of a sequence whose prompt is in the buffer, else None."""
        return self._begins.get(sequence)

    def forget(self, sequence: RequestSequence) -> None:
        """Drops the prompt's position of a sequence that has ended; `take` skips its rows."""
        self._begins.pop(sequence, None)

    def prune(self) -> bool:
        """Drops the oldest steps whose sequences have all ended.

        Returns whether these were at least a quarter of the rows.
        """
        first, num_rows = 0, 0
        for sequences, _, rows in self._steps:
            if any(sequence.status is Status.RUNNING for sequence in sequences):
                break
            first += 1
            num_rows += len(rows)
        del self._steps[:first]
        is_much = 4 * num_rows >= self.num_rows
        self.num_rows -= num_rows
        return is_much

    def clear(self) -> None:
        """Drops all rows."""
        self._steps.clear()
        self._begins.clear()
        self.num_rows = 0

    def take(
        self, fuse: Callable[[torch.Tensor], torch.Tensor]
    ) -> Iterator[tuple[RequestSequence, int, torch.Tensor]]:
        """Empties the buffer and yields the rows of running sequences.

        Yields (sequence, first position, rows [n, width]), with a sequence's rows in order.

        Args:
            fuse: Called once with all rows; its result replaces them.
        """
        steps = list(self._steps)
        self.clear()
        parts = _parts(steps)
        if not parts:
            return
        rows = torch.cat([rows for _, _, rows in steps]) if len(steps) > 1 else steps[0][2]
        where = [row for part in parts for row in part.where]
        if where != list(range(len(rows))):
            rows = select_rows(rows, where)
        rows = fuse(rows)
        for part, own in zip(parts, rows.split([len(part.where) for part in parts]), strict=True):
            yield part.sequence, part.start, own.clone() if len(own) >= MANY_ROWS else own


def select_rows(rows: torch.Tensor, where: list[int]) -> torch.Tensor:
    """Copies some of the rows, without waiting for a GPU."""
    index = torch.tensor(where, dtype=torch.int64)
    if rows.is_cuda:
        index = index.pin_memory().to(rows.device, non_blocking=True)
    return rows.index_select(0, index)


def _parts(
    steps: Sequence[tuple[list[RequestSequence], list[int], torch.Tensor]],
) -> list[_Part]:
    """Finds the rows of running sequences among the concatenated rows of all steps."""
    parts: list[_Part] = []
    newest: dict[RequestSequence, _Part] = {}
    first = offset = 0
    while first < len(steps):
        sequences, starts, rows = steps[first]
        last, count = first + 1, len(sequences)
        if len(rows) == count:  # else a prompt
            while last < len(steps) and _goes_on(steps[last - 1], steps[last]):
                last += 1
        end = offset + (len(rows) if last == first + 1 else (last - first) * count)
        for i, (sequence, start) in enumerate(zip(sequences, starts, strict=True), offset):
            if sequence.status is not Status.RUNNING:
                continue
            where = range(i, end, count)
            part = newest.get(sequence)
            if part is None or part.end != start:
                part = newest[sequence] = _Part(sequence, start, start, [])
                parts.append(part)
            part.where.extend(where)
            part.end += len(where)
        first, offset = last, end
    return parts


def _goes_on(
    before: tuple[list[RequestSequence], list[int], torch.Tensor],
    after: tuple[list[RequestSequence], list[int], torch.Tensor],
) -> bool:
    """Returns whether a step has the same sequences as the one before it, each one position
    further, and no prompts.
    """
    return (
        len(after[2]) == len(after[0])
        and before[0] == after[0]
        and [start + 1 for start in before[1]] == after[1]
    )
