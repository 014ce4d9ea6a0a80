"""Hidden states of steps that committed one row to each of their sequences, as they came: nobody looks at them while drafting
rests, so that they are put together by sequence only when somebody does."""

from collections.abc import Iterator, Sequence

import torch

from verify_service.scheduling.request import Sequence as RequestSequence
from verify_service.scheduling.request import Status

MOST_STEPS = 32  # that are kept as they came


class KeptSteps:
    """Belongs to the engine's thread.

    Attributes:
        num_rows: Of all steps.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[list[RequestSequence], list[int], torch.Tensor]] = []
        self.num_rows = 0

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, sequences: list[RequestSequence], starts: list[int], rows: torch.Tensor) -> None:
        """Takes a step.

        Args:
            sequences: Of its rows; those that have ended meanwhile included.
            starts: The position of each row.
            rows: [n, width], in memory that nothing else is written to.
        """
        self._steps.append((sequences, starts, rows))
        self.num_rows += len(sequences)

    def clear(self) -> None:
        """Forgets everything."""
        self._steps.clear()
        self.num_rows = 0

    def take(self) -> Iterator[tuple[RequestSequence, int, torch.Tensor]]:
        """Everything of sequences that run, as (sequence, first position, rows [n, width]), a sequence's rows in order.

        Nothing is left then.
        """
        steps = list(self._steps)
        self.clear()
        first = 0
        while first < len(steps):
            sequences, starts, _ = steps[first]
            end = first + 1
            while end < len(steps) and _goes_on(steps[end - 1], steps[end]):
                end += 1
            together = torch.stack([rows for _, _, rows in steps[first:end]], 1)
            for sequence, start, rows in zip(sequences, starts, together, strict=True):
                if sequence.status is Status.RUNNING:
                    # Many must not keep the memory of their neighbours.
                    yield sequence, start, rows.clone() if end - first == MOST_STEPS else rows
            first = end


def _goes_on(
    before: tuple[Sequence[RequestSequence], Sequence[int], torch.Tensor],
    after: tuple[Sequence[RequestSequence], Sequence[int], torch.Tensor],
) -> bool:
    """Whether one step's sequences are those of the step before it, each one position on."""
    return before[0] == after[0] and [start + 1 for start in before[1]] == after[1]
