"""Hidden states in a block of GPU memory that verifier and draft both map: they never leave the GPU.

The block is the verifier's. Its first page holds who it is for, what the draft writes back at the attach, and the number of
the newest step whose rows are there: the verifier's stream writes that after the rows, the draft's stream waits for it. The
draft waits only for steps that a message has announced, so what it waits for is under way; should the verifier die just
then, `abandon` ends the wait.
"""

import struct

import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.errors import InvalidRequest
from foredraft.transport import codec, cuda
from foredraft.transport.base import (
    HIDDEN,
    ArenaError,
    HiddenReader,
    RingWriter,
    RowFormat,
    check_ring,
    check_rows,
)

_HEADER = struct.Struct("<8sQQ")  # magic, epoch, size of the block
_MAGIC, _ANSWER = b"foredra1", b"draftra1"
_ANSWER_AT = 64  # offsets in the first page
_FLAG_AT = 128
_FIRST_ROW = 4096


class CudaIpcWriter(RingWriter):
    """Makes a new block. Rows are gathered into it by one kernel per step, when the step is sent.

    Args:
        row: Format of the rows.
        capacity: Rows of the ring.
        epoch: Number of the attach.
        device: Where the target runs.

    Raises:
        ArenaError: The block cannot be made.
    """

    def __init__(self, row: RowFormat, capacity: int, epoch: int, device: torch.device) -> None:
        super().__init__(row, capacity)
        size = _FIRST_ROW + capacity * row.num_bytes
        try:
            self._block = cuda.Block(size, device)
        except cuda.CudaError as error:
            raise ArenaError("size", f"no block of {size} bytes: {error}") from error
        self._put_bytes(0, _HEADER.pack(_MAGIC, epoch, size))
        self._rows: torch.Tensor | None = _ring(self._block.bytes, _FIRST_ROW, row, capacity)
        self.arena = tensor_pb2.Arena(
            transport=tensor_pb2.TRANSPORT_CUDA_IPC,
            handle=self._block.handle,
            size=size,
            device_uuid=cuda.uuid_of(device),
            epoch=epoch,
        )
        self.arena.tensors.add(
            name=HIDDEN,
            offset=_FIRST_ROW,
            dtype=codec.to_message(row.dtype),
            shape=(capacity, row.width),
        )

    def attached(self) -> None:
        """Looks whether what the draft wrote has come here.

        Raises:
            ArenaError: The draft has mapped something else.
        """
        answer = bytes(self._block.bytes[_ANSWER_AT : _ANSWER_AT + _HEADER.size].cpu().numpy())
        if answer != _HEADER.pack(_ANSWER, self.arena.epoch, self.arena.size):
            raise ArenaError("handle", "what the draft wrote into the block did not arrive")

    def close(self) -> None:
        """Writes no more. The block stays until `free`: the draft may still be reading it."""
        self._rows = None

    def free(self) -> None:
        """Gives the block back."""
        torch.cuda.synchronize(self._block.device)
        self._block.free()

    def _store(self, first: int, rows: list[torch.Tensor]) -> None:
        ring = self._rows
        if ring is None:
            raise ArenaError("epoch", f"attach {self.arena.epoch} has ended")
        num_rows = sum(len(part) for part in rows)
        fit = all(part.dtype == ring.dtype and part.device == ring.device for part in rows)
        if fit and first + num_rows <= len(ring):
            torch.cat(rows, out=ring[first : first + num_rows])
            return
        joined = torch.cat(rows).to(ring)
        fitting = min(num_rows, len(ring) - first)
        ring[first : first + fitting].copy_(joined[:fitting])
        ring[: num_rows - fitting].copy_(joined[fitting:])

    def _publish(self, step: int) -> None:
        stream = torch.cuda.current_stream(self._block.device)
        cuda.write_word(stream, self._block.pointer + _FLAG_AT, step)

    def _put_bytes(self, offset: int, data: bytes) -> None:
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._block.bytes[offset : offset + len(data)].copy_(source)


class CudaIpcReader(HiddenReader):
    """Maps a block.

    Args:
        arena: As the verifier describes it.
        row: Format of the rows.
        epoch: Number of the attach.

    Raises:
        ArenaError: The description contradicts itself, the block, or this attach.
    """

    def __init__(self, arena: tensor_pb2.Arena, row: RowFormat, epoch: int) -> None:
        offset, capacity = check_ring(arena, row, epoch, _FIRST_ROW)
        device = cuda.device_of(arena.device_uuid)
        if device is None:
            raise ArenaError("device_uuid", f"this process does not see GPU {arena.device_uuid}")
        if len(arena.handle) != cuda.HANDLE_BYTES:
            raise ArenaError("handle", f"{len(arena.handle)} bytes are no handle")
        try:
            self._mapping: cuda.Mapping | None = cuda.Mapping(arena.handle, arena.size, device)
        except cuda.CudaError as error:
            raise ArenaError("handle", f"cannot map the block: {error}") from error
        data = self._mapping.bytes
        if bytes(data[: _HEADER.size].cpu().numpy()) != _HEADER.pack(_MAGIC, epoch, arena.size):
            self.close()
            raise ArenaError("epoch", "the block is not of this attach")
        answer = bytearray(_HEADER.pack(_ANSWER, epoch, arena.size))
        data[_ANSWER_AT : _ANSWER_AT + len(answer)].copy_(
            torch.frombuffer(answer, dtype=torch.uint8)
        )
        torch.cuda.current_stream(device).synchronize()
        self.ring = _ring(data, offset, row, capacity)
        self._step = 0

    def expect(self, step: int) -> None:
        """The current stream waits for the rows of an announced step."""
        if self._mapping is None:
            raise InvalidRequest("hidden", "the attach has ended")
        self._step = step
        stream = torch.cuda.current_stream(self._mapping.device)
        cuda.wait_word(stream, self._mapping.pointer + _FLAG_AT, step)

    def read(self, rows: draft_pb2.HiddenRows) -> torch.Tensor:
        """The rows of the ring; a copy on the device, made when the stream comes to it."""
        ring = self.ring
        if ring is None:
            raise InvalidRequest("hidden", "the attach has ended")
        first, num_rows = check_rows(rows, len(ring))
        fitting = min(num_rows, len(ring) - first)
        return torch.cat((ring[first : first + fitting], ring[: num_rows - fitting]))

    def abandon(self) -> None:
        """Ends the wait for rows that will not come; what is read then means nothing."""
        if self._mapping is not None:
            with torch.cuda.device(self._mapping.device):
                side = torch.cuda.Stream()
                cuda.write_word(side, self._mapping.pointer + _FLAG_AT, self._step)
                side.synchronize()

    def close(self) -> None:
        """Unmaps the block once nothing reads it."""
        mapping, self._mapping, self.ring = self._mapping, None, None
        if mapping is not None:
            torch.cuda.synchronize(mapping.device)
            mapping.close()


def _ring(data: torch.Tensor, offset: int, row: RowFormat, capacity: int) -> torch.Tensor:
    used = data[offset : offset + capacity * row.num_bytes]
    return used.view(row.dtype).view(capacity, row.width)
