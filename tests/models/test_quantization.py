"""Weight-only int8: what it computes, and what it leaves alone."""

import pytest
import torch
from torch import nn

from foredraft.layers.embedding import Embedding, LMHead
from foredraft.layers.linear import Linear
from foredraft.layers.quantization import quantize_int8

CPU = torch.device("cpu")


def random_linear(num_outputs: int, num_inputs: int, bias: bool, dtype: torch.dtype) -> Linear:
    linear = Linear(num_inputs, num_outputs, bias, dtype, CPU)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    return linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 8, 40])
def test_products_of_rounded_weights(num_rows: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(num_rows)
    linear = random_linear(96, 64, bias, dtype)
    weight = linear.weight.double()
    weight[5] = 0  # a row without any scale
    linear.weight[5] = 0
    scales = weight.abs().amax(1, keepdim=True) / 127
    rounded = (weight / scales.clamp_min(1e-30)).round() * scales
    quantize_int8(linear)
    assert linear.weight.dtype == torch.int8
    x = torch.randn(num_rows, 64, dtype=dtype)
    expected = x.double() @ rounded.T
    if linear.bias is not None:
        expected += linear.bias.double()
    found = linear(x)
    assert found.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 0.3
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0.02)


def test_a_tied_embedding_stays() -> None:
    embedding = Embedding(50, 16, 1.0, torch.float32, CPU)
    embedding.weight.normal_()
    before = embedding.weight.clone()
    head = LMHead(16, 50, embedding, None, torch.float32, CPU)
    module = nn.ModuleList([embedding, head])
    x = torch.randn(3, 16)
    expected = head(x)
    quantize_int8(module)
    quantize_int8(module)  # a second time changes nothing
    assert torch.equal(embedding.weight, before)
    assert head.weight.dtype == torch.int8
    torch.testing.assert_close(head(x), expected, atol=0.2, rtol=0.05)
