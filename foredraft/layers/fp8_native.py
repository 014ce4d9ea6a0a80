"""Multiplies 8-bit floats with few rows by the kernel of `fp8.cu`, which gives the bits of
`fp8_kernels`.
"""

import torch

from foredraft.kernel_launch import power_of_two
from foredraft.layers import cuda_programs
from foredraft.layers.linear import Linear

MOST_ROWS = 32
_BLOCK_N = 64  # outputs of a block
_SPAN = 128  # inputs of a row that lie beside each other in shared memory
_LEAST_COLUMNS = 8  # rows that the matrix units take at least
_ROOM = (
    100_000  # bytes of shared memory of a block, so that two blocks have room, or the next kernel
)
_MOST_STAGES = 8

_PROGRAM = cuda_programs.Program("fp8.cu", "multiply_fp8")


def supports(x: torch.Tensor) -> bool:
    """Returns whether `multiply` takes these rows [rows, inputs]."""
    return (
        x.dtype == torch.bfloat16
        and x.shape[0] <= MOST_ROWS
        and x.shape[1] % _SPAN == 0
        and cuda_programs.are_supported(x.device)
    )


def multiply(
    linear: Linear, x: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor, gated: bool
) -> torch.Tensor:
    """Computes x W^T + b, or with `gated` silu(first half of the outputs) * second half.

    Args:
        linear: Layer with the weights of `Fp8Method`, a scale for each output.
        x: [rows, inputs], whose type the result gets.
        rows, scales: x as 8-bit floats, see `quantize_rows`.
    """
    count, inputs = x.shape
    outputs = linear.num_outputs // 2 if gated else linear.num_outputs
    out = x.new_empty((count, outputs))
    columns = max(_LEAST_COLUMNS, power_of_two(count))
    stage = _SPAN * ((2 if gated else 1) * _BLOCK_N + columns)
    stages = min(_MOST_STAGES, _ROOM // stage)
    constants = {
        "COLUMNS": columns, "GATED": int(gated), "SPANS": 1, "STAGES": stages,
        "HAS_BIAS": int(linear.bias is not None),
    }  # fmt: skip
    _PROGRAM.launch(
        constants, -(-outputs // _BLOCK_N), 128, stages * stage + 1024,
        (
            rows, scales, linear.weight, linear.scales, x if linear.bias is None else linear.bias,
            out, count, outputs, inputs,
        ),
    )  # fmt: skip
    return out
