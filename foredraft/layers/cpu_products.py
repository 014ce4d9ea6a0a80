"""Products with float32 weights on a CPU, by whatever is fastest for the number of rows."""

import torch
import torch.nn.functional as F

from foredraft.cpu import products
from foredraft.cpu.threads import FEW_ROWS

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def float32_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Computes `F.linear` on the CPU, by whatever is fastest for this number of rows.

    F.linear gives MKL a few rows as the *left* matrix, which costs 3 to 5 times what the memory
    needs for 2 to 16 of them; from 32 rows on it takes 1.6 to 2.3 times what oneDNN takes
    (docs/measurements/cpu.md). Up to `FEW_ROWS` the bits of a row do not depend on the others.
    """
    if x.shape[0] <= FEW_ROWS:
        return products.multiply(x, weight, bias)
    return onednn_linear(x, weight, bias) if HAS_ONEDNN else F.linear(x, weight, bias)


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Computes `F.linear` by oneDNN. oneDNN keeps a compiled kernel of about 0.6 MiB for every
    number of rows of every matrix, so numbers of rows are rounded up to few different ones.
    """
    num_rows, num_sized = x.shape[0], rows_with_kernel(x.shape[0])
    if num_sized > num_rows:
        wide = x.new_zeros((num_sized, x.shape[1]))
        wide[:num_rows] = x
        x = wide
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")[:num_rows]


def rows_with_kernel(num_rows: int) -> int:
    """Rounds a number of rows up to a multiple of an eighth of the power of two below."""
    step = max(1, (1 << (num_rows - 1).bit_length()) // 8)
    return -(-num_rows // step) * step
