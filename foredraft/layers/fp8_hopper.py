"""Products of 8-bit floats for few rows on Hopper cards that fetch weights before they wait for the
kernel ahead, with the bits of `fp8_kernels`.

The kernel is in Gluon, Triton's language for explicit layouts, memory and synchronisation, which
may change with any release of Triton.
"""

import functools
import importlib.metadata

import torch

from foredraft.kernel_launch import power_of_two
from foredraft.layers.linear import Linear

_HOPPER = (9, 0)
_TRITON = "3.6."  # release that the kernel was tested with
_TILE_BYTES = 64 * 128  # weights of a tile
# Bytes of shared memory of a program: where each multiprocessor has one at most, and for two.
_ROOM, _HALF_ROOM = 190_000, 110_000
_MOST_STAGES, _X_STAGES = 10, 4


@functools.cache
def has_kernel(device: torch.device) -> bool:
    """Returns whether the kernel runs on a device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _HOPPER:
        return False
    try:
        return importlib.metadata.version("triton").startswith(_TRITON)
    except importlib.metadata.PackageNotFoundError:
        return False


def multiply(
    linear: Linear, rows: torch.Tensor, scales: torch.Tensor, gated: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Computes x W^T + b, or with `gated` silu(first half of the outputs) * second half.

    Args:
        linear: Layer with the weights of `Fp8Method`, a scale for each output.
        rows: float8_e4m3fn [n, inputs], up to 64 rows.
        scales: float32 [1, n].
        dtype: Type of the result.
    """
    from foredraft.layers import fp8_hopper_kernels as kernels

    count, inputs = rows.shape
    outputs = linear.num_outputs // 2 if gated else linear.num_outputs
    out = torch.empty((count, outputs), dtype=dtype, device=rows.device)
    block_m = max(16, power_of_two(count))
    programs = -(-outputs // kernels.BLOCK_N)
    spans, stages = _tile(inputs, block_m, programs, gated, _multiprocessors(rows.device))
    kernels.multiply_fp8_early[(programs,)](
        kernels.tiles_of(rows, block_m), scales, kernels.tiles_of(linear.weight, kernels.BLOCK_N),
        linear.scales, out if linear.bias is None else linear.bias, out, count, outputs, inputs,
        HAS_BIAS=linear.bias is not None, GATED=gated, BLOCK_N=kernels.BLOCK_N, BLOCK_M=block_m,
        BLOCK_K=kernels.BLOCK_K, SPANS=spans, STAGES=stages, X_STAGES=_X_STAGES, num_warps=4,
        launch_pdl=True,
    )  # fmt: skip
    return out


def _tile(
    inputs: int, block_m: int, programs: int, gated: bool, multiprocessors: int
) -> tuple[int, int]:
    """Returns the number of tiles of an iteration, and of iterations in shared memory."""
    spans = 2 if not gated and inputs % 256 == 0 else 1
    room = _ROOM if programs <= multiprocessors else _HALF_ROOM
    left = room - _X_STAGES * spans * block_m * 128
    return spans, min(_MOST_STAGES, left // (spans * (2 if gated else 1) * _TILE_BYTES))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
