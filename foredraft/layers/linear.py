"""Matrix products with weights stored as checkpoints store them, in the form that is fastest where they run."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from foredraft.layers import skinny_gemm

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
BLOCKS = 16
EXACT_ROWS = 32  # above, padding costs less than the kernels


class Linear(nn.Module):
    """y = x W^T + b.

    Args:
        num_inputs, num_outputs: Widths.
        bias: Whether there is b.

    Attributes:
        weight: [num_outputs, num_inputs].
        multiply: Takes x, weight and bias; `quantization` replaces it together with the weight.
    """

    multiply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = new_parameter((num_outputs, num_inputs), dtype, device)
        self.bias = new_parameter((num_outputs,), dtype, device) if bias else None
        if device.type == "cuda":
            self.multiply = cuda_linear
        else:
            self.multiply = float32_linear if dtype == torch.float32 else F.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Contiguous [num_rows, num_inputs] -> contiguous [num_rows, num_outputs]."""
        return self.multiply(x, self.weight, self.bias)

    def sum_later(self, x: torch.Tensor) -> torch.Tensor:
        """As `forward`; or, where that is faster, float32 [parts, num_rows, num_outputs] whose sum it is."""
        if (
            self.multiply is cuda_linear
            and self.bias is None
            and skinny_gemm.supports(x, self.weight)
            and (parts := skinny_gemm.num_parts(x, self.weight)) > 1
        ):
            return skinny_gemm.multiply_in_parts(x, self.weight, parts)
        return self(x)

    def gated(self, x: torch.Tensor) -> torch.Tensor | None:
        """silu(first half of the outputs) * second half, where one kernel does both; else None."""
        if self.multiply is cuda_linear and skinny_gemm.supports(x, self.weight):
            return skinny_gemm.multiply(x, self.weight, self.bias, gated=True)
        return None


def cuda_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` for a GPU, with kernels of its own for few rows."""
    if skinny_gemm.supports(x, weight) and skinny_gemm.is_faster(x, weight):
        return skinny_gemm.multiply(x, weight, bias)
    return F.linear(x, weight, bias)


def float32_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`F.linear` for the CPU, by whichever library reads the weights fastest for this number of rows.

    F.linear gives MKL a few rows as the *left* matrix, which costs 3 to 5 times what the memory needs for 2 to 16 of
    them. Measured by `benchmarks/cpu_forward.py --kernels`: one row is fastest as matrix times vector in blocks, since
    the single product uses one thread; up to five as weights times columns; from six on oneDNN is ahead.
    """
    num_rows, (num_outputs, num_inputs) = x.shape[0], weight.shape
    if num_rows == 1 and num_outputs % BLOCKS == 0:
        blocks = weight.view(BLOCKS, num_outputs // BLOCKS, num_inputs)
        # The stride of the one column must not be 1: it makes torch take a transposed, slow product.
        column = x.as_strided((BLOCKS, num_inputs, 1), (0, 1, num_inputs))
        result = torch.bmm(blocks, column).view(1, num_outputs)
    elif num_rows <= 5:
        result = torch.mm(weight, x.t()).t().contiguous()
    elif HAS_ONEDNN:
        return onednn_linear(x, weight, bias)
    else:
        return F.linear(x, weight, bias)
    return result if bias is None else result.add_(bias)


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` by oneDNN, which compiles a kernel of about 0.6 MiB for every number of rows of every matrix and keeps it:
    rows are rounded up, so that these stay few."""
    num_rows, num_sized = x.shape[0], rows_with_kernel(x.shape[0])
    if num_sized > num_rows:
        wide = x.new_zeros((num_sized, x.shape[1]))
        wide[:num_rows] = x
        x = wide
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")[:num_rows]


def rows_with_kernel(num_rows: int) -> int:
    """Up to 32 as it is; above, the next multiple of an eighth of the power of two that it does not pass."""
    if num_rows <= EXACT_ROWS:
        return num_rows
    step = (1 << (num_rows - 1).bit_length()) // 8
    return -(-num_rows // step) * step


def new_parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Memory for a weight that a loader fills."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
