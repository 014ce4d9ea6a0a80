"""Products with quantised weights against float64, and the same bits for every number of rows; on a
GPU or interpreted.
"""

import pytest
import torch

from foredraft.layers import fused
from foredraft.layers.fp8_cuda import Fp8Method, quantize_rows
from foredraft.layers.linear import Linear
from foredraft.layers.quantized_matrix import Matrix, dequantize
from foredraft.layers.quantizing import quantize
from foredraft.layers.weight_scheme import WeightScheme
from foredraft.layers.words_cuda import MOST_ROWS, WordsMethod
from testing.triton_device import DEVICE, INTERPRETED, needs_gpu, needs_triton, true_casts

pytestmark = [needs_triton, pytest.mark.gpu]

# The interpreter cuts off what bfloat16 does not hold instead of rounding.
DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
ROWS = (1, 2, 5, 16, 33, 64)
WORDS_ROWS = (*ROWS, 100, 130, 300, MOST_ROWS, MOST_ROWS + 1)
SHAPES = [(72, 512), (40, 384)]
if not INTERPRETED:
    # Where cuBLAS takes the inputs in one pass for any number of rows.
    SHAPES += [(6144, 4096), (28672, 4096), (9008, 1024)]
SCHEMES = {
    "int4-32": WeightScheme("packed", 4, "group", 32, has_zeros=True),
    "int4-64": WeightScheme("packed", 4, "group", 64, has_zeros=True),
    "int4-128": WeightScheme("packed", 4, "group", 128, has_zeros=True),
    "int8": WeightScheme("int8", 8, "channel"),
    "fp8": WeightScheme("fp8", 8, "channel"),
    "fp8-block": WeightScheme("fp8", 8, "block"),
}


def by_blocks(weight):
    """8-bit floats with a scale for each 128 x 128 weights."""
    blocks = weight.view(len(weight) // 128, 128, -1, 128)
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    numbers = (blocks / scales).to(torch.float8_e4m3fn).view(weight.shape)
    return Matrix(numbers, scales.view(len(blocks), -1).repeat_interleave(128, 0))


def make(name, shape, dtype, bias=True):
    """(layer, weights that it stands for in float64)."""
    scheme = SCHEMES[name]
    generator = torch.Generator().manual_seed(100 + len(name))  # not that of `rows`
    weight = torch.randn(shape, generator=generator) * shape[1] ** -0.5
    matrix = (
        by_blocks(weight.to(DEVICE)) if "block" in name else quantize(weight.to(DEVICE), scheme)
    )
    if scheme.layout != "fp8":
        matrix.scales = matrix.scales.to(dtype).float() if scheme.bits == 4 else matrix.scales
    linear = Linear(shape[1], shape[0], bias, dtype, DEVICE)
    if bias:
        linear.bias.copy_(torch.randn(shape[0], generator=generator))
    meant = dequantize(matrix, scheme.group_size or 128, torch.float64)
    if scheme.layout == "fp8":
        assert Fp8Method.takes(matrix, scheme)
        method = linear.method = Fp8Method(scheme)
    else:
        assert WordsMethod.takes(matrix, scheme, dtype)
        method = linear.method = WordsMethod(scheme, shape[1], shape[0], dtype)
        rounded = dequantize(matrix, scheme.group_size or 128, dtype)
    method.set_matrix(linear, matrix)
    if scheme.layout != "fp8":
        assert torch.equal(method.dequantized(linear), rounded)
        meant = rounded.double()
    return linear, meant


def rows(count, inputs, dtype):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, inputs, generator=generator)
    x[:, 7] *= 30  # an outlier, as activations have them
    return x[:count].to(DEVICE, dtype).contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [name for name in SCHEMES if "fp8" not in name])
