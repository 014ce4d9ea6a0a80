"""Products with weights of 4 and 8 bits on a CPU, against float64 and against one chain of fused
operations for each output.
"""

import ctypes
import ctypes.util
from collections.abc import Iterator

import pytest
import torch

from foredraft.cpu import _kernels
from foredraft.cpu.products import KERNELS
from foredraft.layers.linear import Linear
from foredraft.layers.quantized import set_matrix
from foredraft.layers.quantized_matrix import Matrix, dequantize
from foredraft.layers.weight_scheme import WeightScheme

CPU = torch.device("cpu")
FUSED = [number for number, name in enumerate(KERNELS) if name != "portable"]
# Bits, group size (0 for one scale an output), type of scales, whether there are zero points.
FORMS = [
    (8, 0, torch.float32, False),
    (8, 32, torch.float16, False),
    (8, 128, torch.float32, True),
    (4, 0, torch.float32, True),
    (4, 32, torch.float16, False),
    (4, 64, torch.bfloat16, True),
    (4, 128, torch.float16, True),
]
forms = pytest.mark.parametrize("form", FORMS, ids=str)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = _kernels.get_num_threads()
    yield
    _kernels.set_num_threads(before)


def layer(form, num_outputs=70, num_inputs=200, bias=False):
    """A layer and its weights in float64."""
    bits, size, scale_type, has_zeros = form
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=generator)

    granularity = "group" if size else "channel"
    scheme = WeightScheme("packed", bits, granularity, size, has_zeros=has_zeros)
    groups = scheme.num_groups(num_inputs)
    scales = torch.rand(num_outputs, groups, generator=generator).div_(50).to(scale_type).float()
    scales[0, 0] = 3e-6  # below float16's normal numbers, and none of its own in others
    scales = scales.to(scale_type).float()
    zeros = torch.full((num_outputs, groups), 1 << (bits - 1), dtype=torch.uint8)
    if has_zeros:
        zeros = numbers(num_outputs, groups)
    matrix = Matrix(numbers(num_outputs, num_inputs), scales, zeros)
    weight = dequantize(matrix, size, torch.float64)
    linear = Linear(num_inputs, num_outputs, bias, torch.float32, CPU)
    if bias:
        torch.nn.init.normal_(linear.bias, generator=generator)
    set_matrix(linear, matrix, scheme, torch.float32, CPU)
    assert linear.scales.dtype == scale_type
    assert hasattr(linear, "zeros") == has_zeros
    return linear, weight


def rows(count, num_inputs=200):
    return torch.randn(count, num_inputs, generator=torch.Generator().manual_seed(1))


@forms
@pytest.mark.parametrize("kernel", range(len(KERNELS)), ids=KERNELS)
def test_products_are_those_of_float64(form, kernel):
    linear, weight = layer(form, bias=True)
    for count in (1, 5, 40):
        x = rows(count)
        want = x.double() @ weight.T + linear.bias.double()
        got = linear.method.multiply(linear, x, kernel)
        assert float((got - want).abs().max() / want.abs().max()) < 1e-6
    assert linear(rows(0)).shape == (0, 70)
    x = rows(3).bfloat16()
    assert linear(x).dtype == torch.bfloat16
    assert torch.equal(linear(x), linear(x.float()).bfloat16())


@forms
@pytest.mark.parametrize("kernel", FUSED, ids=[KERNELS[number] for number in FUSED])
def test_an_output_is_one_chain_of_fused_operations(form, kernel):
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.argtypes, fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float
    linear, weight = layer(form, num_outputs=36, num_inputs=72)
    x = rows(2, 72)
    # A weight is rounded to float32 once.
    weight = weight.float()
    want = torch.zeros(2, 36)
    for row in range(2):
        for output in range(36):
            total = 0.0
            for k in range(72):
                total = fmaf(x[row, k].item(), weight[output, k].item(), total)
            want[row, output] = total
    assert torch.equal(linear.method.multiply(linear, x, kernel), want)


@forms
@pytest.mark.parametrize("kernel", range(len(KERNELS)), ids=KERNELS)
def test_the_bits_of_a_row_depend_on_no_other(form, kernel):
    linear, _ = layer(form, num_outputs=200)
    x = rows(61)
    _kernels.set_num_threads(1)
    alone = torch.cat([linear.method.multiply(linear, row[None], kernel) for row in x])
    for num_threads in (1, 2):
        _kernels.set_num_threads(num_threads)
        for count in (*range(2, 30), 61):
            got = linear.method.multiply(linear, x[:count], kernel)
            assert torch.equal(got, alone[:count]), count


def test_rows_of_another_width_are_refused():
    linear, _ = layer(FORMS[0])
    for x in (rows(2, 199), rows(2, 201), rows(2)[0], rows(2)[None]):
        with pytest.raises(ValueError, match="200"):
            linear(x)


@pytest.mark.parametrize("bits", [4, 8])
def test_many_threads_beside_torchs_own(bits):
    """Products from several threads at once, each beside products of torch's."""
    from concurrent.futures import ThreadPoolExecutor

    _kernels.set_num_threads(2)
    linear, _ = layer((bits, 64, torch.float16, True), num_outputs=999)
    x = rows(9)
    want = linear(x)

    def run(_):
        plain = torch.ones(200, 200) @ torch.ones(200, 200)
        return torch.equal(linear(x), want) and float(plain[0, 0]) == 200

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(200)))
