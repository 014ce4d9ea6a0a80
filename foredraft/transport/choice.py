"""Which transport both ends can do, and its two ends."""

import logging
from collections.abc import Callable, Sequence

from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.transport import shared_memory
from foredraft.transport.base import ArenaError, HiddenReader, HiddenWriter, RowFormat
from foredraft.transport.inline import InlineReader, InlineWriter
from foredraft.transport.shared_memory import SharedMemoryReader, SharedMemoryWriter

NAMES: dict[tensor_pb2.Transport, str] = {
    tensor_pb2.TRANSPORT_SHM: "shm",
    tensor_pb2.TRANSPORT_INLINE: "inline",
}

_WRITERS: dict[tensor_pb2.Transport, Callable[[RowFormat, int, int], HiddenWriter]] = {
    tensor_pb2.TRANSPORT_SHM: SharedMemoryWriter,
    tensor_pb2.TRANSPORT_INLINE: InlineWriter,
}

logger = logging.getLogger(__name__)


def supported(same_host: bool = True) -> list[tensor_pb2.Transport]:
    """What this process can do, best first, with a peer on the same host or on any."""
    found: list[tensor_pb2.Transport] = [tensor_pb2.TRANSPORT_INLINE]
    if same_host and shared_memory.is_supported():
        found.insert(0, tensor_pb2.TRANSPORT_SHM)
    return found


def open_writer(
    transports: Sequence[tensor_pb2.Transport], row: RowFormat, capacity: int, epoch: int
) -> HiddenWriter:
    """The verifier's end of the first of `transports` that can be had.

    Args:
        capacity: Rows in use at most.

    Raises:
        ArenaError: None can be had.
    """
    reason = ArenaError("transport", "the draft and the verifier have none in common")
    for transport in transports:
        try:
            return _WRITERS[transport](row, capacity, epoch)
        except ArenaError as error:
            logger.warning("no %s transport: %s", NAMES[transport], error)
            reason = error
    raise reason


def open_reader(arena: tensor_pb2.Arena, row: RowFormat, epoch: int) -> HiddenReader:
    """The draft's end of an arena.

    Raises:
        ArenaError: It cannot be mapped; names the field.
    """
    if arena.transport == tensor_pb2.TRANSPORT_SHM and shared_memory.is_supported():
        return SharedMemoryReader(arena, row, epoch)
    if arena.transport == tensor_pb2.TRANSPORT_INLINE:
        return InlineReader(row)
    raise ArenaError("transport", f"{arena.transport} is none that this process can do")
