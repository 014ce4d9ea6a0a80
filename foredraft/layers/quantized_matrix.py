"""A quantised matrix as methods take it, whatever a checkpoint stores it as."""

from dataclasses import dataclass

import torch

from foredraft.layers.weight_scheme import UNIT

ROWS_AT_ONCE = 4096  # outputs that are dequantised together


@dataclass(slots=True)
class Matrix:
    """A quantised matrix: a weight is (number - zero) * scale + offset.

    Attributes:
        numbers: [outputs, inputs], uint8, int8 or float8_e4m3fn.
        scales: float32 or float16 [outputs, groups]; int8 with `scale_units`.
        zeros: uint8 [outputs, groups], or None for zero.
        groups: int64 [inputs], the group of each input; None where groups follow each other.
        offsets: As `scales`; None for zero.
        scale_units, offset_units: float16 [outputs, units], factors of the scales and offsets of
            256 inputs; None for 1.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    groups: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    scale_units: torch.Tensor | None = None
    offset_units: torch.Tensor | None = None


def dequantize(matrix: Matrix, group_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Computes (number - zero) * scale + offset in float32, rounded once to `dtype`; [outputs,
    inputs].

    Args:
        matrix: The quantised weights.
        group_size: Number of inputs that share a scale, where an output has several scales.
        dtype: Data type of the result.
    """
    num_outputs, num_inputs = matrix.numbers.shape
    out = torch.empty((num_outputs, num_inputs), dtype=dtype, device=matrix.numbers.device)
    each = group_size if matrix.scales.shape[1] > 1 else num_inputs

    def by_inputs(groups: torch.Tensor) -> torch.Tensor:
        return groups.float().repeat_interleave(each, 1)[:, :num_inputs]

    def factors(values: torch.Tensor, units: torch.Tensor | None, rows: slice) -> torch.Tensor:
        found = by_inputs(values[rows])
        if units is None:
            return found
        return found.mul_(units[rows].float().repeat_interleave(UNIT, 1)[:, :num_inputs])

    for begin in range(0, num_outputs, ROWS_AT_ONCE):
        rows = slice(begin, begin + ROWS_AT_ONCE)
        values = matrix.numbers[rows].float()
        if matrix.zeros is not None:
            values -= by_inputs(matrix.zeros[rows])
        values *= factors(matrix.scales, matrix.scale_units, rows)
        if matrix.offsets is not None:
            values += factors(matrix.offsets, matrix.offset_units, rows)
        out[rows] = values
    return out
