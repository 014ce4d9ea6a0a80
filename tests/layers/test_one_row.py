"""The product of a single row on a GPU against float64."""

import pytest
import torch
import torch.nn.functional as F

from foredraft.layers import one_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(6144, 4096), (4096, 14336), (32000, 4096), (30, 72), (9000, 1000)]
)
def test_it_is_the_product(outputs, inputs, bias, gated, dtype):
    torch.manual_seed(inputs)
    x = torch.randn(1, inputs, device="cuda", dtype=dtype)
    weight = (torch.randn(outputs, inputs, device="cuda") * inputs**-0.5).to(dtype)
    b = torch.randn(outputs, device="cuda", dtype=dtype) if bias else None
    assert one_row.supports(weight)
    got = one_row.multiply(x, weight, b, gated)
    expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    assert got.shape == expected.shape
    assert (got.double() - expected).norm() / expected.norm() < 1e-2


def test_float32_goes_another_way():
    assert not one_row.supports(torch.empty(8, 8, device="cuda"))
