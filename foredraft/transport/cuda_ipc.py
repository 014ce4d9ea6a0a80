"""Hidden states, and steps that stay on the GPU, in GPU memory that verifier and draft both map.

The block is the verifier's. Its first page holds who it is for, what the draft writes back at the
attach, and two words: the newest step whose rows are there, which the verifier's stream writes
after the rows and the draft's stream waits for, and the newest step whose trees are. The draft
waits only for steps that a message has announced, so what it waits for is under way; should the
verifier die just then, `abandon` ends the wait.
"""

import struct
from collections.abc import Sequence

import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.errors import InvalidRequest
from foredraft.transport import cuda, layout
from foredraft.transport.base import HiddenReader, Region, RingWriter, check_ring, check_rows
from foredraft.transport.device_exchange import (
    ACCEPTED,
    ROWS,
    TREES,
    DeviceExchange,
    DraftExchange,
    StepSizes,
)
from foredraft.transport.rows import HIDDEN, ArenaError, RowFormat

_HEADER = struct.Struct("<8sQQ")  # magic, epoch, size of the block
_MAGIC, _ANSWER = b"foredra1", b"draftra1"
_ANSWER_AT = 64  # offsets in the first page
_VERIFIED_AT, _DRAFTED_AT = 128, 192
_FIRST_ROW = 4096


class CudaIpcRegion(Region):
    """The verifier's end: a new memory block.

    Args:
        specs: Tensors in the block.
        epoch: Number of the attach.
        device: Device of the target.
        steps: Sizes of steps that stay on the GPU; None without such steps.
        row: Format of the hidden states that the draft reads; None for none.

    Attributes:
        tensors: The tensors in the block by name; empty after `close`.

    Raises:
        ArenaError: The block cannot be made.
    """

    def __init__(
        self,
        specs: Sequence[layout.TensorSpec],
        epoch: int,
        device: torch.device,
        steps: StepSizes | None,
        row: RowFormat | None,
    ) -> None:
        every = [*specs, *(steps.tensors(row) if steps is not None else ())]
        arena = layout.describe(tensor_pb2.TRANSPORT_CUDA_IPC, epoch, every, _FIRST_ROW)
        try:
            self._block = block = cuda.Block(arena.size, device)
        except cuda.CudaError as error:
            raise ArenaError("size", f"no block of {arena.size} bytes: {error}") from error
        arena.handle, arena.device_uuid = block.handle, cuda.uuid_of(device)
        self.arena = arena
        self._bytes: torch.Tensor | None = block.bytes
        header = bytearray(_HEADER.pack(_MAGIC, epoch, arena.size))
        block.bytes[: len(header)].copy_(torch.frombuffer(header, dtype=torch.uint8))
        self.tensors = {t.name: layout.view(block.bytes, t) for t in arena.tensors}
        if steps is not None:
            words = (block.pointer + _VERIFIED_AT, block.pointer + _DRAFTED_AT)
            self.device = DeviceExchange(self.tensors, *words)

    def publish(self, step: int) -> None:
        """Makes the current stream mark the rows of a step as written.

        Raises:
            ArenaError: The region was closed.
        """
        data = self._bytes  # held meanwhile: another thread may free the block
        if data is None:
            raise ArenaError("epoch", f"attach {self.arena.epoch} has ended")
        stream = torch.cuda.current_stream(data.device)
        cuda.write_word(stream.cuda_stream, data.data_ptr() + _VERIFIED_AT, step)

    def attached(self) -> None:
        """Checks that what the draft wrote into the block is readable here.

        Raises:
            ArenaError: The draft has mapped something else.
        """
        answer = bytes(self._block.bytes[_ANSWER_AT : _ANSWER_AT + _HEADER.size].cpu().numpy())
        if answer != _HEADER.pack(_ANSWER, self.arena.epoch, self.arena.size):
            raise ArenaError("handle", "what the draft wrote into the block did not arrive")

    def close(self) -> None:
        """Ends waits for the draft.

        The block stays until `free`: the draft may still be using it.
        """
        self._bytes = None
        self.tensors.clear()
        if self.device is not None:
            self.device.close()

    def free(self) -> None:
        """Gives the block back, as soon as no tensor in it is left."""
        self.device = None
        self._block.free()