def test_products_are_those_of_the_dequantised_weights(name, shape, dtype):
    linear, meant = make(name, shape, dtype)
    first = None
    for count in ROWS:
        x = rows(count, shape[1], dtype)
        got = linear(x)
        want = x.double() @ meant.T + linear.bias.double()
        assert float((got.double() - want).norm() / want.norm()) < 4e-3
        first = got[:1] if first is None else first
        assert torch.equal(got[:1], first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int4-32", "int4-128", "int8"])
def test_gated_products(name, dtype):
    linear, meant = make(name, (144, 1024), dtype, bias=False)
    for count in (1, 16, 33, 64):
        x = rows(count, 1024, dtype)
        want = x.double() @ meant.T
        gate, up = want[:, :72], want[:, 72:]
        want = gate * torch.sigmoid(gate) * up
        got = linear.gated(x)
        assert float((got.double() - want).norm() / want.norm()) < 6e-3


@pytest.mark.parametrize("inputs", [384, 512, 768, 1024, 1536])  # one, two and four parts
@pytest.mark.parametrize("name", ["int4-32", "int4-128", "int8"])
def test_inputs_in_parts(name, inputs):
    linear, meant = make(name, (48, inputs), DTYPES[0])
    x = rows(64, inputs, DTYPES[0]).repeat(MOST_ROWS // 64 + 1, 1)
    many = linear(x)
    want = x.double() @ meant.T + linear.bias.double()
    for count in (1, 16, 17, 40) if INTERPRETED else (1, 16, 17, 40, 100, 200, MOST_ROWS):
        got = linear(x[:count].contiguous())
        assert float((got.double() - want[:count]).norm() / want[:count].norm()) < 4e-3
        # The interpreter's products are not in the order of the tensor cores.
        assert INTERPRETED or torch.equal(got, many[:count]), count


@pytest.mark.parametrize("name", ["int4-128", "int8"])
def test_deferred_parts_add_up_to_the_product(name):
    linear, _ = make(name, (48, 1024), DTYPES[0], bias=False)
    for count in (1, 9, 64, 100):
        x = rows(64, 1024, DTYPES[0]).repeat(2, 1)[:count].contiguous()
        found = linear.deferred(x)
        assert (found.dim() == 3) == (count > 8)
        if found.dim() == 3:
            found = (found[0] + found[1] + found[2] + found[3]).to(x.dtype)
        assert torch.equal(found, linear(x))


@needs_gpu
@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 14336), (896, 4864), (4864, 896)])
@pytest.mark.parametrize("name", ["int4-128", "int8"])
def test_many_rows_of_any_matrix_have_the_bits_of_few(name, shape):
    linear, meant = make(name, shape, torch.bfloat16, bias=False)
    x = rows(64, shape[1], torch.bfloat16).repeat(17, 1)
    many = linear(x)
    want = x.double() @ meant.T
    assert float((many.double() - want).norm() / want.norm()) < 4e-3
    for count in WORDS_ROWS:
        assert torch.equal(linear(x[:count].contiguous()), many[:count]), count


@needs_gpu
@pytest.mark.parametrize("name", SCHEMES)
def test_gated_products_have_the_bits_of_separate_ones(name):
    linear, _ = make(name, (1536, 1024), torch.bfloat16)
    for count in ROWS:
        x = rows(count, 1024, torch.bfloat16)
        assert torch.equal(linear.gated(x), fused.gated(linear(x), "silu"))


@needs_gpu
@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 14336), (256, 512)])
@pytest.mark.parametrize("name", ["fp8", "fp8-block"])
def test_many_rows_of_narrow_matrices_have_the_bits_of_few(name, shape):
    linear, _ = make(name, shape, torch.bfloat16)
    x = rows(64, shape[1], torch.bfloat16).repeat(17, 1)
    few = linear(x[:64].contiguous())
    for count in (65, 80, 100, 128, 200, 320, 1088):
        assert torch.equal(linear(x[:count].contiguous())[:64], few), count


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] > 6000])
@pytest.mark.parametrize("name", SCHEMES)
def test_many_rows_have_the_bits_of_few(name, shape, dtype):
    if "block" in name and shape[0] % 128:
        pytest.skip("not whole blocks")
    linear, _ = make(name, shape, dtype)
    x = rows(64, shape[1], dtype).repeat(9, 1)
    many = linear(x)
    for count in ROWS if "fp8" in name else WORDS_ROWS:
        assert torch.equal(linear(x[:count].contiguous()), many[:count])


@pytest.mark.parametrize("size", [0, 128])
@pytest.mark.parametrize("count", [1, 64, 65])  # of more than 64 a program has several parts
def test_rows_as_8_bit_floats(count, size, monkeypatch):
    true_casts(monkeypatch)
    x = rows(64, 384, torch.float16).repeat(2, 1)[:count].contiguous()
    numbers, scales = quantize_rows(x, size)
    parts = x.float().view(count, -1, size or 384)
    want = parts.abs().amax(2) / 448
    torch.testing.assert_close(scales.t(), want, rtol=1e-6, atol=0)
    got = numbers.double().view(parts.shape) * scales.t().double().unsqueeze(2)
    bound = torch.maximum(parts.double().abs() / 16, want.double().unsqueeze(2) * 2**-10)
    assert bool(((got - parts.double()).abs() <= bound * 1.0001).all())
    one = quantize_rows(x[:1], size)[0]
    assert torch.equal(one.view(torch.uint8), numbers[:1].view(torch.uint8))


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6144, 4096), (256, 512)])
@pytest.mark.parametrize("name", ["fp8", "fp8-block"])
def test_products_of_8_bit_floats(name, shape, dtype):
    linear, meant = make(name, shape, dtype)
    for count in (*ROWS, 200):
        x = rows(min(count, 64), shape[1], dtype).repeat(-(-count // 64), 1)[:count].contiguous()
        numbers, scales = quantize_rows(x, 128 if "block" in name else 0)
        scales = scales.t().repeat_interleave(shape[1] // len(scales), 1)
        want = (numbers.double() * scales.double()) @ meant.T + linear.bias.double()
        # The tensor cores' sums are short.
        assert float((linear(x).double() - want).norm() / want.norm()) < 8e-3
