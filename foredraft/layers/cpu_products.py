"""Products with float32 weights on a CPU, by the library that is fastest for the number of rows."""

import torch
import torch.nn.functional as F

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
BLOCKS = 16
EXACT_ROWS = 32  # above, padding costs less than the kernels


def float32_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Computes `F.linear` on the CPU, by the library that reads the weights fastest for this
    number of rows.

    F.linear gives MKL a few rows as the *left* matrix, which costs 3 to 5 times what the memory
    needs for 2 to 16 of them. Measured by `benchmarks/cpu_forward.py --kernels`: one row is fastest
    as matrix times vector in blocks, since the single product uses one thread; up to five as
    weights times columns; from six on oneDNN is ahead.
    """
    num_rows, (num_outputs, num_inputs) = x.shape[0], weight.shape
    if num_rows == 1 and num_outputs % BLOCKS == 0:
        blocks = weight.view(BLOCKS, num_outputs // BLOCKS, num_inputs)
        # The stride of the one column must not be 1: it makes torch take a transposed, slow
        # product.
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
    """Rounds a number of rows up: none up to 32; above, to a multiple of an eighth of the power
    of two below.
    """
    if num_rows <= EXACT_ROWS:
        return num_rows
    step = (1 << (num_rows - 1).bit_length()) // 8
    return -(-num_rows // step) * step