class CudaIpcWriter(RingWriter):
    """Writes rows to a ring in a memory block.

    One kernel per step gathers the rows, when the step is sent.

    Args:
        row: Format of the rows.
        capacity: Rows of the ring.
        epoch: Number of the attach.
        device: Device of the target.
        steps: Sizes of steps that stay on the GPU, see CudaIpcRegion.

    Raises:
        ArenaError: The block cannot be made.
    """

    def __init__(
        self,
        row: RowFormat,
        capacity: int,
        epoch: int,
        device: torch.device,
        steps: StepSizes | None = None,
    ) -> None:
        super().__init__(row, capacity)
        ring = layout.ring_spec(row, capacity)
        self._region = CudaIpcRegion([ring], epoch, device, steps, row)
        self.arena, self.device = self._region.arena, self._region.device

    def attached(self) -> None:
        """See CudaIpcRegion."""
        self._region.attached()

    def close(self) -> None:
        """See CudaIpcRegion. Writes no more."""
        self._region.close()

    def free(self) -> None:
        """See CudaIpcRegion."""
        self.device = None
        self._region.free()

    def _store(self, first: int, rows: list[torch.Tensor]) -> None:
        ring = self._region.tensors.get(HIDDEN)
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
        self._region.publish(step)


def map_block(arena: tensor_pb2.Arena, device: torch.device) -> cuda.Mapping:
    """Maps another process's memory for a device, which may be another GPU than the memory's.

    Raises:
        ArenaError: The device cannot reach the memory, or the memory is gone.
    """
    if len(arena.handle) != cuda.HANDLE_BYTES:
        raise ArenaError("handle", f"{len(arena.handle)} bytes are no handle")
    try:
        return cuda.Mapping(arena.handle, arena.size, device)
    except cuda.CudaError as error:
        raise ArenaError("handle", f"cannot map the memory: {error}") from error


