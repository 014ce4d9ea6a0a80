"""Products on an NVIDIA GPU that give a row the same bits beside any number of others.

Every kernel adds up the columns of a matrix in their order, in float32: all of them in one pass, or
those of each half where the matrix has few outputs and the two sums are added at the end. Which of
the two it is depends on the matrix alone. Such sums are the same bits for every size of a tile,
since the matrix units take 16 columns at a time whatever the tile is. `benchmarks/gpu/gemm.py`
measures the kernels.
"""

import functools

import torch

from foredraft.device_limits import compute_units
from foredraft.kernel_launch import overlapped, power_of_two
from foredraft.layers import skinny_native
from foredraft.layers.heads import Heads, constants_of_heads

SKINNY_ROWS = 64  # maximum number of rows of a skinny GEMM
HEAD_MULTIPLE = 64  # outputs of a program of so few rows, but for vocabularies
PART_ROWS = 128  # up to which halves of columns are faster by our kernels than by cuBLAS
# Up to which one program adds up both halves of fewer than _LONG columns, and beyond of at most
# _FEW: each half alone would write and read float32.
_SUMMED_ROWS = 1024
_FEW = 4096
# Beyond which programs of twice the rows are faster, where a program has one part of the columns.
_TALL_ROWS = 640
# With fewer outputs, programs that each take all columns are too few to keep the memory busy.
_NARROW = 6144
_LEAST_CUT = 2048  # columns from which on cutting them is worth adding up
_CUT_MULTIPLE = 256  # columns are a multiple of this, so that halves are whole blocks
_LONG = 8192  # columns from which on programs for one half each are faster
_VAST = 65536  # outputs from which on there are programs enough for twice the tile
_GROUP = 8  # blocks of rows whose tiles are neighbours


def supports(weight: torch.Tensor) -> bool:
    """Returns whether `multiply` takes this weight [outputs, inputs]."""
    return (
        weight.is_cuda
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
    )


def num_parts(weight: torch.Tensor, bias: torch.Tensor | None) -> int:
    """Returns the number of column parts whose sums are added up at the end; the same for any
    number of rows.
    """
    return parts_of((weight.shape[0], weight.shape[1]), bias is not None, weight.device)


def parts_of(shape: tuple[int, int], has_bias: bool, device: torch.device) -> int:
    """Returns `num_parts` of a weight [outputs, inputs] of this shape."""
    outputs, inputs = shape
    is_cut = (
        not has_bias
        and outputs < _NARROW
        and inputs >= _LEAST_CUT
        and inputs % _CUT_MULTIPLE == 0
        and is_hopper(device)
    )
    return 2 if is_cut else 1


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool = False
) -> torch.Tensor:
    """Computes x W^T + b in one pass.

    Args:
        x: [rows, inputs], contiguous, of the weight's type.
        weight: [outputs, inputs], see `supports`.
        gated: The first half of the outputs goes through silu and is multiplied by the second half;
            for up to `SKINNY_ROWS` rows.

    Returns:
        [rows, outputs], or half as many.
    """
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty((x.shape[0], outputs))
    if not out.numel():
        return out
    if x.shape[0] <= SKINNY_ROWS:
        _multiply_skinny(x, weight, bias, out, gated)
    else:
        _multiply_tiled(x, weight, bias, out)
    return out


def multiply_to_heads(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, heads: Heads
) -> torch.Tensor:
    """Computes x W^T + b in one pass, rotates queries and keys, and writes keys and values to the
    cache.

    Args:
        x: [rows, inputs], up to `SKINNY_ROWS`; see `multiply`.
        heads: Heads whose width is a multiple of HEAD_MULTIPLE.

    Returns:
        Queries [rows, num_heads, head_dim].
    """
    out = x.new_empty(heads.queries_shape)
    if out.numel():
        _multiply_skinny(x, weight, bias, out, False, heads)
    return out


