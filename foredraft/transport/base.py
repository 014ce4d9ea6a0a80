"""What every transport of hidden states is to the verifier, which writes, and to the draft, which reads; and the ring that
bounds their memory."""

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
    """Which rows of a ring are in use: row numbers go round, oldest first out.

    Rows that were written belong to the next step that is sent, and are in use until it is answered.

    Args:
        capacity: Rows of the ring.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._next = 0
        self._num_used = 0
        self._num_unsent = 0
        self._sent: deque[tuple[int, int]] = deque()  # (step, rows)

    @property
    def num_free(self) -> int:
        """Rows that may be taken now."""
        return self.capacity - self._num_used

    def take(self, num_rows: int) -> int:
        """The first of `num_rows` consecutive rows (modulo capacity), for the step that is sent next."""
        if not 0 < num_rows <= self.num_free:
            raise ValueError(f"{num_rows} rows asked of {self.num_free} free ones")
        first = self._next
        self._next = (first + num_rows) % self.capacity
        self._num_used += num_rows
        self._num_unsent += num_rows
        return first

    def sent(self, step: int) -> None:
        """What was taken since the last step is in use until `step` is answered."""
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
        arena: For the attach message.
        device: Where steps pass that stay on the GPU; None where none can.
    """

    arena: tensor_pb2.Arena
    device: DeviceExchange | None = None

    def attached(self) -> None:
        """Both ends have mapped the memory: its name may go.

        Raises:
            ArenaError: They have not mapped the same.
        """

    def close(self) -> None:
        """Takes no more rows. Gives the memory back where the draft cannot be hurt by that. May be called twice."""

    def free(self) -> None:
        """Gives back what `close` could not: the draft has unmapped it. Called once, after `close`."""


class HiddenWriter(Region, ABC):
    """A region for a draft that reads hidden states. One thread writes; `close` may come from another.

    Attributes:
        row: Format of the rows.
    """

    def __init__(self, row: RowFormat, capacity: int) -> None:
        self.row = row
        self._ring = RowRing(capacity)

    @property
    def capacity(self) -> int:
        """Rows in use at most, over all unanswered steps."""
        return self._ring.capacity

    @property
    def num_free(self) -> int:
        """Rows that may be written now."""
        return self._ring.num_free

    def write(self, rows: torch.Tensor) -> draft_pb2.HiddenRows:
        """Puts rows [n, width] where the draft can read them, n at least 1 and at most `num_free`.

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
        """The rows written since the last call go with `step`, whose message is sent after this."""
        self._ring.sent(step)

    def answered(self, step: int) -> None:
        """The draft has answered `step`, so it has read its rows."""
        self._ring.answered(step)

    @abstractmethod
    def _put(self, first: int, rows: torch.Tensor) -> draft_pb2.HiddenRows: ...


class RingWriter(HiddenWriter):
    """A writer whose rows lie in a ring. Those on a GPU are put there together, once per step."""

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
        """Puts rows one after another from row `first` of the ring on.

        Raises:
            ArenaError: The writer was closed.
        """

    def _publish(self, step: int) -> None:
        """Says in the ring that the rows of a step are there."""


class HiddenReader(ABC):
    """The draft's end of one attach.

    Attributes:
        ring: [capacity, width], where rows lie on a GPU that is mapped here; None elsewhere, and after `close`.
        exchange: For steps that stay on such a GPU; None where none can, and after `close`.
    """

    ring: torch.Tensor | None = None
    exchange: DraftExchange | None = None

    def expect(self, step: int) -> None:  # noqa: B027
        """What is read from now on belongs to a step whose message has come."""

    @abstractmethod
    def read(self, rows: draft_pb2.HiddenRows) -> torch.Tensor:
        """The rows [num_rows, width], copied to memory of the draft's own.

        Raises:
            InvalidRequest: There are no such rows.
        """

    def abandon(self) -> None:  # noqa: B027
        """Ends a wait for rows that do not come. From any thread."""

    def close(self) -> None:  # noqa: B027
        """Gives the memory back. May be called twice."""


def check_ring(arena: tensor_pb2.Arena, row: RowFormat, epoch: int, header: int) -> tuple[int, int]:
    """(offset, capacity) of the ring in a description that makes sense.

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
    """First row and number of rows that a message names in a ring.

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
