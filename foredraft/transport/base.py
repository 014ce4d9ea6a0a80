"""Interfaces of transports of hidden states, and the ring that bounds their memory.

The verifier writes hidden states, and the draft reads them.
"""

from abc import ABC, abstractmethod
from collections import deque

import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.errors import InvalidRequest
from foredraft.transport import codec
from foredraft.transport.device_exchange import DeviceExchange, DraftExchange
from foredraft.transport.rows import HIDDEN, ArenaError, RowFormat


class RowRing:
    """Tracks which rows of a ring are in use; rows are taken and freed in order.

    Written rows belong to the next step that is sent, and are in use until the draft has answered
    that step.

    Args:
        capacity: Number of rows of the ring.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._next = 0
        self._num_used = 0
        self._num_unsent = 0
        self._sent: deque[tuple[int, int]] = deque()  # (step, rows)

    @property
    def num_free(self) -> int:
        """Number of rows that may be taken now."""
        return self.capacity - self._num_used

    def take(self, num_rows: int) -> int:
        """Takes `num_rows` consecutive rows (modulo capacity) for the step that is sent next.

        Returns the first.
        """
        if not 0 < num_rows <= self.num_free:
            raise ValueError(f"{num_rows} rows asked of {self.num_free} free ones")
        first = self._next
        self._next = (first + num_rows) % self.capacity
        self._num_used += num_rows
        self._num_unsent += num_rows
        return first

    def sent(self, step: int) -> None:
        """Marks the rows taken since the last step as in use until `step` is answered."""
        if self._num_unsent:
            self._sent.append((step, self._num_unsent))
            self._num_unsent = 0

    def answered(self, step: int) -> None:
        """Frees the rows of all steps up to this one."""
        while self._sent and self._sent[0][0] <= step:
            self._num_used -= self._sent.popleft()[1]


class Region:
    """The verifier's end of one attach's arena.

    Attributes:
        arena: Description of the memory for the attach message.
        device: Exchange of steps that stay on the GPU; None where there is none.
    """

    arena: tensor_pb2.Arena
    device: DeviceExchange | None = None

    def attached(self) -> None:
        """Removes the memory's name, once both ends have mapped it.

        Raises:
            ArenaError: They have not mapped the same.
        """

    def close(self) -> None:
        """Ends the region: takes no more rows.

        Gives the memory back where the draft cannot be hurt by that. May be called twice.
        """

    def free(self) -> None:
        """Gives back memory that `close` could not, once the draft has unmapped it.

        Called once, after `close`.
        """


class HiddenWriter(Region, ABC):
    """The verifier's region for a draft that reads hidden states.

    One thread writes; `close` may come from another.

    Attributes:
        row: Format of the rows.
    """

    def __init__(self, row: RowFormat, capacity: int) -> None:
        self.row = row
        self._ring = RowRing(capacity)

    @property
    def capacity(self) -> int:
        """Maximum number of rows in use, over all unanswered steps."""
        return self._ring.capacity

    @property
    def num_free(self) -> int:
        """Number of rows that may be written now."""
        return self._ring.num_free

    def write(self, rows: torch.Tensor) -> draft_pb2.HiddenRows:
        """Writes rows [n, width] where the draft can read them; n is at least 1 and at most
        `num_free`.

        Rows on a GPU may be read as late as at `sent`.

        Returns:
            What goes into the next step.

        Raises:
            ArenaError: The writer was closed.
        """
        shape = rows.shape
        if len(shape) != 2 or shape[1] != self.row.width:
            raise ValueError(f"rows are {tuple(shape)}, not [n, {self.row.width}]")
        first = self._ring.take(shape[0])
        return self._put(first, rows if rows.dtype == self.row.dtype else rows.to(self.row.dtype))

    def sent(self, step: int) -> None:
        """Assigns the rows written since the last call to `step`, which is sent after this."""
        self._ring.sent(step)

    def answered(self, step: int) -> None:
        """Frees the rows of `step`, which the draft has answered."""
        self._ring.answered(step)

    @abstractmethod
    def _put(self, first: int, rows: torch.Tensor) -> draft_pb2.HiddenRows: ...


class RingWriter(HiddenWriter):
    """Writes rows to a ring. Rows on a GPU are written together, once per step."""

    def __init__(self, row: RowFormat, capacity: int) -> None:
        super().__init__(row, capacity)
        self._first = 0
        self._collected: list[torch.Tensor] = []

    def sent(self, step: int) -> None:
        """See HiddenWriter."""
        if self._collected:
            rows, self._collected = self._collected, []
            self._store(self._first, rows)
        self._publish(step)
        super().sent(step)

    def _put(self, first: int, rows: torch.Tensor) -> draft_pb2.HiddenRows:
        if rows.is_cuda:
            if not self._collected:
                self._first = first
            self._collected.append(rows)
        else:
            self._store(first, [rows])
        return draft_pb2.HiddenRows(arena_row=first, num_rows=rows.shape[0])

    @abstractmethod
    def _store(self, first: int, rows: list[torch.Tensor]) -> None:
        """Writes rows one after another from row `first` of the ring on.

        Raises:
            ArenaError: The writer was closed.
        """

    def _publish(self, step: int) -> None:
        """Marks the rows of a step as written, in the ring."""


class HiddenReader(ABC):
    """The draft's end of one attach.

    Attributes:
        ring: [capacity, width], the rows, where they lie on a GPU that is mapped here; None
            elsewhere, and after `close`.
        exchange: Exchange of steps that stay on such a GPU; None where there is none, and after
            `close`.
    """

    ring: torch.Tensor | None = None
    exchange: DraftExchange | None = None

    def expect(self, step: int) -> None:  # noqa: B027
        """Prepares to read the rows of a step whose message has come."""

    @abstractmethod
    def read(self, rows: draft_pb2.HiddenRows) -> torch.Tensor:
        """Returns the rows [num_rows, width], copied to memory of the draft's own.

        Raises:
            InvalidRequest: There are no such rows.
        """

    def abandon(self) -> None:  # noqa: B027
        """Ends a wait for rows that do not come. Any thread may call it."""

    def close(self) -> None:  # noqa: B027
        """Gives the memory back. May be called twice."""


def check_ring(arena: tensor_pb2.Arena, row: RowFormat, epoch: int, header: int) -> tuple[int, int]:
    """Returns (offset, capacity) of the ring in a valid description; raises for an invalid one.

    Args:
        header: Bytes before the first row, at least.

    Raises:
        ArenaError: It makes none; names the field.
    """
    if arena.epoch != epoch:
        raise ArenaError("epoch", f"the arena is of attach {arena.epoch}, not {epoch}")
    ring = next((tensor for tensor in arena.tensors if tensor.name == HIDDEN), None)
    if ring is None:
        raise ArenaError("tensors", f"there is none named {HIDDEN!r}")
    if len(ring.shape) != 2 or ring.shape[1] != row.width:
        raise ArenaError("tensors", f"the rows are {list(ring.shape)}, not [n, {row.width}]")
    if ring.dtype != codec.to_message(row.dtype):
        raise ArenaError("tensors", f"the rows are not {row.dtype}")
    capacity = ring.shape[0]
    if capacity < 1 or ring.offset < header or ring.offset % row.dtype.itemsize:
        raise ArenaError("tensors", f"{capacity} rows at offset {ring.offset}")
    if ring.offset + capacity * row.num_bytes > arena.size:
        raise ArenaError("size", f"{capacity} rows do not end within {arena.size} bytes")
    return ring.offset, capacity


def check_rows(rows: draft_pb2.HiddenRows, capacity: int) -> tuple[int, int]:
    """Returns the first row and the number of rows that a message names in a ring; raises for
    invalid ones.

    Raises:
        InvalidRequest: There are no such rows.
    """
    first, num_rows = rows.arena_row, rows.num_rows
    if rows.WhichOneof("source") != "arena_row":
        raise InvalidRequest("hidden", "the rows are not in the arena, as was agreed")
    if not (first < capacity and num_rows <= capacity):
        raise InvalidRequest(
            "hidden", f"{num_rows} rows from row {first} on, in a ring of {capacity}"
        )
    return first, num_rows
