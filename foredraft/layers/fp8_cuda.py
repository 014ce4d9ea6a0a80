"""Multiplies weights of 8-bit floats on NVIDIA GPUs.

Each row of x is scaled by its largest magnitude and rounded to 8 bits. The 8-bit numbers are
multiplied, and the scales applied last: the same arithmetic for any number of rows.
"""

import torch
import torch.nn.functional as F

from foredraft.kernel_launch import VARIANTS, overlapped, power_of_two
from foredraft.layers import skinny_native
from foredraft.layers.heads import Heads, constants_of_heads
from foredraft.layers.linear import Linear, LinearMethod, ProductBytes
from foredraft.layers.normed import RoundedRows
from foredraft.layers.parameters import frozen_parameter
from foredraft.layers.quantized_matrix import Matrix
from foredraft.layers.weight_scheme import BLOCK, WeightScheme

MOST_ROWS = 64  # maximum rows of the kernels that read weights once for all rows
_WIDE = 16384  # outputs from which on programs of 64 outputs fill an H200
_BLOCK_N = 64  # outputs of a program of the kernel for 8-bit floats
# Widths of heads whose halves the kernel for 8-bit floats rotates: several programs of a head with
# scales by blocks would be of two blocks.
_HEAD_DIMS = (_BLOCK_N, BLOCK)
_COLUMNS = 2048  # columns of a program that rounds many rows to 8-bit floats
# With scales by blocks the library takes multiples of so many rows of x, and of so many inputs:
# with other inputs it takes scales from wrong places.
_ROW_MULTIPLE, _INPUT_MULTIPLE = 16, 512
_LEAST_ROWS = 128  # with fewer it cuts the inputs of some matrices into parts
# Compute capabilities: the first that multiplies 8-bit floats, and the range in which our kernel
# gives the library's bits.
_FIRST_FP8, _FIRST_KERNEL, _AFTER_KERNEL = (8, 9), (9, 0), (10, 0)


def _are_few(x: torch.Tensor) -> bool:
    """Returns whether these rows are for the kernels that read weights once."""
    return 0 < x.shape[0] <= MOST_ROWS and not VARIANTS.are_few


