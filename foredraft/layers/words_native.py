"""Multiplies weights of 4 bits with few rows by the kernel of `words.cu`, which gives the bits of
`words_kernels`.
"""

import functools
from typing import NamedTuple

import torch

from foredraft.layers import cuda_programs
from foredraft.layers.linear import Linear

MOST_ROWS = 4  # up to which the kernel is faster than Triton's; it takes 8
_UNIT = 32  # words of a unit
_GROUPS = (32, 64, 128)  # inputs that share factors, where not all do
_TILE = 16  # outputs of a warp
_MOST_WARPS = 16  # of a block
_STAGES = (2, 7)  # minimum and maximum number of units of a warp in shared memory
_ROOM = 113 * 1024  # bytes of shared memory of a block: the next kernel's block fits beside it
_BARRIER_BYTES = 128

_PROGRAM = cuda_programs.Program("words.cu", "multiply_words")


class Plan(NamedTuple):
    """How a product is launched.

    Attributes:
        own: Tiles that a block writes.
        warps: Warps of a block.
        stages: Units of words that a warp has in shared memory.
        chunk: Units of each part whose columns of x a block has in shared memory at a time.
        shared_bytes: Bytes of shared memory of a block.
    """

    own: int
    warps: int
    stages: int
    chunk: int
    shared_bytes: int


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
    halves = 2 if gated else 1
    outputs = linear.num_outputs // halves
    groups = _UNIT * 8 // group if group in _GROUPS else 0
    found = plan(rows, outputs, inputs, parts, halves, groups, multiprocessors(x.device))
    constants = {
        "PARTS": parts, "TILES": found.own * halves, "GATED": int(gated),
        "GROUPS": max(1, groups), "CHANNEL": int(groups == 0), "STAGES": found.stages,
        "HAS_BIAS": int(linear.bias is not None),
    }  # fmt: skip
    if not _PROGRAM.is_ready(constants):
        return None
    out = x.new_empty((rows, outputs))
    _PROGRAM.launch(
        constants, -(-outputs // (_TILE * found.own)), found.warps * 32, found.shared_bytes,
        (
            x, linear.weight, linear.scales, x if linear.bias is None else linear.bias, out,
            rows, outputs, inputs // 8, found.chunk,
        ),
    )  # fmt: skip
    return out


def plan(
    rows: int, outputs: int, inputs: int, parts: int, halves: int, groups: int, num_units: int
) -> Plan:
    """Chooses how to launch a product.

    Args:
        rows: Rows of x.
        outputs: Outputs of the result.
        inputs: Columns of x.
        parts: Number of parts of the inputs.
        halves: 2 for a gated product.
        groups: Pairs of factors of an output in a unit; 0 where one is for all inputs.
        num_units: Number of multiprocessors.
    """
    units = inputs // (parts * _UNIT * 8)
    # Each multiprocessor has one block: blocks that start before the kernel ahead has ended go
    # where there is room, and with several for some multiprocessors all would go to a few.
    own = -(-outputs // _TILE // num_units)
    own = max(1, min(own, _MOST_WARPS // (parts * halves)))
    warps = own * parts * halves
    ring = warps * (_UNIT * _TILE * 4 + 64 * groups)
    # The same for all numbers of rows that share the compiled kernel.
    room = _ROOM - _BARRIER_BYTES - _columns(8, parts, 1, units)
    least, most = _STAGES
    stages = max(least, min(most, units, room // ring))
    fixed, chunk = _BARRIER_BYTES + stages * ring, units
    while chunk > 1 and fixed + _columns(rows, parts, chunk, units) > _ROOM:
        chunk -= 1
    return Plan(own, warps, stages, chunk, fixed + _columns(rows, parts, chunk, units))


def _columns(rows: int, parts: int, chunk: int, units: int) -> int:
    """Returns the bytes of the columns of x of `chunk` units of each part; twice if there are
    more.
    """
    return (1 if chunk >= units else 2) * rows * (parts * chunk * 512 + 16)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
