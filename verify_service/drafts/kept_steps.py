"""Hidden states of steps as they came: nobody looks at them while drafting rests, so that they are put together by sequence only
when somebody does."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.request import Status

# That are kept as they came, and their bytes: rows of those that have ended are among them.
MOST_ROWS, MOST_BYTES = 16384, 64 << 20
MANY_ROWS = 32  # of one sequence, which must not keep the memory of its neighbours


@dataclass(slots=True)
class _Part:
    """Consecutive positions of a sequence: the first, the one after the last, and where among all rows they are."""

    sequence: RequestSequence
    start: int
    end: int
    where: list[int]


class KeptSteps:
    """Belongs to the engine's thread.

    Attributes:
        num_rows: Of all steps.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[list[RequestSequence], list[int], torch.Tensor]] = []
        self._begins: dict[RequestSequence, int] = {}  # where prompts begin
        self.num_rows = 0

    def is_full(self, row_bytes: int) -> bool:
        """Whether it is time to `prune` or to `take` them."""
        return self.num_rows >= MOST_ROWS or self.num_rows * row_bytes >= MOST_BYTES

    def add(self, sequences: list[RequestSequence], starts: list[int], rows: torch.Tensor) -> None:
        """Takes a step with one row for each sequence.

        Args:
            sequences: Of its rows; those that have ended meanwhile included.
            starts: The position of each row.
            rows: [n, width], in memory that nothing else is written to.
        """
        self._steps.append((sequences, starts, rows))
        self.num_rows += len(sequences)

    def add_prompt(self, sequence: RequestSequence, start: int, rows: torch.Tensor) -> None:
        """Takes rows [n, width] of one sequence, from position `start` on."""
        self._steps.append(([sequence], [start], rows))
        self._begins.setdefault(sequence, start)
        self.num_rows += len(rows)

    def begin_of(self, sequence: RequestSequence) -> int | None:
        """First position of a sequence whose prompt is among the rows."""
        return self._begins.get(sequence)

    def forget(self, sequence: RequestSequence) -> None:
        """It has ended: `take` leaves it out."""
        self._begins.pop(sequence, None)

    def prune(self) -> bool:
        """Forgets the oldest steps, of whose sequences none runs any more; gives whether that was a quarter of the rows or more."""
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
        """Forgets everything."""
        self._steps.clear()
        self._begins.clear()
        self.num_rows = 0

    def take(self) -> Iterator[tuple[RequestSequence, int, torch.Tensor]]:
        """Everything of sequences that run, as (sequence, first position, rows [n, width]), a sequence's rows in order.

        Nothing is left then.
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
        for part, own in zip(parts, rows.split([len(part.where) for part in parts]), strict=True):
            yield part.sequence, part.start, own.clone() if len(own) >= MANY_ROWS else own


def select_rows(rows: torch.Tensor, where: list[int]) -> torch.Tensor:
    """Some of the rows, in memory of their own; without waiting for a GPU."""
    index = torch.tensor(where, dtype=torch.int64)
    if rows.is_cuda:
        index = index.pin_memory().to(rows.device, non_blocking=True)
    return rows.index_select(0, index)


def _parts(
    steps: Sequence[tuple[list[RequestSequence], list[int], torch.Tensor]],
) -> list[_Part]:
    """Where the rows of sequences that run are, if all rows follow one another."""
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
    """Whether one step's sequences are those of the step before it, each one position on, and nothing is a prompt."""
    return (
        len(after[2]) == len(after[0])
        and before[0] == after[0]
        and [start + 1 for start in before[1]] == after[1]
    )
