"""Gated products of more rows than `few_rows` takes, on GPUs of compute capability 9.0: one kernel in place of cuBLAS's and
the gate's.

What the two halves of the weight give never leaves the registers, and the weight is read by one program only.
`benchmarks/gpu/gemm.py` measures it beside the two.
"""

import functools
import logging

import torch
import torch.nn.functional as F

from foredraft.attention.launch import overlapped
from foredraft.layers import few_rows

logger = logging.getLogger(__name__)

_HALF, MOST_ROWS = 128, 256  # of a tile; in between a tile of MOST_ROWS is for the most part empty
_FULL_ENOUGH = 192
_BLOCK_N, _BLOCK_K, _STAGES = 64, 64, 4


def supports(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether gated products of these rows with this weight [outputs, inputs] may go through this module, and should."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    return (
        weight.is_cuda
        and (few_rows.MOST_ROWS < rows <= _HALF or _FULL_ENOUGH < rows <= MOST_ROWS)
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and inputs % _BLOCK_K == 0
        and outputs % 16 == 0
        and _works(weight.device)
    )


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(first half of x W^T) * second half.

    Args:
        x: [rows, inputs], contiguous, of the weight's type.
        weight: [outputs, inputs], see `supports`.

    Returns:
        [rows, outputs / 2].
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from foredraft.layers import some_rows_kernels as kernels

    rows, inputs = x.shape
    outputs = weight.shape[0] // 2
    out = x.new_empty((rows, outputs))
    block_m = _HALF if rows <= _HALF else MOST_ROWS
    matrix, halves = (
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)
        for rank in (2, 3)
    )
    pair = weight.view(2, outputs, inputs)
    row_tiles = -(-rows // block_m)
    num_tiles = row_tiles * -(-outputs // _BLOCK_N)
    units = torch.cuda.get_device_properties(x.device).multi_processor_count
    programs = min(units, num_tiles)
    kernels.gated[(programs,)](
        TensorDescriptor.from_tensor(x, [block_m, _BLOCK_K], matrix),
        TensorDescriptor.from_tensor(pair, [2, 8, _BLOCK_K], halves),
        out, rows, outputs, inputs, row_tiles, num_tiles, programs,
        BLOCK_M=block_m, BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K, STAGES=_STAGES, num_warps=8,
        **overlapped(x.device),
    )  # fmt: skip
    return out


@functools.cache
def _works(device: torch.device) -> bool:
    """Whether the kernel compiles here and is right: what it is written in may change with Triton's releases."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (
        torch.randn(n, 128, dtype=torch.bfloat16, device=device, generator=generator)
        for n in (230, 288)
    )
    try:
        for rows in (100, 230):
            gate, up = F.linear(x[:rows], weight).split(144, 1)
            if not torch.allclose(gated(x[:rows], weight), F.silu(gate) * up, rtol=0.05, atol=0.5):
                logger.warning("gated products by cuBLAS: the kernel's are wrong here")
                return False
    except Exception as error:  # Triton's compiler has no exceptions of its own to name
        logger.warning("gated products by cuBLAS, which takes longer: %s", error)
        return False
    return True
