"""Products of more rows than `few_rows` takes that are faster than cuBLAS's, on GPUs of compute capability 9.0.

Gated ones are one kernel in place of cuBLAS's and the gate's: what the two halves of the weight give never leaves the
registers. Long ones of few outputs are cut along their columns, as those of few rows are. `benchmarks/gpu/gemm.py` measures
both beside cuBLAS.
"""

import functools
import logging

import torch
import torch.nn.functional as F

from foredraft.attention.launch import overlapped
from foredraft.layers import few_rows

logger = logging.getLogger(__name__)

_HALF, MOST_ROWS = 128, 256  # of a tile; in between a tile of MOST_ROWS is for the most part empty
_FULL_ENOUGH = 192
_BLOCK_N, _BLOCK_K, _STAGES = 64, 64, 4
_PARTS, _PART_TILE, _PART_STAGES = 2, 128, 5
_LEAST_INPUTS = 8192  # of a product in parts: of shorter ones adding up costs more than it brings
_BUSY = 0.9  # share of the units that parts should keep busy


def supports(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether gated products of these rows with this weight [outputs, inputs] may go through this module, and should."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    return (
        (few_rows.MOST_ROWS < rows <= _HALF or _FULL_ENOUGH < rows <= MOST_ROWS)
        and inputs % _BLOCK_K == 0
        and outputs % 16 == 0
        and _fits(weight)
    )


def num_parts(x: torch.Tensor, weight: torch.Tensor) -> int:
    """Into how many parts `multiply_in_parts` cuts the columns; 1 where that brings nothing, or cannot be done."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    if (
        not _FULL_ENOUGH < rows <= MOST_ROWS
        or inputs < _LEAST_INPUTS
        or inputs % (_PARTS * _BLOCK_K)
        or not _fits(weight)
    ):
        return 1
    programs = _PARTS * -(-rows // _PART_TILE) * -(-outputs // _PART_TILE)
    return _PARTS if _BUSY * _units(x.device) <= programs <= _units(x.device) else 1


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(first half of x W^T) * second half.

    Args:
        x: [rows, inputs], contiguous, of the weight's type.
        weight: [outputs, inputs], see `supports`.

    Returns:
        [rows, outputs / 2].
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from foredraft.layers import some_rows_kernels as kernels

    rows, inputs = x.shape
    outputs = weight.shape[0] // 2
    out = x.new_empty((rows, outputs))
    block_m = _HALF if rows <= _HALF else MOST_ROWS
    matrix, halves = (
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)
        for rank in (2, 3)
    )
    pair = weight.view(2, outputs, inputs)
    row_tiles = -(-rows // block_m)
    num_tiles = row_tiles * -(-outputs // _BLOCK_N)
    programs = min(_units(x.device), num_tiles)
    kernels.gated[(programs,)](
        TensorDescriptor.from_tensor(x, [block_m, _BLOCK_K], matrix),
        TensorDescriptor.from_tensor(pair, [2, 8, _BLOCK_K], halves),
        out, rows, outputs, inputs, row_tiles, num_tiles, programs,
        BLOCK_M=block_m, BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K, STAGES=_STAGES, num_warps=8,
        **overlapped(x.device),
    )  # fmt: skip
    return out


def multiply_in_parts(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """x W^T as a sum that is still to be made, float32 [parts, rows, outputs]; `parts` as `num_parts` says."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from foredraft.layers import some_rows_kernels as kernels

    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = x.new_empty((parts, rows, outputs), dtype=torch.float32)
    matrix = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    row_tiles, column_tiles = -(-rows // _PART_TILE), -(-outputs // _PART_TILE)
    num_tiles = parts * row_tiles * column_tiles
    programs = min(_units(x.device), num_tiles)
    kernels.multiply_in_parts[(programs,)](
        TensorDescriptor.from_tensor(x, [_PART_TILE, _BLOCK_K], matrix),
        TensorDescriptor.from_tensor(weight, [_PART_TILE, _BLOCK_K], matrix),
        out, rows, outputs, inputs // parts, row_tiles, column_tiles, num_tiles, programs,
        BLOCK_M=_PART_TILE, BLOCK_N=_PART_TILE, BLOCK_K=_BLOCK_K, STAGES=_PART_STAGES, num_warps=8,
        **overlapped(x.device),
    )  # fmt: skip
    return out


def _fits(weight: torch.Tensor) -> bool:
    return (
        weight.is_cuda
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and _works(weight.device)
    )


@functools.cache
def _units(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _works(device: torch.device) -> bool:
    """Whether the kernels compile here and are right: what they are written in may change with Triton's releases."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (
        torch.randn(n, 256, dtype=torch.bfloat16, device=device, generator=generator)
        for n in (230, 288)
    )
    try:
        for rows in (100, 230):
            product = F.linear(x[:rows], weight)
            gate, up = product.split(144, 1)
            for found, wanted in (
                (gated(x[:rows], weight), F.silu(gate) * up),
                (multiply_in_parts(x[:rows], weight, _PARTS).sum(0), product.float()),
            ):
                if not torch.allclose(found, wanted, rtol=0.05, atol=0.5):
                    logger.warning("all products of many rows by cuBLAS: a kernel's are wrong here")
                    return False
    except Exception as error:  # Triton's compiler has no exceptions of its own to name
        logger.warning("all products of many rows by cuBLAS, which takes longer: %s", error)
        return False
    return True
