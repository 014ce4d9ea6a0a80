"""Products of float32 rows on a CPU: against float64, and a row's bits among any others."""

import numpy as np
import pytest
import torch

from foredraft.cpu.products import KERNELS, multiply

FUSED = [number for number, name in enumerate(KERNELS) if name != "portable"]
kernels = pytest.mark.parametrize("kernel", range(len(KERNELS)), ids=KERNELS)


def tensors(num_rows, num_inputs, num_outputs, bias=True):
    generator = torch.Generator().manual_seed(num_inputs)
    shapes = ((num_rows, num_inputs), (num_outputs, num_inputs), (num_outputs,))
    x, weight, own = (torch.randn(shape, generator=generator) for shape in shapes)
    return x, weight, own if bias else None


@kernels
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs"), [(1, 1), (15, 3), (16, 8), (17, 1), (320, 33), (1000, 50)]
)
def test_products_are_those_of_float64(kernel, num_inputs, num_outputs, bias):
    for num_rows in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 100):
        x, weight, own = tensors(num_rows, num_inputs, num_outputs, bias)
        want = x.double() @ weight.double().T
        # Of the sum of the sizes, which cancellation does not make small.
        scale = x.double().abs() @ weight.double().abs().T
        if own is not None:
            want += own.double()
            scale += own.double().abs()
        got = multiply(x, weight, own, kernel=kernel)
        assert got.shape == want.shape
        assert num_rows == 0 or float(((got - want).abs() / scale).max()) < 3e-7


@pytest.mark.parametrize("kernel", FUSED, ids=[KERNELS[number] for number in FUSED])
@pytest.mark.parametrize("num_inputs", [5, 48, 203])
def test_sums_have_the_order_that_is_written_down(kernel, num_inputs):
    x, weight, own = tensors(3, num_inputs, 21)
    padding = (0, -num_inputs % 16)
    wide_x, wide = (torch.nn.functional.pad(one, padding) for one in (x, weight))
    sums = np.zeros((3, 21, 16), np.float32)
    for k in range(0, wide.shape[1], 16):
        # Products of float32 are exact in float64; a sum that is rounded twice would show here.
        left = wide_x[:, None, k : k + 16].numpy().astype(np.longdouble)
        sums = (left * wide[:, k : k + 16].numpy() + sums).astype(np.float32)
    while sums.shape[2] > 1:
        half = sums.shape[2] // 2
        sums = sums[..., :half] + sums[..., half:]
    assert np.array_equal(
        multiply(x, weight, own, kernel=kernel).numpy(), sums[..., 0] + own.numpy()
    )


@kernels
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(320, 200), (77, 131)])
def test_the_bits_of_a_row_depend_on_no_other(kernel, num_inputs, num_outputs):
    x, weight, own = tensors(70, num_inputs, num_outputs)
    alone = torch.cat([multiply(row[None], weight, own, 1, kernel) for row in x])
    for num_threads in (1, 2, 3):
        for count in (*range(2, 36), 64, 70):
            got = multiply(x[:count], weight, own, num_threads, kernel)
            assert torch.equal(got, alone[:count]), count


def test_outputs_of_a_part_have_the_bits_of_the_whole():
    x, weight, own = tensors(6, 50, 99)
    whole = multiply(x, weight, own)
    assert torch.equal(multiply(x, weight[37:], own[37:]), whole[:, 37:])


@pytest.mark.parametrize("kernel", FUSED[1:], ids=[KERNELS[number] for number in FUSED[1:]])
def test_instruction_sets_give_the_same_bits(kernel):
    x, weight, own = tensors(11, 333, 77)
    assert torch.equal(multiply(x, weight, own, kernel=kernel), multiply(x, weight, own))


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.ones(2, 4), torch.ones(3, 5)),
        (torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(3, 4)),
        (torch.ones(2, 4), torch.ones(3, 4, dtype=torch.float64)),
        (torch.ones(2, 4), torch.ones(4, 3).t()),
        (torch.ones(2, 4, 2), torch.ones(3, 4)),
    ],
)
def test_other_tensors_are_refused(x, weight):
    with pytest.raises(ValueError, match="weight"):
        multiply(x, weight, None)


@pytest.mark.parametrize(
    "bias",
    [torch.ones(2), torch.ones(3, 1), torch.ones(3, dtype=torch.float64), torch.ones(6)[::2]],
    ids=lambda bias: f"{bias.dtype} {tuple(bias.shape)} by {bias.stride()}",
)
def test_other_biases_are_refused(bias):
    with pytest.raises(ValueError, match="bias"):
        multiply(torch.ones(2, 4), torch.ones(3, 4), bias)


def test_kernels_that_are_not_there_are_refused():
    for kernel in (-1, len(KERNELS)):
        with pytest.raises(ValueError, match="kernel"):
            multiply(torch.ones(2, 4), torch.ones(3, 4), None, kernel=kernel)
