"""Rows of 8-bit floats that a kernel has made beside the rows that it was asked for, kept for the
product that reads these.
"""

import torch

_NAME = "_rounded_rows"


def keep(x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> None:
    """Keeps the 8-bit floats of rows as long as the rows themselves, which must not change.

    Args:
        x: [n, inputs].
        numbers: float8_e4m3fn [n, inputs].
        scales: float32 [groups, n].
    """
    setattr(x, _NAME, (numbers, scales))


def kept(x: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the 8-bit floats of rows and their scales; None where none are kept.

    Args:
        groups: Number of scales of a row.
    """
    found: tuple[torch.Tensor, torch.Tensor] | None = getattr(x, _NAME, None)
    return found if found is not None and found[1].shape == (groups, len(x)) else None
