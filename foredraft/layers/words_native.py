"""Multiplies weights of 4 bits with few rows by the kernel of `words.cu`, which gives the bits of
`words_kernels`.
"""

from typing import NamedTuple

import torch

from foredraft.device_limits import compute_units
from foredraft.layers import cuda_programs
from foredraft.layers.linear import Linear
from foredraft.layers.words_factors import Form

MOST_ROWS = 8
_UNIT = 32  # words of a unit
_GROUPS = (32, 64, 128)  # inputs that share factors, where not all do
_TILE = 16  # outputs of a warp
_MOST_WARPS = 16  # of a block
_STAGES = (2, 3)  # minimum and maximum number of units of a warp in shared memory
_MOST_RING = 96 * 1024  # bytes of the units of a block, where these are more than the minimum
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


def takes(numbers: torch.Tensor, dtype: torch.dtype, group: int, unit: int) -> bool:
    """Returns whether `multiply` takes a matrix.

    Args:
        numbers: [outputs, inputs], the 4-bit numbers.
        dtype: Type of x.
        group: Inputs that share factors.
        unit: Words of a unit, see `words_kernels`.
    """
    outputs, inputs = numbers.shape
    return (
        dtype == torch.bfloat16
        and unit == _UNIT
        and (group in _GROUPS or group == inputs)
        and outputs % (2 * _TILE) == 0  # gated products have half as many
        and cuda_programs.are_supported(numbers.device)
    )


def multiply(
    linear: Linear, x: torch.Tensor, group: int, parts: int, gated: bool, form: Form
) -> torch.Tensor | None:
    """Computes x W^T + b, or with `gated` silu(first half of the outputs) * second half.

    Returns None where the kernel cannot be had.

    Args:
        linear: Layer with the words and factors of `WordsMethod`.
        x: [rows, inputs], at most `MOST_ROWS`.
        group: Inputs that share factors.
        parts: Number of parts of the inputs.
        form: Form of the factors.
    """
    rows, inputs = x.shape
    halves = 2 if gated else 1
    outputs = linear.num_outputs // halves
    groups = _UNIT * 8 // group if group in _GROUPS else 0
    found = plan(rows, outputs, inputs, parts, halves, groups, compute_units(x.device))
    constants = {
        "INPUTS": inputs, "PARTS": parts, "TILES": found.own * halves, "GATED": int(gated),
        "GROUPS": max(1, groups), "CHANNEL": int(groups == 0), "STAGES": found.stages,
        "HAS_BIAS": int(linear.bias is not None), "FORM": int(form),
    }  # fmt: skip
    if not _PROGRAM.is_ready(constants):
        return None
    out = x.new_empty((rows, outputs))
    _PROGRAM.launch(
        constants, -(-outputs // (_TILE * found.own)), found.warps * 32, found.shared_bytes,
        (
            x, linear.weight, linear.scales, x if linear.bias is None else linear.bias, out,
            rows, outputs, found.chunk,
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
    own = -(-outputs // _TILE // num_units)  # each multiprocessor has one block, if that suffices
    own = max(1, min(own, _MOST_WARPS // (parts * halves)))
    warps = own * parts * halves
    stage_bytes = warps * (_UNIT * _TILE * 4 + 64 * groups)
    least, most = _STAGES
    stages = max(least, min(most, units, _MOST_RING // stage_bytes))
    fixed, chunk = _BARRIER_BYTES + stages * stage_bytes, units
    while chunk > 1 and fixed + _columns(rows, parts, chunk, units) > cuda_programs.MOST_SHARED:
        chunk -= 1
    needed = fixed + _columns(rows, parts, chunk, units)
    shared_bytes = max(cuda_programs.ALONE_SHARED, needed)
    return Plan(own, warps, stages, chunk, shared_bytes)


def _columns(rows: int, parts: int, chunk: int, units: int) -> int:
    """Returns the bytes of the columns of x of `chunk` units of each part; twice if there are
    more.
    """
    return (1 if chunk >= units else 2) * rows * (parts * chunk * 512 + 16)
