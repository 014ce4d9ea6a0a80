"""What a norm returns: rows, and the same rows as 8-bit floats."""

from typing import NamedTuple

import torch


class RoundedRows(NamedTuple):
    """Rows as 8-bit floats with scales.

    Attributes:
        numbers: float8_e4m3fn [num_rows, size].
        scales: float32 [groups, num_rows], for each row one scale of each group of columns.
    """

    numbers: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int, size: int, group: int, device: torch.device) -> "RoundedRows":
        """Allocates rows; `group` columns share a scale, all of them where it is 0."""
        return cls(
            torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=device),
            torch.empty((size // (group or size), num_rows), dtype=torch.float32, device=device),
        )


class Normed(NamedTuple):
    """Rows that a norm has made.

    Attributes:
        rows: [num_rows, size].
        rounded: The same rows as 8-bit floats, where the layer that reads them first wants them and
            the norm has made them.
    """

    rows: torch.Tensor
    rounded: RoundedRows | None = None
