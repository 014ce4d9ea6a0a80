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
_STAGES = (3, 7)  # minimum and maximum number of units in shared memory
_CHUNK = 4  # units whose rows of x are copied at a time
# Bytes of shared memory of a block: so that the next kernel's fits beside it, and at most.
_ROOM, _MOST_ROOM = 113 * 1024, 227 * 1024

_PROGRAM = cuda_programs.Program("words.cu", "multiply_words")


def takes(device: torch.device, dtype: torch.dtype, inputs: int, group: int, unit: int) -> bool:
    """Returns whether `multiply` takes matrices of a form.

    Args:
        dtype: Type of x.
        group: Inputs that share factors.
        unit: Words of a unit, see `words_kernels`.
    """
    return (
        dtype == torch.bfloat16
        and unit == _UNIT
        and (group in _GROUPS or group == inputs)
        and cuda_programs.are_supported(device)
    )


def supports(rows: int, outputs: int) -> bool:
    """Returns whether `multiply` takes so many rows of x, and outputs of the result."""
    return rows <= MOST_ROWS and outputs % _TILE == 0


def multiply(
    linear: Linear, x: torch.Tensor, group: int, parts: int, gated: bool
) -> torch.Tensor | None:
    """Computes x W^T + b, or with `gated` silu(first half of the outputs) * second half.

    Returns None where the kernel cannot be had.

    Args:
        linear: Layer with the words and factors of `WordsMethod`.
        x: [rows, inputs].
        group: Inputs that share factors.
        parts: Number of parts of the inputs.
    """
    rows, inputs = x.shape
    outputs = linear.num_outputs // 2 if gated else linear.num_outputs
    is_channel = group not in _GROUPS
    halves = 2 if gated else 1
    groups = 1 if is_channel else _UNIT * 8 // group
    stage = _UNIT * _TILE * 4 + (0 if is_channel else 64 * groups)
    least, most = _STAGES
    own = _tiles(outputs // _TILE, parts * halves, x.device)
    while own > 1 and _shared_bytes(rows, parts, own * parts * halves, least, stage) > _MOST_ROOM:
        own -= 1
    warps = own * parts * halves
    stages = min(most, inputs // (parts * _UNIT * 8))
    while stages > least and _shared_bytes(rows, parts, warps, stages, stage) > _ROOM:
        stages -= 1
    constants = {
        "PARTS": parts, "TILES": own * halves, "GATED": int(gated), "GROUPS": groups,
        "CHANNEL": int(is_channel), "STAGES": stages,
        "COLUMN_TILES": -(-rows // 8), "HAS_BIAS": int(linear.bias is not None),
    }  # fmt: skip
    shared_bytes = _shared_bytes(rows, parts, warps, stages, stage)
    if not _PROGRAM.is_ready(constants, shared_bytes):
        return None
    out = x.new_empty((rows, outputs))
    _PROGRAM.launch(
        constants, -(-outputs // (_TILE * own)), warps * 32, shared_bytes,
        (
            x, linear.weight, linear.scales, x if linear.bias is None else linear.bias, out,
            rows, outputs, inputs // 8,
        ),
    )  # fmt: skip
    return out


def _shared_bytes(rows: int, parts: int, warps: int, stages: int, stage: int) -> int:
    """Returns the bytes of shared memory of a block: barriers, units, rows of x of those that are
    computed and those that come next, and the sums of its warps.
    """
    barriers = -(-warps * stages * 8 // 128) * 128
    x = 2 * rows * (parts * _CHUNK * 512 + 16)
    return barriers + warps * stages * stage + x + warps * rows * _TILE * 4


def _tiles(count: int, warps: int, device: torch.device) -> int:
    """Returns the number of tiles of a block, so that each multiprocessor has one block if it can.

    Blocks that start before the kernel ahead has ended go where there is room: with several for
    some multiprocessors all would go to a few.

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
