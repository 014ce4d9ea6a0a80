"""Weight-only quantization of projections after they are loaded: 8-bit integers with a scale for each output."""

import torch
import torch.nn.functional as F
from torch import nn

from foredraft.layers.linear import Linear

# From so many rows on, one conversion of the weights costs less than reading them once for each row.
_MANY_ROWS = 8


@torch.no_grad()
def quantize_int8(module: nn.Module) -> None:
    """Turns the weights of all `Linear` in a module into int8, symmetric, each row by its largest magnitude.

    Memory falls to about a quarter of float32. A matrix that is an embedding too stays there as it is.
    """
    for linear in module.modules():
        if not isinstance(linear, Linear) or linear.weight.dtype == torch.int8:
            continue
        weight = linear.weight
        scales = weight.abs().amax(1).float().div_(127).clamp_min_(torch.finfo(torch.float32).tiny)
        rounded = torch.empty_like(weight, dtype=torch.int8)
        for part, source, scale in zip(
            rounded.split(4096), weight.split(4096), scales.split(4096), strict=True
        ):
            part.copy_((source / scale.unsqueeze(1)).round_().clamp_(-127, 127))
        linear.weight = nn.Parameter(rounded, requires_grad=False)
        linear.multiply = _Int8Multiply(scales.to(weight.dtype))


class _Int8Multiply:
    """y = (x W8^T) * scales + b.

    Args:
        scales: [num_outputs], of the activations' type.
    """

    def __init__(self, scales: torch.Tensor) -> None:
        self._scales = scales

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if x.shape[0] < _MANY_ROWS and not x.is_cuda:
            out = torch._weight_int8pack_mm(x, weight, self._scales)
        else:
            out = F.linear(x, weight.to(x.dtype)).mul_(self._scales)
        return out if bias is None else out.add_(bias)
