"""The draft's end of the arena. Torch is imported only for drafters that read hidden states."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.errors import AttachRefused

if TYPE_CHECKING:
    import torch

    from foredraft.transport.base import HiddenReader


def supported_transports(
    info: draft_pb2.GetDraftInfoResponse, device: "torch.device | None"
) -> Sequence[tensor_pb2.Transport]:
    """What this process can map, best first.

    Args:
        device: Where the drafter runs; None for one without torch.
    """
    if not info.HasField("hidden"):
        return [tensor_pb2.TRANSPORT_INLINE]
    from foredraft.transport import choice

    return choice.supported(True, device or choice.CPU)


def open_reader(
    info: draft_pb2.GetDraftInfoResponse,
    attach: draft_pb2.AttachRequest,
    device: "torch.device | None",
) -> "HiddenReader | None":
    """Maps the verifier's arena; None when the drafter reads no hidden states.

    Args:
        device: Where the drafter runs; None for one without torch.

    Raises:
        AttachRefused: The arena is missing or cannot be mapped; names its field.
    """
    if not info.HasField("hidden"):
        return None
    from foredraft.transport import choice
    from foredraft.transport.base import ArenaError, RowFormat

    if not attach.HasField("arena"):
        raise AttachRefused("arena", "this draft reads hidden states, and the verifier offers none")
    try:
        row = RowFormat.of(info.hidden)
        return choice.open_reader(attach.arena, row, attach.epoch, device or choice.CPU)
    except ArenaError as error:
        raise AttachRefused(f"arena.{error.field}", error.message) from error