class Fp8Method(LinearMethod):
    """Keeps weights as 8-bit floats, and rounds x to 8-bit floats too.

    A row of x has one scale, or one for each 128 columns where the weights' scales are by blocks.

    Parameters of the layer: `weight` float8_e4m3fn [outputs, inputs]; `scales` float32 [1,
    outputs], or [outputs / 128, inputs / 128].
    """

    def __init__(self, scheme: WeightScheme) -> None:
        self._by_blocks = scheme.granularity == "block"
        self._size = BLOCK if self._by_blocks else 0  # columns that share a scale, 0 for all
        self.rounds = self._size
        self.is_exact = False
        self.has_heads = True

    @staticmethod
    def takes(matrix: Matrix, scheme: WeightScheme) -> bool:
        """Returns whether device and kernels support matrices of this format and size."""
        if scheme.layout != "fp8":
            return False
        num_outputs, num_inputs = matrix.numbers.shape
        capability = torch.cuda.get_device_capability(matrix.numbers.device)
        if scheme.granularity == "block":
            # Matrices that are stacked must each begin with a new block.
            blocks = _block_scales(matrix)
            is_even = num_outputs % BLOCK == 0 and torch.equal(
                blocks.repeat_interleave(BLOCK, 0), matrix.scales
            )
            return is_even and num_inputs % _INPUT_MULTIPLE == 0 and _has_kernel(capability)
        return num_outputs % 16 == 0 and num_inputs % BLOCK == 0 and capability >= _FIRST_FP8

    def set_matrix(self, linear: Linear, matrix: Matrix) -> None:
        """Stores the weights in the layer."""
        linear.weight = frozen_parameter(matrix.numbers)
        scales = _block_scales(matrix) if self._by_blocks else matrix.scales.view(1, -1)
        linear.scales = frozen_parameter(scales)
        self.is_exact = _has_kernel(torch.cuda.get_device_capability(matrix.numbers.device))
        if not self._by_blocks:
            self.early_rows = skinny_native.early_rows(torch.bfloat16, matrix.numbers.device)

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod."""
        return self._apply(linear, x, None)

    def apply_rounded(self, linear: Linear, x: torch.Tensor, rounded: RoundedRows) -> torch.Tensor:
        """See LinearMethod."""
        return self._apply(linear, x, rounded)

    def apply_gated(self, linear: Linear, x: torch.Tensor) -> torch.Tensor | None:
        """See LinearMethod."""
        return self._multiply(linear, x, None, gated=True) if self._is_for_kernel(x) else None

    def apply_gated_rounded(
        self, linear: Linear, x: torch.Tensor, rounded: RoundedRows
    ) -> torch.Tensor | None:
        """See LinearMethod."""
        return self._multiply(linear, x, rounded, gated=True) if self._is_for_kernel(x) else None

    def apply_heads(
        self, linear: Linear, x: torch.Tensor, rounded: RoundedRows | None, heads: Heads
    ) -> torch.Tensor | None:
        """See LinearMethod."""
        if not self._is_for_kernel(x) or heads.keys.shape[2] not in _HEAD_DIMS:
            return None
        return self._multiply(linear, x, rounded, heads=heads)

    def _is_for_kernel(self, x: torch.Tensor) -> bool:
        return self.is_exact and _are_few(x)

    def _apply(self, linear: Linear, x: torch.Tensor, rounded: RoundedRows | None) -> torch.Tensor:
        if self._is_for_kernel(x):
            return self._multiply(linear, x, rounded)
        # The library gives the kernel's bits: it too makes one pass over the inputs, with the same
        # short sums in the tensor cores.
        by_library = _scaled_blocks if self._by_blocks else _scaled_rows
        out = by_library(linear, x, rounded).to(x.dtype)
        return out if linear.bias is None else out.add_(linear.bias)

    def _multiply(
        self,
        linear: Linear,
        x: torch.Tensor,
        rounded: RoundedRows | None,
        gated: bool = False,
        heads: Heads | None = None,
    ) -> torch.Tensor:
        from foredraft.layers import fp8_kernels as kernels

        rows, scales = rounded or quantize_rows(x, self._size, len(x) <= self.early_rows)
        count, inputs = len(rows), linear.num_inputs
        outputs = linear.num_outputs // 2 if gated else linear.num_outputs
        own = Heads.none(x) if heads is None else heads
        shape = (count, outputs) if heads is None else heads.queries_shape
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        is_native = x.dtype == torch.bfloat16 and not self._by_blocks
        if is_native and skinny_native.multiply(
            rows, linear.weight, linear.bias, out,
            scales=(scales, linear.scales), gated=gated, heads=heads,
        ):  # fmt: skip
            return out
        block_m = max(16, power_of_two(count))
        unroll, block_k, stages = _fp8_tile(self._by_blocks, outputs, inputs, block_m, gated)
        kernels.multiply_fp8[(-(-outputs // _BLOCK_N),)](
            rows, scales, linear.weight, linear.scales, out if linear.bias is None else linear.bias,
            out, count, outputs, inputs, *own.kernel_arguments, BLOCKS=self._by_blocks,
            HAS_BIAS=linear.bias is not None, GATED=gated, UNROLL=unroll, BLOCK_N=_BLOCK_N,
            BLOCK_M=block_m, BLOCK_K=block_k, num_warps=4, num_stages=stages,
            **constants_of_heads(own), **overlapped(x.device),
        )  # fmt: skip
        return out

    def product_bytes(self, linear: Linear, num_rows: int, itemsize: int) -> ProductBytes:
        """See LinearMethod."""
        size = _block_rows(num_rows) if self._by_blocks else num_rows
        groups = linear.num_inputs // BLOCK if self._by_blocks else 1
        rounded = size * (linear.num_inputs + 4 * groups)
        padded = size * linear.num_inputs * itemsize if self._by_blocks and size > num_rows else 0
        result = size * linear.num_outputs * itemsize
        # The library gives bfloat16, from which other types are made.
        return ProductBytes(result, max(rounded + padded, result))


def _fp8_tile(
    by_blocks: bool, outputs: int, inputs: int, block_m: int, gated: bool
) -> tuple[int, int, int]:
    """Returns blocks and inputs of an iteration, and stages: the fastest of a sweep on an H200.

    Narrow matrices have few programs; each must have more loads in flight.
    """
    if by_blocks:
        if outputs < _WIDE and not gated:
            return 4, BLOCK, 3 if block_m > 32 else 4
        return 1, BLOCK, 6 if gated and block_m == 16 else 4
    if outputs >= _WIDE:
        return 1, BLOCK, 8
    if gated:
        return 1, BLOCK, 4  # two programs share a multiprocessor
    if inputs % (2 * BLOCK):
        return 1, BLOCK, 8
    return 1, 2 * BLOCK, 8 if block_m == 16 else 6


def _block_rows(count: int) -> int:
    """Returns the number of rows that the library computes with blocks: a multiple of 16, and not
    so few that it cuts the inputs into parts.
    """
    return max(_LEAST_ROWS, -(-count // _ROW_MULTIPLE) * _ROW_MULTIPLE)


def _scaled_rows(linear: Linear, x: torch.Tensor, rounded: RoundedRows | None) -> torch.Tensor:
    rows, scales = rounded or quantize_rows(x)
    return torch._scaled_mm(
        rows, linear.weight.t(), scale_a=scales.t(), scale_b=linear.scales,
        out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip


def _scaled_blocks(linear: Linear, x: torch.Tensor, rounded: RoundedRows | None) -> torch.Tensor:
    count = x.shape[0]
    size = _block_rows(count)
    if size > count:
        x, rounded = F.pad(x, (0, 0, 0, size - count)), None
    rows, scales = rounded or quantize_rows(x, BLOCK)
    return torch._scaled_mm(
        rows, linear.weight.t(), scale_a=scales.t(), scale_b=linear.scales.t(),
        out_dtype=torch.bfloat16,
    )[:count]  # fmt: skip


def _block_scales(matrix: Matrix) -> torch.Tensor:
    """Returns one row of scales for each block of outputs, [outputs / 128, groups]."""
    return matrix.scales[::BLOCK]


def _has_kernel(capability: tuple[int, int]) -> bool:
    return _FIRST_KERNEL <= capability < _AFTER_KERNEL


def quantize_rows(x: torch.Tensor, size: int = 0, early: bool = False) -> RoundedRows:
    """Converts rows to 8-bit floats with scales.

    Args:
        x: [n, inputs], rows to convert.
        size: Number of columns that share a scale, a divisor of the inputs; 0 for whole rows.
        early: Whether the kernel behind fetches weights before it waits for this one.
    """
    from foredraft.layers import fp8_kernels as kernels

    count, inputs = x.shape
    size = size or inputs
    found = RoundedRows.empty(count, inputs, size, x.device)
    if count:
        block = power_of_two(size)
        # Few rows are spread over more programs; many would be too many programs of 128 numbers.
        parts = max(1, _COLUMNS // block) if count > MOST_ROWS else 1
        kernels.quantize_rows[(count, -(-(inputs // size) // parts))](
            x, found.numbers, found.scales, size, inputs, count, PARTS=parts, BLOCK=block,
            EARLY=early, num_warps=min(16, max(1, parts * block // 512)), **overlapped(x.device),
        )  # fmt: skip
    return found
