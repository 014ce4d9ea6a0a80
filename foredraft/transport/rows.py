"""Rows of hidden states: their format, their name in an arena, and what is said of an arena that does not fit."""

from dataclasses import dataclass

import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.errors import ForedraftError, InvalidRequest
from foredraft.transport import codec

HIDDEN = "hidden"  # name of the ring among the arena's tensors
MAX_ROW_BYTES = 1 << 24


class ArenaError(ForedraftError):
    """An arena cannot be made here, or one that is offered cannot be mapped.

    Args:
        field: Name of what is to blame: a field of `tensor_pb2.Arena`, where it is one.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


@dataclass(frozen=True, slots=True)
class RowFormat:
    """One row of hidden states.

    Attributes:
        width: Elements.
        dtype: Their type.
    """

    width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, needs: draft_pb2.HiddenNeeds) -> "RowFormat":
        """The rows that a draft wants.

        Raises:
            InvalidRequest: There are no such rows.
        """
        row = cls(needs.width, codec.to_torch(needs.dtype))
        if not row.dtype.is_floating_point or not 0 < row.num_bytes <= MAX_ROW_BYTES:
            raise InvalidRequest("hidden", f"rows of {row.width} x {row.dtype}")
        return row

    @property
    def num_bytes(self) -> int:
        """Bytes of a row."""
        return self.width * self.dtype.itemsize
