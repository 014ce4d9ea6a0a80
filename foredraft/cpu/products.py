"""Products with float32 weights on a CPU, in C (`_products.c`), with the same arithmetic for any
number of rows.
"""

import torch

from foredraft.cpu import _kernels

KERNELS = _kernels.KERNELS  # instruction sets of this CPU with a kernel, fastest first


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    num_threads: int = 0,
    kernel: int = 0,
) -> torch.Tensor:
    """Computes x W^T + b.

    An output has 16 sums, each over every 16th input by fused operations, which are then added in a
    fixed order: the bits of a row depend neither on other rows nor on threads nor on the kernel,
    where the CPU fuses products and sums.

    Args:
        x: Float32 [num_rows, num_inputs].
        weight: Float32 [num_outputs, num_inputs], contiguous.
        bias: Float32 [num_outputs], contiguous, or None.
        num_threads: Most threads to use; 0 for the number that is fastest for the size, out of
            those of `use_threads`.
        kernel: Index into KERNELS.

    Raises:
        ValueError: Types or shapes do not fit, or weight or bias are not contiguous.
    """
    num_rows, (num_outputs, num_inputs) = x.shape[0], weight.shape
    if not (x.dtype == weight.dtype == torch.float32 and x.shape == (num_rows, num_inputs)):
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}, weight {weight.dtype} {weight.shape}")
    if not weight.is_contiguous():
        raise ValueError("the weight is not contiguous")
    if bias is not None and not (
        bias.dtype == torch.float32 and bias.shape == (num_outputs,) and bias.is_contiguous()
    ):
        raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)} by {bias.stride()}")
    x = x.contiguous()
    out = x.new_empty((num_rows, num_outputs))
    _kernels.multiply(
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_rows,
        num_inputs,
        num_outputs,
        num_threads,
        kernel,
    )
    return out
