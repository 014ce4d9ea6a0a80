"""Opens the memory through which a draft gets the target's hidden states.

Torch is imported only for drafters that need such memory.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.errors import AttachRefused

if TYPE_CHECKING:
    import torch

    from foredraft.transport.base import HiddenReader
    from foredraft.transport.device_exchange import DraftExchange


def supported_transports(
    info: draft_pb2.GetDraftInfoResponse, device: "torch.device | None"
) -> Sequence[tensor_pb2.Transport]:
    """Returns the transports that this process can map, best first.

    Args:
        device: Device of the drafter; None for one without torch.
    """
    if not info.HasField("hidden") and not info.device_steps:
        return [tensor_pb2.TRANSPORT_INLINE]
    from foredraft.transport import choice

    return choice.supported(True, device or choice.CPU)


def open_arena(
    info: draft_pb2.GetDraftInfoResponse,
    attach: draft_pb2.AttachRequest,
    device: "torch.device | None",
) -> "tuple[HiddenReader | None, DraftExchange | None]":
    """Maps the verifier's arena, for hidden states and for steps that stay on the GPU.

    Args:
        device: Device of the drafter; None for one without torch.

    Raises:
        AttachRefused: The arena is missing or cannot be mapped; names its field.
    """
    needs_rows, has_arena = info.HasField("hidden"), attach.HasField("arena")
    if needs_rows and not has_arena:
        raise AttachRefused("arena", "this draft reads hidden states, and the verifier offers none")
    if not has_arena or not (needs_rows or info.device_steps):
        return None, None
    from foredraft.transport import choice
    from foredraft.transport.rows import ArenaError, RowFormat

    where = device or choice.CPU
    try:
        if not needs_rows:
            return None, choice.open_exchange(attach.arena, attach.epoch, where)
        row = RowFormat.of(info.hidden, info.fusion.width if attach.fused else None)
        reader = choice.open_reader(attach.arena, row, attach.epoch, where)
    except ArenaError as error:
        raise AttachRefused(f"arena.{error.field}", error.message) from error
    return reader, reader.exchange


def device_works(device: "torch.device") -> bool:
    """Returns whether this process can still use a device that it has used; some faults are
    permanent.
    """
    from foredraft.transport import cuda

    return cuda.works(device)
