"""Weights that kernels make of 4-bit numbers, against float64 rounded once: all numbers, zero
points and scales.
"""

import pytest
import torch

from foredraft.layers.linear import Linear
from foredraft.layers.quantized_matrix import Matrix
from foredraft.layers.quantizing import quantize
from foredraft.layers.weight_scheme import WeightScheme
from foredraft.layers.words_cuda import WordsMethod
from foredraft.layers.words_factors import Form, are_finite, factor_words, with_exact_offsets
from testing.triton_device import DEVICE, INTERPRETED, needs_gpu, needs_triton

UNIT = 256  # inputs of a unit of words, eight numbers in each word


def scales_of(dtype: torch.dtype, most: float) -> torch.Tensor:
    """All scales of a type up to `most`, of both signs, but for up to 31 of the largest: float32
    [n, 1], n a multiple of 32."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    found = every[every.abs() <= most].float()
    return found[: len(found) // 32 * 32, None]


def rounded_once(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float64 rounded to a 16-bit type. The products of a test have 12 bits: float32 holds them."""
    assert torch.equal(exact.float().double(), exact)
    return exact.float().to(dtype)


@pytest.mark.parametrize("zero", range(16))
@pytest.mark.parametrize("most", [2.0**-6, 2.0**-5, 2.0**-1])
def test_offsets_are_exact_or_not_used(zero, most):
    scales = scales_of(torch.bfloat16, most)
    product = zero * scales.double()
    is_exact = product.to(torch.bfloat16).double() == product
    for rows in (is_exact & (scales.abs() < most), is_exact, torch.ones_like(is_exact)):
        some = scales[rows]
        zeros = torch.full_like(some, zero, dtype=torch.uint8)
        words, form = factor_words(some, zeros, torch.bfloat16)
        largest = some.abs().max()
        if not bool(is_exact[rows].all()) or largest >= 2.0**-1:
            assert form == Form.STEPS
        else:
            assert form == (Form.OFFSETS if largest < 2.0**-5 else Form.LARGE_OFFSETS)
        first, second = (
            half.to(torch.int16).view(torch.bfloat16).double()
            for half in (words & 0xFFFF, words >> 16)
        )
        if form == Form.STEPS:
            assert torch.equal(first, some.double() * 2.0**6)
            assert torch.equal(second, torch.full_like(second, -zero / 2**6))
        else:
            assert torch.equal(first, some.double() * 2.0**129)
            assert torch.equal(second, -product[rows])


def weights_of(linear: Linear, group: int, unit: int) -> torch.Tensor:
    """The weights that words and factors with offsets stand for, in float64."""
    words = linear.weight.view(linear.num_outputs, -1, 1, unit)
    numbers = (words >> torch.arange(0, 32, 4).view(-1, 1) & 15).view(linear.num_outputs, -1)
    halves = linear.scales & 0xFFFF, linear.scales >> 16
    first, second = (
        half.to(torch.int16).view(torch.bfloat16).double().t().repeat_interleave(group, 1)
        for half in halves
    )
    return numbers * (first * 2.0**-129) + second


@pytest.mark.parametrize("group", [32, 128])
def test_matrices_quantised_on_loading_have_offsets(group):
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * 0.05
    weight[3] *= 1e-6
    weight[4] = 0
    scheme = WeightScheme("packed", 4, "group", group, has_zeros=True)
    matrix = quantize(weight, scheme)
    assert len(matrix.zeros.unique()) > 3
    linear = Linear(512, 64, False, torch.bfloat16, torch.device("cpu"))
    method = WordsMethod(scheme, 512, 64, torch.bfloat16)
    method.set_matrix(linear, matrix)
    assert method._form == Form.OFFSETS
    assert bool((linear.scales >> 15 & 1).any())  # scales of groups that were replaced
    by_inputs = [one.double().repeat_interleave(group, 1) for one in (matrix.zeros, matrix.scales)]
    assert torch.equal(
        weights_of(linear, group, method._unit),
        (matrix.numbers.double() - by_inputs[0]) * by_inputs[1],
    )


