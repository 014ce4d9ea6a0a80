"""Float32 layers on a CPU: their products for any number of rows."""

import pytest
import torch

from foredraft.layers.cpu_products import rows_with_kernel
from foredraft.layers.embedding import Embedding, LMHead
from foredraft.layers.linear import Linear

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 5, 16, 64, 65, 130])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(96, 64), (33, 20)])
def test_products(num_rows: int, bias: bool, num_outputs: int, num_inputs: int) -> None:
    torch.manual_seed(1)
    linear = Linear(num_inputs, num_outputs, bias, torch.float32, CPU)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    x = torch.randn(num_rows, num_inputs)
    expected = x.double() @ linear.weight.double().T
    if linear.bias is not None:
        expected += linear.bias.double()
    found = linear(x)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)
    part = linear.outputs_from(x, 7)
    assert part.is_contiguous()
    torch.testing.assert_close(part.double(), expected[:, 7:], atol=1e-4, rtol=1e-4)


def test_a_row_of_few_has_the_same_bits_in_any_batch() -> None:
    torch.manual_seed(1)
    linear = Linear(72, 50, True, torch.float32, CPU)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    x = torch.randn(64, 72)
    alone = torch.cat([linear(row[None]) for row in x])
    for num_rows in (2, 7, 31, 64):
        assert torch.equal(linear(x[:num_rows]), alone[:num_rows])


def test_a_tied_head_multiplies_with_the_embeddings() -> None:
    embedding = Embedding(50, 16, 1.0, torch.float32, CPU)
    embedding.weight.normal_()
    head = LMHead(16, 50, embedding, None, torch.float32, CPU)
    assert head.weight is embedding.weight
    x = torch.randn(4, 16)
    torch.testing.assert_close(head(x), x @ embedding.weight.T)


def test_few_numbers_of_rows_get_kernels_of_onednn() -> None:
    """Each costs half a MiB a matrix for good, and a soak sees them all."""
    sizes = [rows_with_kernel(num_rows) for num_rows in range(65, 1025)]
    assert len(set(sizes)) <= 4 * 4
    for num_rows, size in enumerate(sizes, 65):
        assert num_rows <= size <= 1.25 * num_rows
        assert rows_with_kernel(size) == size
