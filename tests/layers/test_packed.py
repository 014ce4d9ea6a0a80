"""Packed copies of CPU matrices: the same products, and only where they apply."""

import pytest
import torch
from torch import nn

from foredraft.layers.cpu_products import rows_with_kernel
from foredraft.layers.embedding import Embedding, LMHead
from foredraft.layers.linear import Linear, PlainMethod
from foredraft.layers.packed import pack_linears
from foredraft.layers.quantization import quantize_int8

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 5, 16, 33, 130])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(96, 64), (33, 20)])
def test_products(num_rows: int, bias: bool, num_outputs: int, num_inputs: int) -> None:
    torch.manual_seed(1)
    linear = Linear(num_inputs, num_outputs, bias, torch.float32, CPU)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    assert pack_linears(linear) == 4 * num_outputs * num_inputs
    x = torch.randn(num_rows, num_inputs)
    expected = x.double() @ linear.weight.double().T
    if linear.bias is not None:
        expected += linear.bias.double()
    found = linear(x)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


def test_a_tied_matrix_stays_the_embeddings() -> None:
    embedding = Embedding(50, 16, 1.0, torch.float32, CPU)
    embedding.weight.normal_()
    head = LMHead(16, 50, embedding, None, torch.float32, CPU)
    pack_linears(nn.ModuleList([embedding, head]))
    assert head.weight is embedding.weight
    x = torch.randn(4, 16)
    torch.testing.assert_close(head(x), x @ embedding.weight.T)


def test_other_types_are_left_alone() -> None:
    half = Linear(16, 32, False, torch.bfloat16, CPU)
    quantized = Linear(16, 32, False, torch.float32, CPU)
    quantized.weight.normal_()
    quantize_int8(quantized)
    assert pack_linears(nn.ModuleList([half, quantized])) == 0
    assert isinstance(half.method, PlainMethod)


def test_few_numbers_of_rows_get_kernels() -> None:
    """Each costs half a MiB a matrix for good, and a soak sees them all."""
    sizes = [rows_with_kernel(num_rows) for num_rows in range(1, 1025)]
    assert len(set(sizes)) <= 32 + 5 * 4
    for num_rows, size in enumerate(sizes, 1):
        assert num_rows <= size <= max(32, 1.25 * num_rows)
        assert rows_with_kernel(size) == size
