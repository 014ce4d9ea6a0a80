"""Matrix products with weights stored as checkpoints store them, in the form that is fastest where they run."""

import torch
import torch.nn.functional as F
from torch import nn


def efficient_rows(num_rows: int, device: torch.device, dtype: torch.dtype) -> int:
    """The number of rows to compute instead of `num_rows`; padding to it is faster than not.

    MKL's single precision product of a weight matrix and a few columns runs at the memory's speed for 2, 4 and 8
    columns, and much slower for numbers between; one column (gemv) takes 1.7 times as long as two. Measured by
    benchmarks/cpu_forward.py.
    """
    if device.type != "cpu" or dtype != torch.float32:
        return num_rows
    if num_rows <= 8:
        return 1 << max(1, (num_rows - 1).bit_length())
    return -(-num_rows // 16) * 16 if num_rows <= 32 else num_rows


class Linear(nn.Module):
    """y = x W^T + b.

    Args:
        num_inputs, num_outputs: Widths.
        bias: Whether there is b.

    Attributes:
        weight: [num_outputs, num_inputs].
    """

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
        # F.linear gives MKL the rows as its columns and falls on a slow path for 2 to 16 of them.
        self._weight_first = device.type == "cpu" and dtype in (torch.float32, torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, num_inputs] -> [num_rows, num_outputs], contiguous."""
        if self._weight_first:
            return self.columns(x).t().contiguous()
        return F.linear(x, self.weight, self.bias)

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, num_inputs] -> [num_outputs, num_rows]; contiguous on the CPU, where this is the cheaper form."""
        if not self._weight_first:
            return F.linear(x, self.weight, self.bias).t()
        result = torch.mm(self.weight, x.t())
        return result if self.bias is None else result.add_(self.bias.unsqueeze(1))


def new_parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Memory for a weight that a loader fills."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