def test_groups_stay_where_one_has_no_exact_offset():
    numbers = torch.arange(16, dtype=torch.uint8).repeat(1, 4)
    zeros = torch.tensor([[7, 5]], dtype=torch.uint8)
    scales = torch.tensor([[255.0, 32.0]])
    for last, is_replaced in ((32.0, True), (255.0, False)):
        scales[0, 1] = last
        found = with_exact_offsets(numbers, scales, zeros, torch.bfloat16)
        want = (numbers, scales, zeros)
        if is_replaced:
            swapped = torch.cat((15 - numbers[:, :32], numbers[:, 32:]), 1)
            want = swapped, torch.tensor([[-255.0, 32.0]]), torch.tensor([[8, 5]])
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_float16_has_no_offsets():
    scales = torch.full((32, 1), 0.01)
    zeros = torch.full_like(scales, 8, dtype=torch.uint8)
    assert factor_words(scales, zeros, torch.float16)[1] == Form.STEPS


def test_scales_that_the_kernels_cannot_take():
    matrix = Matrix(torch.zeros((64, 512), dtype=torch.uint8), torch.full((64, 4), 100.0))
    scheme = WeightScheme("packed", 4, "group", 128, has_zeros=True)
    assert WordsMethod.takes(matrix, scheme, torch.float16)
    matrix.scales[5, 1] = 128.0
    assert not WordsMethod.takes(matrix, scheme, torch.float16)
    assert WordsMethod.takes(matrix, scheme, torch.bfloat16)
    assert not are_finite(torch.tensor([2.0**122]), torch.bfloat16)


def layer(scales: torch.Tensor, zero: int, dtype: torch.dtype) -> tuple[Linear, Matrix]:
    """A layer with all numbers at all places of a word, and one scale for each output."""
    inputs = torch.arange(16 * UNIT)
    numbers = ((inputs // UNIT + inputs // 32) % 16).to(torch.uint8).expand(len(scales), -1)
    zeros = torch.full_like(scales, zero, dtype=torch.uint8)
    matrix = Matrix(numbers.contiguous().to(DEVICE), scales.to(DEVICE), zeros.to(DEVICE))
    scheme = WeightScheme("packed", 4, "channel", has_zeros=True)
    linear = Linear(16 * UNIT, len(scales), False, dtype, DEVICE)
    method = linear.method = WordsMethod(scheme, 16 * UNIT, len(scales), dtype)
    method.set_matrix(linear, matrix)
    return linear, matrix


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("zero", [0, 3, 8, 15])
def test_dequantised_weights(zero):
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    scales = scales_of(dtype, 2.0**-6)[:: 64 if INTERPRETED else 1]
    scales = scales[: len(scales) // 32 * 32]
    linear, matrix = layer(scales, zero, dtype)
    want = (matrix.numbers.double() - zero) * matrix.scales.double()
    assert torch.equal(linear.method.dequantized(linear), rounded_once(want, dtype))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 32, 128])  # each of the kernels that make weights in registers
@pytest.mark.parametrize(
    ("form", "dtype", "zero", "most"),
    [
        *((Form.OFFSETS, torch.bfloat16, zero, 2.0**-5 * 255 / 256) for zero in (0, 1, 2, 4, 8)),
        *((Form.LARGE_OFFSETS, torch.bfloat16, zero, 2.0**-1 * 255 / 256) for zero in (0, 4, 8)),
        *((Form.STEPS, torch.bfloat16, zero, 2.0**121) for zero in range(16)),
        *((Form.STEPS, torch.float16, zero, 127.0) for zero in (0, 3, 8, 15)),
    ],
)
def test_weights_in_products(form, dtype, zero, most, rows):
    # One input for each of 16 numbers at each of eight places.
    picked = torch.arange(16 * 8, device=DEVICE) * 32
    x = torch.zeros((len(picked), 16 * UNIT), dtype=dtype, device=DEVICE)
    x[torch.arange(len(picked)), picked] = 1
    for scales in scales_of(dtype, most).split(8192):
        scales[0] = most  # decides the form
        linear, matrix = layer(scales, zero, dtype)
        assert linear.method._form == form
        # The product with a row that is 1 at one input is that input's weight.
        got = torch.cat([linear(some) for some in x.split(rows)])
        want = (matrix.numbers[:, picked].double() - zero) * matrix.scales.double()
        assert torch.equal(got, rounded_once(want, dtype).t())
