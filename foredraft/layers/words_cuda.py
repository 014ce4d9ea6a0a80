"""Multiplies weights of 4 and 8 bits on NVIDIA GPUs, with the same arithmetic for any number of
rows.

(number - zero) * scale is rounded to the activations' type, then multiplied like a plain weight. Up
to `MOST_ROWS` rows the kernels do this in registers; for more the whole matrix is dequantised for
each product.
"""

from typing import Literal, NamedTuple

import torch

from foredraft.kernel_launch import VARIANTS, overlapped, power_of_two
from foredraft.layers import exact_gemm, words_factors, words_native
from foredraft.layers.linear import Linear, LinearMethod, ProductBytes
from foredraft.layers.parameters import frozen_parameter
from foredraft.layers.quantized_matrix import Matrix
from foredraft.layers.weight_scheme import WeightScheme

MOST_ROWS = 512  # maximum rows of the kernels that dequantise in registers
_FEW_ROWS = 8  # up to which the warps of a program sum up a part of the inputs each
_FEW_GATED_ROWS = 32  # the same for gated outputs, whose parts no kernel adds up later
_PARTED_ROWS = 256  # up to which programs sum up a part of the inputs each
_UNITS = (32, 16)  # words of a unit, see `words_kernels`
_PARTS = (4, 2, 1)  # parts of the inputs
_WIDE = 16384  # outputs from which on there are programs enough that have all inputs
_MANY = 6144  # outputs from which on programs of twice as many are faster
# Inputs of a part are a multiple of this: tiles of dequantised weights are whole.
_PART_MULTIPLE = 128
_H200_SHARED = 232448


class _Tile(NamedTuple):
    """What a program computes, and with what.

    Attributes:
        parts_by: What sums up the parts of the inputs: the warps of a program, programs, or a
            program in turns.
        rows, outputs: Size of the tile.
        warps: Number of warps of the program.
        stages: Number of stages of its pipeline.
    """

    parts_by: Literal["warps", "programs", "turns"]
    rows: int
    outputs: int
    warps: int
    stages: int


