"""Skinny GEMMs on an NVIDIA GPU: products of up to 64 rows, whose time should be that of
reading the weights.

Tiles and parts are the fastest of a sweep over the matrices of Llama-3.1-8B on an H200;
`benchmarks/gpu/gemm.py` measures them beside cuBLAS. Part of the gain is that kernels start before
the one before them ends (`kernel_launch`), which cuBLAS's do not.
"""

import torch

from foredraft.kernel_launch import VARIANTS, overlapped, power_of_two
from foredraft.layers import skinny_native
from foredraft.layers.heads import Heads, constants_of_heads

MOST_ROWS = 64
# With fewer outputs, programs that each take all columns are too few to keep the memory busy.
_NARROW = 6144
# For a single row with fewer, multiply-adds are faster than the matrix units.
_ONE_ROW_OUTPUTS = 8192
_VAST = 65536  # outputs from which on there are programs enough for twice the tile
_BLOCK_N = 64
_PROGRAMS = 256  # enough to keep an H200's memory busy
_MOST_PARTS = 4
_PART_MULTIPLE = 128  # columns of a part
_TOO_SMALL = (12, 0)  # compute capability from which on a program has 99 KiB of shared memory again


def supports(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether this module may multiply these rows with this weight [outputs, inputs]."""
    return (
        weight.is_cuda
        and not VARIANTS.are_few
        and 0 < x.shape[0] <= MOST_ROWS
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and weight.shape[1] % 8 == 0
        and (9, 0) <= torch.cuda.get_device_capability(weight.device) < _TOO_SMALL
    )


def is_faster(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether `multiply` is faster than cuBLAS."""
    return x.shape[0] == 1 or weight.shape[0] >= _NARROW or skinny_native.takes(x, weight)


def num_parts(x: torch.Tensor, weight: torch.Tensor) -> int:
    """Returns the number of parts that `multiply_in_parts` should cut the columns into; 1 where
    cutting gains nothing.
    """
    outputs, inputs = weight.shape
    if x.shape[0] == 1 or skinny_native.takes(x, weight):
        return 1
    parts = 1
    while (
        parts < most_parts(outputs)
        and 2 * parts * -(-outputs // _BLOCK_N) <= _PROGRAMS
        and inputs % (2 * parts * _PART_MULTIPLE) == 0
    ):
        parts *= 2
    return parts


def most_parts(outputs: int) -> int:
    """Returns the maximum of `num_parts` for a weight with so many outputs."""
    return _MOST_PARTS if outputs < _NARROW else 1


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool = False
) -> torch.Tensor:
    """Computes x W^T + b.

    Args:
        x: [rows, inputs], contiguous, of the weight's type.
        weight: [outputs, inputs], see `supports`.
        gated: The first half of the outputs goes through silu and is multiplied by the second half.

    Returns:
        [rows, outputs], or half as many.
    """
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty((x.shape[0], outputs))
    if skinny_native.multiply(x, weight, bias, out, gated=gated):
        return out
    if x.shape[0] == 1 and outputs < _ONE_ROW_OUTPUTS and not gated:
        _multiply_row(x, weight, bias, out)
    else:
        _multiply_rows(x, weight, bias, out, gated)
    return out


def multiply_to_heads(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, heads: Heads
) -> torch.Tensor | None:
    """Computes x W^T + b, rotates queries and keys, and writes keys and values to the cache.

    Returns:
        Queries [rows, num_heads, head_dim], or None where no kernel does all that.
    """
    if not skinny_native.takes(x, weight, heads=heads):
        return None
    out = x.new_empty(heads.queries_shape)
    return out if skinny_native.multiply(x, weight, bias, out, heads=heads) else None


def multiply_in_parts(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """Computes x W^T as a sum still to be made, float32 [parts, rows, outputs]; `parts` divides
    the inputs.
    """
    out = x.new_empty((parts, x.shape[0], weight.shape[0]), dtype=torch.float32)
    _multiply_rows(x, weight, None, out, False)
    return out


def _multiply_row(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    from foredraft.layers import skinny_gemm_kernels as kernels

    outputs, inputs = weight.shape
    block_n = 2 if outputs > 4096 else 16
    block_k = min(1024, power_of_two(inputs))
    kernels.multiply_row[(-(-outputs // block_n),)](
        x, weight, x if bias is None else bias, out, outputs, inputs,
        HAS_BIAS=bias is not None, EVEN=inputs % block_k == 0,
        BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, **overlapped(x.device),
    )  # fmt: skip


def _multiply_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gated: bool,
) -> None:
    from foredraft.layers import skinny_gemm_kernels as kernels

    rows, inputs, outputs = x.shape[0], x.shape[1], out.shape[-1]
    parts, own = out.shape[0] if out.dim() == 3 else 1, Heads.none(x)
    block_n, block_m = _BLOCK_N, max(16, power_of_two(rows))
    if block_m > 32 and outputs >= _VAST:
        block_n, block_k, stages = 128, 64, 4
    elif block_m > 32:
        block_k, stages = 64, 6
    elif outputs < _ONE_ROW_OUTPUTS and out.dim() == 2 and not gated:
        block_k, stages = 256, 3
    else:
        block_k, stages = 128, 4
    kernels.multiply[(-(-outputs // block_n), parts)](
        x, weight, x if bias is None else bias, out, rows, outputs, inputs, inputs // parts,
        *own.kernel_arguments, **constants_of_heads(own), HAS_BIAS=bias is not None, GATED=gated,
        EVEN=inputs % (parts * block_k) == 0, PARTS=out.dim() == 3, BLOCK_N=block_n,
        BLOCK_M=block_m, BLOCK_K=block_k, num_warps=4, num_stages=stages, **overlapped(x.device),
    )  # fmt: skip