class CudaIpcMapping:
    """The draft's mapping of a memory block.

    Args:
        arena: The verifier's description of the block.
        epoch: Number of the attach.
        device: Device of the draft.

    Raises:
        ArenaError: The description contradicts the block or this attach.
    """

    def __init__(self, arena: tensor_pb2.Arena, epoch: int, device: torch.device) -> None:
        if arena.epoch != epoch:
            raise ArenaError("epoch", f"the arena is of attach {arena.epoch}, not {epoch}")
        mapping = map_block(arena, device)
        self._mapping: cuda.Mapping | None = mapping
        self._mapped = mapping.bytes
        if bytes(mapping.bytes[: _HEADER.size].cpu().numpy()) != _HEADER.pack(
            _MAGIC, epoch, arena.size
        ):
            self.close()
            raise ArenaError("epoch", "the block is not of this attach")
        answer = bytearray(_HEADER.pack(_ANSWER, epoch, arena.size))
        mapping.bytes[_ANSWER_AT : _ANSWER_AT + len(answer)].copy_(
            torch.frombuffer(answer, dtype=torch.uint8)
        )
        torch.cuda.current_stream(mapping.device).synchronize()
        self._side = cuda.side_stream(mapping.device)
        self._newest = 0  # step that was waited for

    def view(self, arena: tensor_pb2.Arena, name: str) -> torch.Tensor:
        """Returns a tensor of the arena.

        Raises:
            ArenaError: There is none.
        """
        tensor = layout.find(arena, name)
        if tensor is None:
            raise ArenaError("tensors", f"there is none named {name!r}")
        return layout.view(self._mapped, tensor)

    @property
    def drafted(self) -> torch.Tensor:
        """The word that the draft writes, int32 [1]."""
        return self._mapped[_DRAFTED_AT : _DRAFTED_AT + 4].view(torch.int32)

    def rows(self, offset: int, count: int, row: RowFormat) -> torch.Tensor:
        """Returns rows [count, width] from an offset in the block on.

        Raises:
            ArenaError: They do not end within it.
        """
        end = offset + count * row.num_bytes
        if end > len(self._mapped):
            raise ArenaError("size", f"{count} rows do not end within {len(self._mapped)} bytes")
        return self._mapped[offset:end].view(row.dtype).view(count, row.width)

    def wait(self, step: int) -> None:
        """Makes the current stream wait for the commit of an announced step.

        Raises:
            InvalidRequest: The attach has ended.
        """
        if self._mapping is None:
            raise InvalidRequest("hidden", "the attach has ended")
        self._newest = step
        stream = torch.cuda.current_stream(self._mapping.device)
        cuda.wait_word(stream.cuda_stream, self._mapping.pointer + _VERIFIED_AT, step)

    def publish(self, step: int) -> None:
        """Makes the current stream mark a step's trees as written."""
        if self._mapping is not None:
            stream = torch.cuda.current_stream(self._mapping.device)
            cuda.write_word(stream.cuda_stream, self._mapping.pointer + _DRAFTED_AT, step)

    def abandon(self) -> None:
        """Ends waits for data that will not come; what is read then is meaningless."""
        mapping = self._mapping
        if mapping is not None:
            cuda.write_word(self._side.cuda_stream, mapping.pointer + _VERIFIED_AT, self._newest)
            self._side.synchronize()

    def close(self) -> None:
        """Unmaps the block once nothing uses it. May be called twice."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            torch.cuda.synchronize(mapping.device)
            mapping.close()


class CudaIpcReader(HiddenReader):
    """Reads rows from a ring in a memory block.

    Args:
        arena: The verifier's description of the block.
        row: Format of the rows.
        epoch: Number of the attach.
        device: Device of the draft.

    Raises:
        ArenaError: The description contradicts itself, the block, or this attach.
    """

    def __init__(
        self, arena: tensor_pb2.Arena, row: RowFormat, epoch: int, device: torch.device
    ) -> None:
        offset, capacity = check_ring(arena, row, epoch, _FIRST_ROW)
        self._mapping = CudaIpcMapping(arena, epoch, device)
        self.ring = self._mapping.rows(offset, capacity, row)
        if layout.find(arena, TREES) is not None:
            try:
                self.exchange = CudaIpcExchange(self._mapping, arena, row)
            except ArenaError:
                self.close()
                raise

    def expect(self, step: int) -> None:
        """Makes the current stream wait for the rows of an announced step."""
        self._mapping.wait(step)

    def read(self, rows: draft_pb2.HiddenRows) -> torch.Tensor:
        """Returns rows of the ring; the device copies them when the stream comes to it."""
        ring = self.ring
        if ring is None:
            raise InvalidRequest("hidden", "the attach has ended")
        first, num_rows = check_rows(rows, len(ring))
        fitting = min(num_rows, len(ring) - first)
        return torch.cat((ring[first : first + fitting], ring[: num_rows - fitting]))

    def abandon(self) -> None:
        """Ends the wait for rows that will not come; what is read then is meaningless."""
        self._mapping.abandon()

    def close(self) -> None:
        """Unmaps the block once nothing reads it."""
        self.ring = self.exchange = None
        self._mapping.close()


class CudaIpcExchange(DraftExchange):
    """The draft's end of steps that stay on the GPU.

    Args:
        mapping: The draft's mapping of the block; closed with the exchange.
        arena: The verifier's description of the block.
        row: Format of the hidden states that the draft reads; None for none.

    Raises:
        ArenaError: The tensors do not have the expected shapes or types.
    """

    def __init__(
        self, mapping: CudaIpcMapping, arena: tensor_pb2.Arena, row: RowFormat | None
    ) -> None:
        self._mapping = mapping
        self.accepted, self.trees = mapping.view(arena, ACCEPTED), mapping.view(arena, TREES)
        self.drafted = mapping.drafted
        self.hidden, self.first_row = None, 0
        if row is None:
            return
        offset, self.first_row = check_ring(arena, row, arena.epoch, _FIRST_ROW)
        rows = mapping.view(arena, ROWS)
        self.hidden = mapping.rows(offset, self.first_row + rows.numel() // row.width, row)
        if self.hidden[self.first_row].data_ptr() != rows.data_ptr() or rows.dtype != row.dtype:
            raise ArenaError("tensors", f"{ROWS} do not lie behind {HIDDEN}")

    def wait(self, step: int) -> None:
        """See DraftExchange."""
        self._mapping.wait(step)

    def publish(self, step: int) -> None:
        """See DraftExchange."""
        self._mapping.publish(step)

    def abandon(self) -> None:
        """See DraftExchange."""
        self._mapping.abandon()

    def close(self) -> None:
        """See DraftExchange."""
        self._mapping.close()
