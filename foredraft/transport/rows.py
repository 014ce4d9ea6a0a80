"""Format of rows of hidden states, their name in an arena, and the error for an arena that does not
fit.
"""

from dataclasses import dataclass

import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.errors import ForedraftError, InvalidRequest
from foredraft.transport import codec

HIDDEN = "hidden"  # name of the ring among the arena's tensors
MAX_ROW_BYTES = 1 << 24


class ArenaError(ForedraftError):
    """Raised when an arena cannot be created here, or an offered one cannot be mapped.

    Args:
        field: Name of the cause: a field of `tensor_pb2.Arena`, where it is one.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Format of one row of hidden states.

    Attributes:
        width: Number of elements.
        dtype: Type of the elements.
    """

    width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, needs: draft_pb2.HiddenNeeds, width: int | None = None) -> "RowFormat":
        """Returns the format of the rows that a draft asks for.

        Args:
            width: Width of the features, where the verifier projects hidden states to features.

        Raises:
            InvalidRequest: The format is not supported.
        """
        row = cls(needs.width if width is None else width, codec.to_torch(needs.dtype))
        if not row.dtype.is_floating_point or not 0 < row.num_bytes <= MAX_ROW_BYTES:
            raise InvalidRequest("hidden", f"rows of {row.width} x {row.dtype}")
        return row

    @property
    def num_bytes(self) -> int:
        """Number of bytes of a row."""
        return self.width * self.dtype.itemsize
