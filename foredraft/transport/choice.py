"""Selects a transport that both ends support, and creates its two ends."""

import logging
from collections.abc import Sequence

import torch

from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.transport import cuda, shared_memory
from foredraft.transport.base import HiddenReader, HiddenWriter, Region
from foredraft.transport.device_exchange import DraftExchange, StepSizes
from foredraft.transport.inline import InlineReader, InlineWriter
from foredraft.transport.rows import ArenaError, RowFormat
from foredraft.transport.shared_memory import SharedMemoryReader, SharedMemoryWriter

NAMES: dict[tensor_pb2.Transport, str] = {
    tensor_pb2.TRANSPORT_CUDA_IPC: "cuda_ipc",
    tensor_pb2.TRANSPORT_SHM: "shm",
    tensor_pb2.TRANSPORT_INLINE: "inline",
}
CPU = torch.device("cpu")

logger = logging.getLogger(__name__)


def supported(same_host: bool = True, device: torch.device = CPU) -> list[tensor_pb2.Transport]:
    """Returns the transports that this process supports, best first.

    Args:
        same_host: Whether the peer is on this host.
        device: Device of this process's model.
    """
    found: list[tensor_pb2.Transport] = []
    if same_host and cuda.is_supported(device):
        found.append(tensor_pb2.TRANSPORT_CUDA_IPC)
    if same_host and shared_memory.is_supported():
        found.append(tensor_pb2.TRANSPORT_SHM)
    return [*found, tensor_pb2.TRANSPORT_INLINE]


def described(transports: Sequence[tensor_pb2.Transport]) -> str:
    """Returns the names of the known ones of `transports`, for people."""
    return ", ".join(NAMES[each] for each in transports if each in NAMES) or "nothing"


def open_writer(
    transports: Sequence[tensor_pb2.Transport],
    row: RowFormat,
    capacity: int,
    epoch: int,
    device: torch.device = CPU,
    steps: StepSizes | None = None,
) -> HiddenWriter:
    """Creates the verifier's end of the first of `transports` that works.

    Args:
        capacity: Maximum number of rows in use.
        device: Device of the target.
        steps: Sizes of steps that stay on the GPU, where both ends support them.

    Raises:
        ArenaError: None of them works.
    """
    failed: list[tuple[str, ArenaError]] = []
    for transport in transports:
        try:
            writer = _writer(transport, row, capacity, epoch, device, steps)
        except ArenaError as error:
            failed.append((NAMES[transport], error))
            continue
        for name, reason in failed:
            logger.warning("%s instead of %s: %s", NAMES[transport], name, reason)
        return writer
    if failed:
        raise failed[-1][1]
    raise ArenaError("transport", "the draft and the verifier have none in common")


def _writer(
    transport: tensor_pb2.Transport,
    row: RowFormat,
    capacity: int,
    epoch: int,
    device: torch.device,
    steps: StepSizes | None,
) -> HiddenWriter:
    if transport == tensor_pb2.TRANSPORT_CUDA_IPC:
        # Imported only where there is a GPU that can share memory.
        from foredraft.transport.cuda_ipc import CudaIpcWriter

        return CudaIpcWriter(row, capacity, epoch, device, steps)
    if transport == tensor_pb2.TRANSPORT_SHM:
        return SharedMemoryWriter(row, capacity, epoch)
    return InlineWriter(row, capacity, epoch)


def open_region(
    transports: Sequence[tensor_pb2.Transport], epoch: int, device: torch.device, steps: StepSizes
) -> Region | None:
    """Creates the verifier's end of an arena for a draft that reads no hidden states; None where it
    needs none.
    """
    if tensor_pb2.TRANSPORT_CUDA_IPC not in transports:
        return None
    from foredraft.transport.cuda_ipc import CudaIpcRegion

    try:
        return CudaIpcRegion([], epoch, device, steps, None)
    except ArenaError as error:
        logger.warning("no %s transport: %s", NAMES[tensor_pb2.TRANSPORT_CUDA_IPC], error)
        return None


def open_reader(
    arena: tensor_pb2.Arena, row: RowFormat, epoch: int, device: torch.device = CPU
) -> HiddenReader:
    """Creates the draft's end of an arena.

    Args:
        device: Device of the draft.

    Raises:
        ArenaError: It cannot be mapped; names the field.
    """
    if arena.transport == tensor_pb2.TRANSPORT_CUDA_IPC and cuda.is_supported(device):
        from foredraft.transport.cuda_ipc import CudaIpcReader

        return CudaIpcReader(arena, row, epoch, device)
    if arena.transport == tensor_pb2.TRANSPORT_SHM and shared_memory.is_supported():
        return SharedMemoryReader(arena, row, epoch)
    if arena.transport == tensor_pb2.TRANSPORT_INLINE:
        return InlineReader(row)
    raise ArenaError("transport", f"{arena.transport} is none that this process can do")


def open_exchange(arena: tensor_pb2.Arena, epoch: int, device: torch.device) -> DraftExchange:
    """Creates the draft's end of an arena without hidden states.

    Args:
        device: Device of the draft.

    Raises:
        ArenaError: It cannot be mapped; names the field.
    """
    if arena.transport != tensor_pb2.TRANSPORT_CUDA_IPC or not cuda.is_supported(device):
        raise ArenaError("transport", f"{arena.transport} is none that this process can do")
    from foredraft.transport.cuda_ipc import CudaIpcExchange, CudaIpcMapping

    mapping = CudaIpcMapping(arena, epoch, device)
    try:
        return CudaIpcExchange(mapping, arena, None)
    except ArenaError:
        mapping.close()
        raise