def multiply_in_parts(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """Computes x W^T as a sum still to be made, float32 [parts, rows, outputs]; see `num_parts`."""
    out = x.new_empty((parts, x.shape[0], weight.shape[0]), dtype=torch.float32)
    if not out.numel():
        return out
    if x.shape[0] <= SKINNY_ROWS // 2:
        _multiply_skinny(x, weight, None, out, False)
    else:
        _multiply_tiled(x, weight, None, out)
    return out


def sums_parts(weight: torch.Tensor, num_rows: int) -> bool:
    """Returns whether `multiply_parts` is fastest for so many rows of a weight in two parts."""
    inputs = weight.shape[1]
    return num_rows > PART_ROWS and inputs < (_LONG if num_rows <= _SUMMED_ROWS else _FEW + 1)


def multiply_parts(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parts: int
) -> torch.Tensor:
    """Computes x W^T + b, [rows, outputs]; a program adds up one part of the columns after the
    other, then the sums in their order.

    Args:
        parts: Number of parts, each a multiple of 128 columns unless it is the only one.
    """
    out = x.new_empty((x.shape[0], weight.shape[0]))
    if out.numel():
        _multiply_tiled(x, weight, bias, out, parts)
    return out


def _multiply_skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gated: bool,
    heads: Heads | None = None,
) -> None:
    from foredraft.layers import skinny_gemm_kernels as kernels

    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    own = Heads.none(x) if heads is None else heads
    has_parts = out.dim() == 3 and heads is None
    parts = out.shape[0] if has_parts else 1
    if skinny_native.multiply(x, weight, bias, out, gated=gated, heads=heads):
        return
    block_n, block_m = HEAD_MULTIPLE, max(16, power_of_two(rows))
    if not is_hopper(x.device):
        block_k, stages = 64, 3
    elif block_m <= 32:
        block_k, stages = _skinny_tile(-(-outputs // block_n) * parts, block_m, gated, x.device)
    elif outputs >= _VAST:
        block_n, block_k, stages = 128, 64, 4
    else:
        block_k, stages = 64, 6
    kernels.multiply[(-(-outputs // block_n), parts)](
        x, weight, x if bias is None else bias, out, rows, outputs, inputs, inputs // parts,
        *own.kernel_arguments, **constants_of_heads(own), HAS_BIAS=bias is not None, GATED=gated,
        EVEN=inputs % (parts * block_k) == 0, PARTS=has_parts, BLOCK_N=block_n, BLOCK_M=block_m,
        BLOCK_K=block_k, num_warps=4, num_stages=stages, **overlapped(x.device),
    )  # fmt: skip


def _skinny_tile(
    num_programs: int, block_m: int, gated: bool, device: torch.device
) -> tuple[int, int]:
    """Returns the columns of a tile of up to 32 rows, and the number of tiles that a program has
    under way: the fastest of a sweep over the matrices of 8B, 32B and 70B models, whole and shared
    by two and four ranks.

    The fewer programs there are, the more must each have under way; where two of them share a
    multiprocessor, they also share its memory.
    """
    units = compute_units(device)
    if num_programs > units:
        if gated:
            return (128, 3) if block_m == 16 else (64, 4)
        return 128, 4
    if num_programs > units // 2:
        return 128, 4 if gated else 6
    return 128, 5 if gated else 8


def _multiply_tiled(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    summed: int = 1,
) -> None:
    from foredraft.layers import exact_gemm_kernels as kernels

    rows, inputs, outputs = x.shape[0], x.shape[1], out.shape[-1]
    uses_engine = is_hopper(x.device) and inputs % 8 == 0
    tile = _tile(rows, summed) if uses_engine else (64, 64, 64, 4, 3)
    block_m, block_n, block_k, warps, stages = tile
    programs = -(-rows // block_m) * -(-outputs // block_n)
    settings = {
        "HAS_BIAS": bias is not None, "GROUP": _GROUP, "BLOCK_M": block_m, "BLOCK_N": block_n,
        "BLOCK_K": block_k, "num_warps": warps, "num_stages": stages,
    } | overlapped(x.device)  # fmt: skip
    added = x if bias is None else bias
    if not uses_engine:
        kernels.multiply_tiles[(programs,)](
            x, weight, added, out, rows, outputs, inputs, EVEN=inputs % block_k == 0, SUMMED=summed,
            **settings,
        )  # fmt: skip
        return
    from triton.tools.tensor_descriptor import TensorDescriptor

    parts = out.shape[0] if out.dim() == 3 else 1
    kernels.multiply_blocks[(programs, parts)](
        TensorDescriptor.from_tensor(x, [block_m, block_k]),
        TensorDescriptor.from_tensor(weight, [block_n, block_k]),
        added, out, rows, outputs, inputs // max(parts, summed), PARTS=out.dim() == 3,
        SUMMED=summed, **settings,
    )  # fmt: skip


def _tile(rows: int, summed: int) -> tuple[int, int, int, int, int]:
    """Returns rows, outputs and columns of a tile, warps, stages: the fastest of a sweep over
    the matrices of Llama-3.1-8B, whole and shared by two ranks.
    """
    if rows <= 64:
        return 64, 64, 128, 4, 4
    if rows <= 384:
        return 128, 64, 64, 4, 6
    if rows > _SUMMED_ROWS and summed > 1:
        return 128, 256, 64, 8, 4
    if rows > _TALL_ROWS and summed == 1:
        return 256, 128, 64, 8, 4
    return 128, 128, 64, 8, 4


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Returns whether the device has the copy engine and the shared memory that large tiles
    need.
    """
    return device.type == "cuda" and (9, 0) <= torch.cuda.get_device_capability(device) < (12, 0)
