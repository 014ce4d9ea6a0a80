"""Products of a single row with a weight matrix on an NVIDIA GPU, where nothing but reading the weights takes time.

Measured on an H200 by `benchmarks/gpu/gemm.py`: the products of Llama-3.1-8B take 3.45 ms for one row, 4.0 ms through
cuBLAS, and 3.34 ms at the speed of memory. From two rows on cuBLAS is as fast. A third of the gain is that a kernel's
first loads are under way before the one before it has ended (programmatic dependent launch, from compute capability 9.0
on): each kernel waits for the one before it itself.
"""

import torch


def supports(weight: torch.Tensor) -> bool:
    """Whether products of one row with this weight [outputs, inputs] may go through `multiply`."""
    return (
        weight.is_cuda
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and weight.shape[1] % 8 == 0
        and torch.cuda.get_device_capability(weight.device) >= (9, 0)
    )


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool = False
) -> torch.Tensor:
    """x W^T + b.

    Args:
        x: [1, inputs], contiguous, of the weight's type.
        weight: [outputs, inputs], see `supports`.
        gated: The first half of the outputs goes through silu and is multiplied by the second half.

    Returns:
        [1, outputs], or half as many.
    """
    from foredraft.layers import one_row_kernels as kernels

    outputs, inputs = weight.shape
    if gated:
        outputs //= 2
    out = x.new_empty((1, outputs))
    # Many outputs: narrow tiles, of which many programs have several under way. Few: whole rows, or too few are.
    if outputs > 8192:
        block_n, block_k = (8, 256) if gated else (16, 256)
    elif outputs > 4096:
        block_n, block_k = 2, 1024
    else:
        block_n, block_k = 16, 1024
    block_k = min(block_k, 1 << (inputs - 1).bit_length())
    kernels.multiply[(-(-outputs // block_n),)](
        x, weight, x if bias is None else bias, out, outputs, inputs,
        HAS_BIAS=bias is not None, GATED=gated, EVEN=inputs % block_k == 0,
        BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return out