class WordsMethod(LinearMethod):
    """Keeps integers of 4 or 8 bits in int32 words.

    `words_kernels` describes their order.

    Parameters of the layer: `weight` int32 [outputs, inputs * bits / 32]; `scales` float32 [groups,
    outputs], or with 4 bits the words of `words_factors`, [groups, outputs].
    """

    is_exact = True

    def __init__(
        self, scheme: WeightScheme, num_inputs: int, num_outputs: int, dtype: torch.dtype
    ) -> None:
        self._bits, self._dtype = scheme.bits, dtype
        self._group = scheme.group_size or num_inputs
        self._unit, self._parts = _cuts(scheme, num_inputs, num_outputs)
        self._form = words_factors.Form.STEPS

    @staticmethod
    def takes(matrix: Matrix, scheme: WeightScheme, dtype: torch.dtype) -> bool:
        """Returns whether the kernels support matrices of this format and size."""
        if scheme.layout == "fp8" or dtype not in (torch.bfloat16, torch.float16):
            return False
        num_outputs, num_inputs = matrix.numbers.shape
        if not _cuts(scheme, num_inputs, num_outputs)[0]:
            return False
        if scheme.bits == 4:
            return words_factors.are_finite(matrix.scales, dtype)
        return matrix.zeros is None or bool((matrix.zeros == 128).all())

    def set_matrix(self, linear: Linear, matrix: Matrix) -> None:
        """Stores the weights in the layer."""
        numbers, scales, zeros, bits = matrix.numbers, matrix.scales, matrix.zeros, self._bits
        if bits == 4:
            assert zeros is not None
            numbers, scales, zeros = words_factors.with_exact_offsets(
                numbers, scales, zeros, self._dtype
            )
            factors, self._form = words_factors.factor_words(scales.t(), zeros.t(), self._dtype)
            linear.scales = frozen_parameter(factors)
        else:
            linear.scales = frozen_parameter(scales.t().float())
        if bits == 4 and words_native.takes(numbers, self._dtype, self._group, self._unit):
            self.early_rows = words_native.MOST_ROWS
        if numbers.dtype == torch.int8:
            numbers = (numbers.short() + 128).to(torch.uint8)
        num_outputs, num_inputs = numbers.shape
        planes = 32 // bits
        units = numbers.view(num_outputs, -1, planes, self._unit)
        words = units[:, :, 0].int()
        for plane in range(1, planes):
            words |= units[:, :, plane].int() << bits * plane
        linear.weight = frozen_parameter(words.view(num_outputs, num_inputs // planes))

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod."""
        if not _fits_registers(x):
            return exact_gemm.multiply_parts(x, self.dequantized(linear), linear.bias, self._parts)
        out = self._multiply(linear, x)
        return out if out.dim() == 2 else _added_up(out, linear.bias, x.dtype)

    def apply_deferred(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod."""
        if linear.bias is None and _fits_registers(x):
            return self._multiply(linear, x)
        return self.apply(linear, x)

    def apply_gated(self, linear: Linear, x: torch.Tensor) -> torch.Tensor | None:
        """See LinearMethod."""
        return self._multiply(linear, x, gated=True) if _fits_registers(x) else None

    def _multiply(self, linear: Linear, x: torch.Tensor, gated: bool = False) -> torch.Tensor:
        """Computes x W^T + b, or float32 [parts, rows, outputs], the parts of x W^T."""
        from foredraft.layers import words_kernels as kernels

        rows, words = x.shape[0], linear.weight.shape[1]
        outputs = linear.num_outputs // 2 if gated else linear.num_outputs
        if rows <= self.early_rows:
            found = words_native.multiply(linear, x, self._group, self._parts, gated, self._form)
            if found is not None:
                return found
        tile = self._tile(rows, outputs, gated)
        stages = self._fitting(tile, gated, shared_memory(x.device))
        grid: tuple[int, ...] = (-(-outputs // tile.outputs),)
        kernel, variant = kernels.multiply_few, {}
        if tile.parts_by != "warps":
            grid = -(-rows // tile.rows), *grid
            kernel, variant = kernels.multiply_some, {"PARTED": tile.parts_by == "programs"}
        if tile.parts_by == "programs":
            grid, bias = (*grid, self._parts), None
            out = x.new_empty((self._parts, rows, outputs), dtype=torch.float32)
        else:
            out, bias = x.new_empty((rows, outputs)), linear.bias
        kernel[grid](
            x, linear.weight, linear.scales, x if bias is None else bias, out,
            rows, outputs, words, BITS=self._bits,
            GROUP=0 if self._group == linear.num_inputs else self._group, UNIT=self._unit,
            PARTS=self._parts, HAS_BIAS=bias is not None, GATED=gated, BLOCK_N=tile.outputs,
            BLOCK_M=tile.rows, ASM=self._bits == 4 and x.is_cuda, FORM=int(self._form),
            num_warps=tile.warps, num_stages=stages, **variant, **overlapped(x.device),
        )  # fmt: skip
        return out

    def product_bytes(self, linear: Linear, num_rows: int, itemsize: int) -> ProductBytes:
        """See LinearMethod."""
        plain = num_rows * linear.num_outputs * itemsize
        parted = min(num_rows, _PARTED_ROWS) * linear.num_outputs if self._parts > 1 else 0
        # The rounded sum of the parts, or with more rows the dequantised weights.
        scratch = max(parted * itemsize, linear.num_outputs * linear.num_inputs * itemsize)
        return ProductBytes(max(plain, parted * self._parts * 4), scratch)

    def _tile(self, rows: int, outputs: int, gated: bool) -> _Tile:
        """Returns the fastest tile of a sweep on an H200 over the matrices of Llama-3.1-8B."""
        block_m = max(8, power_of_two(rows))
        if self._parts == 1:
            block_n = 128 if block_m == 64 else 64
            warps, stages = 8 if block_m > 16 else 4, 4 if block_m == 16 else 3
            return _Tile("turns", min(block_m, 128), block_n, warps, stages)
        if rows <= (_FEW_GATED_ROWS if gated else _FEW_ROWS):
            block_n = 64 if outputs >= _MANY and not gated else 32
            return _Tile("warps", block_m, block_n, self._parts, 3)
        if rows <= _PARTED_ROWS and not gated:
            return _Tile("programs", min(block_m, 64), 128, 4, 3 if block_m <= 32 else 2)
        if rows <= 128:
            return _Tile("turns", 32 if rows <= 64 else 64, 64, 4, 3)
        return _Tile("turns", 128 if rows > 256 or outputs >= _MANY else 64, 128, 8, 3)

    def _fitting(self, tile: _Tile, gated: bool, room: int) -> int:
        """Limits the number of stages to what shared memory holds.

        A stage holds a unit of x, its words and their factors, one of each part where warps have
        parts. One stage fewer is under way at a time; of x another is being read by the matrix
        units.

        Args:
            tile: Tile whose stages are wanted.
            gated: Whether a program reads two outputs of W for each of its own.
            room: Bytes of shared memory that a program may use.
        """
        inputs = self._unit * (32 // self._bits)
        x = inputs * tile.rows * self._dtype.itemsize
        lines = 2 * tile.outputs if gated else tile.outputs
        stage = x + (self._unit + max(1, inputs // self._group)) * lines * 4
        if tile.parts_by == "warps":
            stage, x = stage * self._parts, 0
        return max(1, min(tile.stages, (room - x) // stage + 1))

    def dequantized(self, linear: Linear) -> torch.Tensor:
        """Returns the weights [outputs, inputs] in the activations' data type."""
        from foredraft.layers import words_kernels as kernels

        outputs, inputs = linear.num_outputs, linear.num_inputs
        out = torch.empty((outputs, inputs), dtype=self._dtype, device=linear.weight.device)
        block_n = 32
        grid = (-(-outputs // block_n), inputs * self._bits // 32 // self._unit)
        kernels.dequantize_words[grid](
            linear.weight, linear.scales, out, outputs, inputs,
            BITS=self._bits, GROUP=self._group, UNIT=self._unit,
            FORM=int(self._form), BLOCK_N=block_n,
        )  # fmt: skip
        return out


def _added_up(parts: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns the sum of float32 [parts, rows, outputs], and of the bias, rounded to `dtype`."""
    from foredraft.layers import words_kernels as kernels

    count, rows, outputs = parts.shape
    out = parts.new_empty((rows, outputs), dtype=dtype)
    kernels.add_parts[(rows, -(-outputs // 1024))](
        parts, out if bias is None else bias, out, outputs, PARTS=count,
        HAS_BIAS=bias is not None, BLOCK=1024, **overlapped(parts.device),
    )  # fmt: skip
    return out


def _fits_registers(x: torch.Tensor) -> bool:
    return 0 < x.shape[0] <= MOST_ROWS and not VARIANTS.are_few


def shared_memory(device: torch.device) -> int:
    """Returns the bytes of shared memory that a program may use; an H200's for other devices than
    GPUs.
    """
    if device.type != "cuda":
        return _H200_SHARED
    properties = torch.cuda.get_device_properties(device)
    return int(
        getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    )


def _cuts(scheme: WeightScheme, num_inputs: int, num_outputs: int) -> tuple[int, int]:
    """Returns the words of a unit and the number of parts of the inputs; zeros where none fit.

    Units must divide a part evenly, and each plane of a unit must lie in one group of scales.
    """
    group = scheme.group_size or num_inputs
    planes = 32 // scheme.bits
    for parts in (1,) if num_outputs >= _WIDE else _PARTS:
        share, rest = divmod(num_inputs, parts)
        if rest or num_inputs % group or (parts > 1 and share % _PART_MULTIPLE):
            continue
        if parts > 1 and group < num_inputs and share % group:
            continue
        for unit in _UNITS:
            if share % (unit * planes) == 0 and group % unit == 0:
                return unit, parts
    return 0, 0
