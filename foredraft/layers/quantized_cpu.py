"""Multiplies weights of 4 and 8 bits on a CPU, in C (`foredraft/cpu/_tiles.c`), with the same
arithmetic for any number of rows.

A weight is (number - zero) * scale + offset in float32, rounded once, and an output adds x[k] *
weight[k] up from the first input to the last, each product and sum rounded once. Few rows read the
packed numbers, so they cost the time to read these bytes; many rows share a tile's weights in
float32.
"""

import torch
import torch.nn.functional as F

from foredraft.cpu import _kernels
from foredraft.layers.linear import Linear, LinearMethod
from foredraft.layers.parameters import frozen_parameter
from foredraft.layers.quantized_matrix import Matrix, dequantize
from foredraft.layers.weight_scheme import UNIT, WeightScheme

TILE = _kernels.TILE  # outputs in a tile
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}


class TiledMethod(LinearMethod):
    """Keeps quantised weights in tiles of 32 outputs.

    Parameters of the layer: `weight` uint8 [tiles, inputs, 32], with 4 bits [tiles, inputs, 16],
    where outputs 0 to 15 are in the lower halves of the bytes and 16 to 31 in the upper ones;
    `scales` [tiles, groups, 32] in the smallest type that holds them; `zeros` uint8 [tiles, groups,
    32], or none where all are the same; `offsets` as scales, or none. Scales and offsets of int8
    have float16 factors for 256 inputs, `scale_units` and `offset_units` [tiles, units, 32].

    Args:
        scheme: Format in which the checkpoint stores the numbers.
    """

    is_exact = True

    def __init__(self, scheme: WeightScheme) -> None:
        self._bits, self._group_size = scheme.bits, scheme.group_size
        self._zero = 1 << (scheme.bits - 1)
        self._unit_size = 0

    def set_matrix(self, linear: Linear, matrix: Matrix) -> None:
        """Stores the weights in the layer."""
        numbers, middle, zeros = matrix.numbers, self._zero, matrix.zeros
        # A tied LM head has no widths of its own until it has weights of its own.
        linear.num_outputs, linear.num_inputs = numbers.shape
        if numbers.dtype == torch.int8:
            numbers = (numbers.short() + middle).to(torch.uint8)
        elif zeros is None:
            self._zero = 0
        tiles = _tiled(numbers)
        if self._bits == 4:
            tiles = tiles[..., : TILE // 2] | tiles[..., TILE // 2 :] << 4
        linear.weight = frozen_parameter(tiles)
        linear.scales = frozen_parameter(_tiled(_smallest(matrix.scales)))
        if zeros is not None and bool((zeros != middle).any()):
            linear.zeros = frozen_parameter(_tiled(zeros))
        if matrix.offsets is not None:
            linear.offsets = frozen_parameter(_tiled(_smallest(matrix.offsets)))
        if matrix.scale_units is not None:
            self._unit_size = UNIT
            linear.scale_units = frozen_parameter(_tiled(matrix.scale_units))
        if matrix.offset_units is not None:
            linear.offset_units = frozen_parameter(_tiled(matrix.offset_units))

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod."""
        return self.multiply(linear, x).to(x.dtype)

    def multiply(self, linear: Linear, x: torch.Tensor, kernel: int = 0) -> torch.Tensor:
        """Computes x W^T + b in float32.

        Args:
            linear: Layer with the weights.
            x: [num_rows, num_inputs], any float type.
            kernel: Index into `foredraft.cpu.products.KERNELS`; all kernels that fuse products and
                sums give the same bits.

        Raises:
            ValueError: The width of x is not the layer's.
        """
        if x.shape[1:] != (linear.num_inputs,):
            raise ValueError(f"x is {tuple(x.shape)} where a row has {linear.num_inputs} numbers")
        rows = x.float().contiguous()
        bias = None if linear.bias is None else linear.bias.float()
        out = torch.empty((len(rows), linear.num_outputs))
        if len(rows):
            _kernels.multiply_tiles(
                rows.data_ptr(),
                out.data_ptr(),
                _address(bias),
                linear.weight.data_ptr(),
                _address(_optional(linear, "zeros")),
                *_factors(linear, "scales", "scale_units"),
                *_factors(linear, "offsets", "offset_units"),
                len(rows),
                linear.num_inputs,
                linear.num_outputs,
                self._group_size or linear.num_inputs,
                self._unit_size,
                self._bits,
                self._zero,
                kernel,
            )
        return out

    def rows(self, linear: Linear, outputs: torch.Tensor) -> torch.Tensor:
        """See LinearMethod; the weights are float32."""
        tiles, places = outputs // TILE, outputs % TILE
        numbers = linear.weight[tiles, :, places % linear.weight.shape[2]]
        if self._bits == 4:
            is_upper = (places >= TILE // 2)[:, None]
            numbers = torch.where(is_upper, numbers >> 4, numbers & 15)
        found = {
            name: values[tiles, :, places]
            for name in ("scales", "zeros", "offsets", "scale_units", "offset_units")
            if (values := _optional(linear, name)) is not None
        }
        if "zeros" not in found:
            found["zeros"] = torch.full_like(found["scales"], self._zero, dtype=torch.uint8)
        size = self._group_size or linear.num_inputs
        return dequantize(Matrix(numbers, **found), size, torch.float32)


def _optional(linear: Linear, name: str) -> torch.Tensor | None:
    return linear._parameters.get(name)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _factors(linear: Linear, values: str, units: str) -> tuple[int, int, int]:
    """Returns the addresses of factors of groups, or zeros, and their type."""
    own = _optional(linear, values)
    if own is None:
        return 0, 0, 0
    return own.data_ptr(), _address(_optional(linear, units)), _TYPES[own.dtype]


def _tiled(rows: torch.Tensor) -> torch.Tensor:
    """Rearranges [outputs, n] to [tiles, n, 32], with zeros after the last output."""
    rows = F.pad(rows, (0, 0, 0, -len(rows) % TILE))
    return rows.view(-1, TILE, rows.shape[1]).transpose(1, 2)


def _smallest(scales: torch.Tensor) -> torch.Tensor:
    """Returns the scales in 16 bits where that loses nothing; int8 as they are."""
    if not scales.is_floating_point():
        return scales
    scales = scales.float()
    for dtype in (torch.bfloat16, torch.float16):
        small = scales.to(dtype)
        if torch.equal(small.float(), scales):
            return small
    return scales
