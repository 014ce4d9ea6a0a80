"""Multiplies weights of 4 bits with one row by the kernel of `words.cu`, which gives the bits of
`words_kernels`.

It takes only what has been compared on a GPU: groups of 128, no bias, one row. The kernel itself
can do more.
"""

import torch

from foredraft.layers import cuda_programs
from foredraft.layers.linear import Linear

MOST_ROWS = 1  # with 4 and 8 it has not been faster than Triton's kernel
_GROUP = 128  # inputs that share factors
_UNIT = 32  # words of a unit
_TILE = 16  # outputs of a warp
_STAGES = 4  # units in shared memory
# Bytes of a stage: words and factors of a warp, a row of x.
_WORD_BYTES, _FACTOR_BYTES, _ROW_BYTES = 2048, 128, 528

_PROGRAM = cuda_programs.Program("words.cu", "multiply_words")


def supports(
    linear: Linear, x: torch.Tensor, group: int, unit: int, parts: int, gated: bool
) -> bool:
    """Returns whether `multiply` takes these rows.

    Args:
        linear: Layer with the words and factors of `WordsMethod`.
        x: [rows, inputs].
        group: Inputs that share factors.
        unit: Words of a unit.
        parts: Number of parts of the inputs.
        gated: Whether half of the outputs are gates.
    """
    return (
        x.dtype == torch.bfloat16
        and x.shape[0] <= MOST_ROWS
        and linear.bias is None
        and linear.num_outputs % (2 * _TILE if gated else _TILE) == 0
        and (group, unit) == (_GROUP, _UNIT)
        and (gated or parts > 1)
        and cuda_programs.are_supported(x.device)
    )


def multiply(linear: Linear, x: torch.Tensor, parts: int, gated: bool) -> torch.Tensor:
    """Computes x W^T, or with `gated` silu(first half of the outputs) * second half.

    Args:
        linear: Layer with the words and factors of `WordsMethod`, in groups of 128.
        x: [rows, inputs], up to 8 rows.
        parts: Number of parts of the inputs.
    """
    rows, inputs = x.shape
    outputs = linear.num_outputs // 2 if gated else linear.num_outputs
    out = x.new_empty((rows, outputs))
    tiles = 2 if gated else 1
    warps = parts * tiles
    stage = warps * (_WORD_BYTES + _FACTOR_BYTES) + parts * rows * _ROW_BYTES
    sums = warps * rows * _TILE * 4
    constants = {
        "PARTS": parts, "TILES": tiles, "GATED": int(gated), "GROUPS": _UNIT * 8 // _GROUP,
        "CHANNEL": 0, "STAGES": _STAGES, "COLUMN_TILES": 1, "HAS_BIAS": 0,
    }  # fmt: skip
    _PROGRAM.launch(
        constants, outputs // _TILE, warps * 32, _STAGES * stage + sums,
        (x, linear.weight, linear.scales, x, out, rows, outputs, inputs // 8),
    )  # fmt: skip
    return out
