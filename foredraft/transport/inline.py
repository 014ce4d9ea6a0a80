"""Hidden states inside the messages: for a draft on another host."""

import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.errors import InvalidRequest
from foredraft.transport import codec
from foredraft.transport.base import HiddenReader, HiddenWriter
from foredraft.transport.rows import RowFormat

MAX_BYTES = 32 << 20  # maximum size of the rows in one message; half of gRPC's limit


class InlineWriter(HiddenWriter):
    """Puts rows into messages; the ring only bounds the number of rows that are unanswered.

    Args:
        row: Format of the rows.
        capacity: Rows under way at most.
        epoch: Number of the attach.
    """

    def __init__(self, row: RowFormat, capacity: int, epoch: int) -> None:
        super().__init__(row, min(capacity, MAX_BYTES // row.num_bytes))
        self.arena = tensor_pb2.Arena(transport=tensor_pb2.TRANSPORT_INLINE, epoch=epoch)

    def _put(self, first: int, rows: torch.Tensor) -> draft_pb2.HiddenRows:
        return draft_pb2.HiddenRows(inline=codec.encode(rows), num_rows=len(rows))


class InlineReader(HiddenReader):
    """Takes rows out of messages."""

    def __init__(self, row: RowFormat) -> None:
        self._row = row

    def read(self, rows: draft_pb2.HiddenRows) -> torch.Tensor:
        """Returns the rows of the message."""
        if rows.WhichOneof("source") != "inline":
            raise InvalidRequest("hidden", "the rows are not in the message, as was agreed")
        tensor = codec.decode(rows.inline)
        expected = (rows.num_rows, self._row.width)
        if tuple(tensor.shape) != expected or tensor.dtype != self._row.dtype:
            raise InvalidRequest(
                "hidden",
                f"rows are {tuple(tensor.shape)} {tensor.dtype}, not {expected} {self._row.dtype}",
            )
        return tensor
