"""Multiplies weights of 8-bit floats with few rows by the kernel of `fp8.cu`, which gives the bits
of `fp8_kernels`.
"""

from typing import NamedTuple

import torch

from foredraft.layers import cuda_programs
from foredraft.layers.linear import Linear
from foredraft.layers.words_native import multiprocessors

MOST_ROWS = 8
MOST_ROUNDED = 2  # rows that the kernel rounds to 8 bits itself
_ATOM = 128  # inputs whose bytes lie together in shared memory
_MOST_TILE = 64  # outputs of a product of the matrix units
_THREADS = 128
_STAGES = (4, 16)  # minimum and maximum number of units of weights in shared memory
# Bytes of shared memory of a block: so many that the next kernel's block fits beside it, and at
# most.
_ROOMS = (113 * 1024, 227 * 1024)

_PROGRAM = cuda_programs.Program("fp8.cu", "multiply_fp8")


class Plan(NamedTuple):
    """How a product is launched.

    Attributes:
        size: Outputs of a tile.
        tiles: Tiles of a block, in both halves where the product is gated.
        step: Atoms of inputs of a unit.
        stages: Units of weights in shared memory.
        shared_bytes: Bytes of shared memory of a block.
    """

    size: int
    tiles: int
    step: int
    stages: int
    shared_bytes: int


def plan(rows: int, outputs: int, inputs: int, halves: int, num_units: int) -> Plan | None:
    """Chooses how to launch a product; None where it does not fit.

    Args:
        rows: Rows of x.
        outputs: Outputs of the result.
        inputs: Columns of x.
        halves: 2 for a gated product.
        num_units: Number of multiprocessors, each of which gets one block.
    """
    own = -(-outputs // 8 // num_units) * 8
    tiles = -(-own // _MOST_TILE)
    size = -(-own // tiles // 8) * 8
    lines = size * tiles * halves
    step = 2 if lines <= _MOST_TILE and inputs % (2 * _ATOM) == 0 else 1
    stage_bytes = lines * _ATOM * step
    least, most = _STAGES
    for room in _ROOMS:
        # The same for all numbers of rows that share the compiled kernel.
        others = _other_bytes(MOST_ROUNDED if rows <= MOST_ROUNDED else MOST_ROWS, inputs, size)
        stages = min(most, inputs // (_ATOM * step), (room - others) // stage_bytes)
        if stages >= least and size * tiles <= outputs:
            shared_bytes = stages * stage_bytes + _other_bytes(rows, inputs, size)
            return Plan(size, tiles * halves, step, stages, shared_bytes)
    return None


def _other_bytes(rows: int, inputs: int, size: int) -> int:
    """Returns the bytes behind the weights: x, or what the matrix units read beyond a tile."""
    return max(rows * inputs + _ATOM, (_MOST_TILE - size) * _ATOM)


def multiply(
    linear: Linear, x: torch.Tensor, x_scales: torch.Tensor | None, gated: bool
) -> torch.Tensor | None:
    """Computes x W^T + b in bfloat16, or with `gated` silu(first half of the outputs) * second
    half.

    Returns None where the kernel cannot be had.

    Args:
        linear: Layer with the weights and scales of `Fp8Method`, a scale an output.
        x: float8_e4m3fn [rows, inputs], at most `MOST_ROWS`; or bfloat16, at most `MOST_ROUNDED`.
        x_scales: float32 [1, rows]; None for bfloat16.
    """
    rows, inputs = x.shape
    halves = 2 if gated else 1
    outputs = linear.num_outputs // halves
    found = plan(rows, outputs, inputs, halves, multiprocessors(x.device))
    if found is None:
        return None
    constants = {
        "SIZE": found.size, "TILES": found.tiles, "GATED": int(gated), "STEP": found.step,
        "STAGES": found.stages, "HAS_BIAS": int(linear.bias is not None),
        "ROUNDS": int(x_scales is None),
    }  # fmt: skip
    if not _PROGRAM.is_ready(constants):
        return None
    out = torch.empty((rows, outputs), dtype=torch.bfloat16, device=x.device)
    scales = x if x_scales is None else x_scales
    bias = out if linear.bias is None else linear.bias
    blocks = -(-outputs // (found.size * found.tiles // halves))
    _PROGRAM.launch(
        constants, blocks, _THREADS, found.shared_bytes,
        (x, scales, linear.weight, linear.scales, bias, out, rows, outputs, inputs),
    )  # fmt: skip
    return out
