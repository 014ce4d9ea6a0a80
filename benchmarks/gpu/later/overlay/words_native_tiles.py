"""Multiplies weights of 4 bits with few rows by the kernel of `words.cu`, which gives the bits of
`words_kernels`.
"""

import functools

import torch

from foredraft.layers import cuda_programs
from foredraft.layers.linear import Linear

MOST_ROWS = 8
_UNIT = 32  # words of a unit
_GROUPS = (32, 64, 128)  # inputs that share factors, where not all do
_TILE = 16  # outputs of a warp
_MOST_WARPS = 16  # of a block
# Bytes of shared memory of a block: half of what a multiprocessor has, so that the next kernel's
# blocks fit beside this one's and fetch their first units before it ends.
_ROOM = 115200
_STAGES = (2, 6)  # minimum and maximum number of units in shared memory
# Bytes of a stage: words and factors of a warp, a row of x.
_WORD_BYTES, _FACTOR_BYTES, _ROW_BYTES = 2048, 64, 528

_PROGRAM = cuda_programs.Program("words.cu", "multiply_words")


def supports(x: torch.Tensor, outputs: int, group: int, unit: int) -> bool:
    """Returns whether `multiply` takes these rows.

    Args:
        x: [rows, inputs].
        outputs: Number of outputs, half of the matrix's where its product is gated.
        group: Inputs that share factors.
        unit: Words of a unit.
    """
    return (
        x.dtype == torch.bfloat16
        and x.shape[0] <= MOST_ROWS
        and outputs % _TILE == 0
        and unit == _UNIT
        and (group in _GROUPS or group == x.shape[1])
        and cuda_programs.are_supported(x.device)
    )


def multiply(linear: Linear, x: torch.Tensor, group: int, parts: int, gated: bool) -> torch.Tensor:
    """Computes x W^T + b, or with `gated` silu(first half of the outputs) * second half.

    Args:
        linear: Layer with the words and factors of `WordsMethod`.
        x: [rows, inputs].
        group: Inputs that share factors.
        parts: Number of parts of the inputs.
    """
    rows, inputs = x.shape
    outputs = linear.num_outputs // 2 if gated else linear.num_outputs
    out = x.new_empty((rows, outputs))
    is_channel = group not in _GROUPS
    groups = 1 if is_channel else _UNIT * 8 // group
    halves = 2 if gated else 1
    own = _tiles(outputs // _TILE, parts * halves, x.device)
    warps = own * parts * halves
    stage = warps * (_WORD_BYTES + _FACTOR_BYTES * groups) + parts * rows * _ROW_BYTES
    sums = warps * rows * _TILE * 4
    least, most = _STAGES
    stages = min(most, max(least, (_ROOM - sums) // stage))
    constants = {
        "PARTS": parts, "TILES": own * halves, "GATED": int(gated), "GROUPS": groups,
        "CHANNEL": int(is_channel), "STAGES": stages, "COLUMN_TILES": 1,
        "HAS_BIAS": int(linear.bias is not None),
    }  # fmt: skip
    _PROGRAM.launch(
        constants, -(-outputs // (_TILE * own)), warps * 32, stages * stage + sums,
        (
            x, linear.weight, linear.scales, x if linear.bias is None else linear.bias, out,
            rows, outputs, inputs // 8,
        ),
    )  # fmt: skip
    return out


def _tiles(count: int, warps: int, device: torch.device) -> int:
    """Returns the number of tiles of a block, so that each multiprocessor has one block if it can.

    With several blocks for some of them, those that start before the kernel ahead has ended would
    all go to the few multiprocessors that have room.

    Args:
        count: Number of tiles of all blocks.
        warps: Number of warps that a tile takes.
    """
    return max(1, min(-(-count // _multiprocessors(device)), _MOST_WARPS // warps))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
