"""The products of few rows against float64; on a GPU or in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

from foredraft.layers import skinny_gemm
from foredraft.layers.linear import Linear
from testing.triton_device import DEVICE, INTERPRETED, needs_triton

pytestmark = [needs_triton, pytest.mark.gpu]

# The interpreter multiplies the bits of bfloat16.
DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
SHAPES = [(136, 512), (30, 72), (100, 200)]
if not INTERPRETED:
    SHAPES += [(6144, 4096), (4096, 14336), (32000, 4096), (9000, 1000), (70002, 512)]


def random(*shape, dtype, scale=1.0):
    return (torch.randn(shape) * scale).to(DEVICE, dtype)


def error(got, expected):
    assert got.shape == expected.shape
    return (got.double() - expected).norm() / expected.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_they_are_the_products(outputs, inputs, rows, dtype):
    torch.manual_seed(rows)
    x = random(rows, inputs, dtype=dtype)
    weight = random(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    bias = random(outputs, dtype=dtype)
    expected = F.linear(x.double(), weight.double())
    assert error(skinny_gemm.multiply(x, weight, None), expected) < 1e-2
    assert error(skinny_gemm.multiply(x, weight, bias), expected + bias.double()) < 1e-2
    gate, up = (expected + bias.double()).chunk(2, -1)
    got = skinny_gemm.multiply(x, weight, bias, gated=True)
    assert error(got, F.silu(gate) * up) < 1e-2
    num_parts = max(2, skinny_gemm.num_parts(x, weight))
    parts = skinny_gemm.multiply_in_parts(x, weight, num_parts)
    assert parts.dtype == torch.float32
    assert parts.shape[0] == num_parts
    assert error(parts.sum(0), expected) < 1e-3


def test_only_narrow_matrices_are_cut_and_only_evenly():
    def parts(outputs, inputs, rows=4):
        x = torch.empty(rows, inputs, device="meta")
        return skinny_gemm.num_parts(x, torch.empty(outputs, inputs, device="meta"))

    assert parts(4096, 4096) == 4
    assert parts(4096, 14336) == 4
    assert parts(5120, 5120) == 2
    assert parts(4096, 384) == 1
    assert parts(6144, 4096) == 1
    assert parts(4096, 4096, rows=1) == 1


@pytest.mark.skipif(INTERPRETED, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("rows", [1, 4, 64, 65])
def test_a_linear_gives_the_same_in_all_its_forms(rows):
    linear = Linear(256, 128, False, torch.bfloat16, DEVICE)
    linear.weight.copy_(random(128, 256, dtype=torch.bfloat16, scale=0.06))
    x = random(rows, 256, dtype=torch.bfloat16)
    expected = F.linear(x.double(), linear.weight.double())
    assert error(linear(x), expected) < 1e-2
    later = linear.deferred(x)
    assert error(later.sum(0) if later.dim() == 3 else later, expected) < 1e-2
    gated = linear.gated(x)
    assert (later.dim() == 3) == (1 < rows <= skinny_gemm.MOST_ROWS)
    assert (gated is None) == (rows > skinny_gemm.MOST_ROWS)
    if gated is not None:
        gate, up = expected.chunk(2, -1)
        assert error(gated, F.silu(gate) * up) < 1e-2


def test_float32_goes_another_way():
    x, weight = torch.empty(1, 8, device=DEVICE), torch.empty(8, 8, device=DEVICE)
    assert not skinny_gemm.supports(x, weight)
