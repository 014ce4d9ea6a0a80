"""Multiplies few rows by plain weights or 8-bit floats with the kernel of `skinny.cu`, which gives
the bits of the Triton kernels of `skinny_gemm_kernels` and `fp8_kernels`.
"""

import functools
from typing import Any, NamedTuple

import torch

from foredraft.device_limits import compute_units
from foredraft.kernel_launch import VARIANTS, power_of_two
from foredraft.layers import cuda_programs
from foredraft.layers.cuda_programs import Tiles
from foredraft.layers.heads import Heads

MOST_ROWS = 8
_LOT = cuda_programs.TILE_BYTES
_MOST_LOTS = 4  # of a piece
_ALIGNMENT = 16  # bytes, of what the copy engine reads
_TILE = 64  # outputs of a tile
_EIGHT = 8  # outputs that lie together in shared memory
_MOST_GROUPS = 4
_HEAD_DIMS = (64, 128)
_MOST_STAGES = 64
_PIECE = 20 * 1024  # bytes of a piece, if one lot is not more
_RING = 200 * 1024  # bytes of all pieces under way, if three are not more
_LEAST_STAGES = 3
_BARRIER_BYTES = 1024

_PROGRAM = cuda_programs.Program("skinny.cu", "multiply_few_rows")


class Plan(NamedTuple):
    """How a product is launched.

    Attributes:
        lines: Outputs of a tile.
        groups: Tiles beside each other.
        lots: 128 bytes of columns each, of a piece.
        stages: Number of pieces under way.
        shared_bytes: Bytes of shared memory of a block.
    """

    lines: int
    groups: int
    lots: int
    stages: int
    shared_bytes: int


def early_rows(dtype: torch.dtype, device: torch.device) -> int:
    """Returns `LinearMethod.early_rows` of methods that multiply with this module, where x is of
    some type.
    """
    is_able = dtype == torch.bfloat16 and cuda_programs.are_supported(device)
    return MOST_ROWS if is_able else 0


def takes(
    x: torch.Tensor,
    weight: torch.Tensor,
    parts: int = 1,
    halves: int = 1,
    heads: Heads | None = None,
) -> bool:
    """Returns whether `multiply` takes a product.

    Args:
        parts: Number of parts of the inputs.
        halves: 2 for a gated product.
        heads: Where outputs go, if they are heads.
    """
    if not 0 < x.shape[0] <= MOST_ROWS or VARIANTS.are_few:
        return False
    if not cuda_programs.are_supported(weight.device):
        return False
    outputs, line_bytes = weight.shape[0], weight.shape[1] * weight.element_size()
    most = compute_units(weight.device) * _TILE * _MOST_GROUPS
    return (
        x.dtype == weight.dtype
        and weight.dtype in (torch.bfloat16, torch.float8_e4m3fn)
        and x.is_contiguous()
        and weight.is_contiguous()
        and (x.data_ptr() | weight.data_ptr()) % _ALIGNMENT == 0
        and line_bytes % (parts * _LOT) == 0
        and outputs % (halves * _EIGHT) == 0
        and outputs * parts <= most * halves
        and (heads is None or _takes_heads(heads))
    )


def _takes_heads(heads: Heads) -> bool:
    keys, (cos, _) = heads.keys, heads.angles
    is_plain = keys.dtype == torch.bfloat16 and cos.dtype == torch.float32
    return is_plain and keys.shape[2] in _HEAD_DIMS


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    gated: bool = False,
    heads: Heads | None = None,
) -> bool:
    """Writes x W^T + b to `out`; returns False where the kernel does not take the product or cannot
    be had.

    Args:
        x: [rows, inputs], of the weight's type.
        weight: [outputs, inputs], bfloat16 or float8_e4m3fn.
        out: bfloat16 [rows, outputs], half as many where gated; float32 [parts, rows, outputs], the
            sums of parts of the inputs; or the queries of `heads`.
        scales: float32 of x's rows and of the outputs, of 8-bit floats.
        gated: silu of the first half of the outputs is multiplied by the second half.
        heads: Heads whose keys and values go to a cache in bfloat16.
    """
    rows, inputs = x.shape
    halves = 2 if gated else 1
    outputs = weight.shape[0] // halves
    parts = out.shape[0] if out.dtype == torch.float32 else 1
    if not takes(x, weight, parts, halves, heads):
        return False
    head_dim = 0 if heads is None else heads.keys.shape[2]
    line_bytes = inputs * weight.element_size() // parts
    found = plan(outputs, line_bytes, parts, halves, head_dim, compute_units(x.device))
    constants = {
        "INPUTS": inputs // parts, "ITEM": weight.element_size(), "LINES": found.lines,
        "GROUPS": found.groups, "GATED": int(gated), "LOTS": found.lots, "STAGES": found.stages,
        "PARTS": parts, "HAS_BIAS": int(bias is not None), "HEAD_DIM": head_dim,
    }  # fmt: skip
    of_heads: tuple[Any, ...] = ()
    if heads is not None:
        constants |= {"Q_HEADS": heads.num_heads, "KV_HEADS": heads.keys.shape[0]}
        of_heads = *heads.angles, heads.slots, heads.keys, heads.values, heads.keys.stride(0)
    if not _PROGRAM.is_ready(constants):
        return False
    own = found.lines * found.groups
    x_scales, w_scales = (x, x) if scales is None else scales
    tiles = Tiles(weight, own // 2 if head_dim else own), Tiles(x, MOST_ROWS)
    _PROGRAM.launch(
        constants, -(-outputs // own) * parts, found.groups * 128 + 32, found.shared_bytes,
        (
            *tiles, x_scales, w_scales, x if bias is None else bias, out, *of_heads, rows, outputs,
        ),
    )  # fmt: skip
    return True


@functools.lru_cache(maxsize=1024)
def plan(
    outputs: int, line_bytes: int, parts: int, halves: int, head_dim: int, num_units: int
) -> Plan:
    """Chooses how to launch a product.

    Args:
        outputs: Outputs of the result.
        line_bytes: Bytes of an output's weights in one part.
        parts: Number of parts of the inputs.
        halves: 2 for a gated product.
        head_dim: Width of heads, 0 where outputs are none.
        num_units: Number of multiprocessors.
    """
    own = -(-outputs * parts // num_units)  # each multiprocessor has one block, if that suffices
    if head_dim:
        own = min(head_dim, max(2 * _EIGHT, power_of_two(own)))
    groups = min(_MOST_GROUPS, -(-own // _TILE))
    lines = min(_TILE, -(-own // (groups * _EIGHT)) * _EIGHT)
    lot_bytes = _LOT * (halves * groups * lines + MOST_ROWS)
    lots = _MOST_LOTS
    while lots > 1 and (line_bytes % (lots * _LOT) or lots * lot_bytes > _PIECE):
        lots //= 2
    stage_bytes = lots * lot_bytes
    stages = max(_LEAST_STAGES, min(_MOST_STAGES, _RING // stage_bytes))
    stages = min(stages, line_bytes // (lots * _LOT))
    factors = -(-(2 * halves * groups * lines + MOST_ROWS) * 4 // 1024) * 1024
    # A tile of fewer outputs reads beyond its end.
    shared_bytes = _BARRIER_BYTES + factors + stages * stage_bytes + (_TILE - lines) * _LOT
    return Plan(lines, groups, lots, stages, max(cuda_programs.ALONE_SHARED, shared_bytes))
