"""The draft's end of the arena. Torch is imported only for drafters that read hidden states."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.errors import AttachRefused

if TYPE_CHECKING:
    from foredraft.transport.base import HiddenReader


def supported_transports(
    info: draft_pb2.GetDraftInfoResponse,
) -> Sequence[tensor_pb2.Transport]:
    """What this process can map, best first."""
    if not info.HasField("hidden"):
        return [tensor_pb2.TRANSPORT_INLINE]
    from foredraft.transport import choice

    return choice.supported()


def open_reader(
    info: draft_pb2.GetDraftInfoResponse, attach: draft_pb2.AttachRequest
) -> "HiddenReader | None":
    """Maps the verifier's arena; None when the drafter reads no hidden states.

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
        return choice.open_reader(attach.arena, RowFormat.of(info.hidden), attach.epoch)
    except ArenaError as error:
        raise AttachRefused(f"arena.{error.field}", error.message) from error
