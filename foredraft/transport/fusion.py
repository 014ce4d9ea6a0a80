"""Description and weights of a draft's projection of hidden states, as messages."""

from collections.abc import Iterable, Iterator, Mapping

import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.errors import AttachRefused, InvalidRequest
from foredraft.transport import codec
from foredraft.types import FusionShape

PART_BYTES = 1 << 20


def describe(shape: FusionShape) -> draft_pb2.Fusion:
    """Returns the message that describes a projection."""
    return draft_pb2.Fusion(
        width=shape.num_outputs,
        num_stream_norms=shape.num_stream_norms,
        normalizes_input=shape.normalizes_input,
        has_bias=shape.has_bias,
        normalizes_output=shape.normalizes_output,
        epsilon=shape.eps,
    )


def shape_of(info: draft_pb2.GetDraftInfoResponse) -> FusionShape:
    """Returns the shape of the projection that a draft describes.

    Raises:
        AttachRefused: It contradicts itself.
    """
    said, width = info.fusion, info.hidden.width
    if not 0 < said.width <= width or (said.num_stream_norms and width % said.num_stream_norms):
        raise AttachRefused(
            "fusion",
            f"{said.num_stream_norms} streams of {width} elements cannot give {said.width}",
        )
    if not 0 < said.epsilon < 1:
        raise AttachRefused("fusion.epsilon", f"must be in (0, 1), not {said.epsilon}")
    return FusionShape(
        num_inputs=width,
        num_outputs=said.width,
        num_stream_norms=said.num_stream_norms,
        normalizes_input=said.normalizes_input,
        has_bias=said.has_bias,
        normalizes_output=said.normalizes_output,
        eps=said.epsilon,
    )


def parts_of(weights: Mapping[str, torch.Tensor]) -> Iterator[draft_pb2.GetFusionResponse]:
    """Yields weights, some rows at a time."""
    for name, weight in weights.items():
        row_bytes = weight[:1].numel() * weight.element_size()
        num_rows = max(1, PART_BYTES // row_bytes)
        for first in range(0, len(weight), num_rows):
            rows = codec.encode(weight[first : first + num_rows])
            yield draft_pb2.GetFusionResponse(name=name, first_row=first, rows=rows)


@torch.no_grad()
def fill(weights: Mapping[str, torch.Tensor], parts: Iterable[draft_pb2.GetFusionResponse]) -> None:
    """Fills weights from the parts that a draft sends.

    Raises:
        AttachRefused: A weight is missing, unknown, misshaped, of another type or not finite; it is
            named.
    """
    filled = dict.fromkeys(weights, 0)
    for part in parts:
        try:
            _fill(weights, filled, part)
        except InvalidRequest as error:
            raise AttachRefused(f"fusion.{part.name}", error.message) from error
    for name, weight in weights.items():
        if filled[name] != len(weight):
            raise AttachRefused(f"fusion.{name}", f"{filled[name]} of {len(weight)} rows were sent")
        if not bool(weight.isfinite().all()):
            raise AttachRefused(f"fusion.{name}", "has values that are infinite or no numbers")


def _fill(
    weights: Mapping[str, torch.Tensor],
    filled: dict[str, int],
    part: draft_pb2.GetFusionResponse,
) -> None:
    weight = weights.get(part.name)
    if weight is None:
        raise AttachRefused("fusion", f"there is no weight named {part.name!r}")
    first, field = part.first_row, f"fusion.{part.name}"
    rows = codec.decode(part.rows)
    if rows.dtype != weight.dtype:
        raise AttachRefused(field, f"is {rows.dtype}, the hidden states are {weight.dtype}")
    if first != filled[part.name]:
        raise AttachRefused(field, f"row {first} came after {filled[part.name]} rows")
    if rows.shape[1:] != weight.shape[1:] or first + len(rows) > len(weight):
        raise AttachRefused(
            field, f"rows {tuple(rows.shape)} from {first} on do not fit {tuple(weight.shape)}"
        )
    weight[first : first + len(rows)].copy_(rows)
    filled[part.name] += len(rows)
