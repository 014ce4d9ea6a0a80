"""Second copies of a CPU model's matrices in oneDNN's blocked form, whose products with few
rows cost little more than with one.
"""

import torch
from torch import nn

from foredraft.layers.cpu_products import HAS_ONEDNN, float32_linear, onednn_linear
from foredraft.layers.linear import Float32CpuMethod, Linear, LinearMethod

LEAST_ROWS = 3  # up to two rows the plain matrix is read as fast
_TYPICAL_ROWS = 16  # oneDNN lays a matrix out for some number of rows; others are served by it too


@torch.no_grad()
def pack_linears(module: nn.Module) -> int:
    """Packs every float32 `Linear` of a module on the CPU; the original weights stay for one
    and two rows.

    For the 19 M parameters of foredraft-demo on one core, 8 rows fall from 13.5 to 7.4 ms, one row
    is 4.3 ms (`benchmarks/cpu_forward.py --kernels`).

    Returns:
        Bytes of memory that the copies take; 0 where torch has no oneDNN.
    """
    if not HAS_ONEDNN:
        return 0
    num_bytes = 0
    for linear in module.modules():
        if isinstance(linear, Linear) and isinstance(linear.method, Float32CpuMethod):
            linear.method = PackedMethod(linear.weight)
            num_bytes += linear.weight.numel() * linear.weight.element_size()
    return num_bytes


class PackedMethod(LinearMethod):
    """Keeps one layer's float32 weights in two forms and uses the faster one for each number of
    rows.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod."""
        if x.shape[0] < LEAST_ROWS:
            return float32_linear(x, linear.weight, linear.bias)
        return onednn_linear(x, self._packed, linear.bias)
