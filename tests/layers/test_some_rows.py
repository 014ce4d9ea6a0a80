"""Gated products of some hundred rows against float64; on a GPU, since Triton's interpreter does not know Gluon."""

import pytest
import torch
import torch.nn.functional as F

from foredraft.layers import some_rows
from foredraft.layers.linear import Linear
from tests.support.triton_device import DEVICE

HOPPER = DEVICE.type == "cuda" and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0"),
]


def error(got, expected):
    assert got.shape == expected.shape
    return (got.double() - expected).norm() / expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [65, 100, 128, 193, 250, 256])
@pytest.mark.parametrize(("outputs", "inputs"), [(14336, 4096), (200, 64), (72, 192), (8, 128)])
def test_they_are_the_products(outputs, inputs, rows, dtype):
    torch.manual_seed(rows)
    x = torch.randn(rows, inputs).to(DEVICE, dtype)
    weight = (torch.randn(2 * outputs, inputs) * inputs**-0.5).to(DEVICE, dtype)
    assert some_rows.supports(x, weight)
    gate, up = F.linear(x.double(), weight.double()).chunk(2, -1)
    assert error(some_rows.gated(x, weight), F.silu(gate) * up) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [193, 256])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 14336), (200, 128), (8, 1280)])
def test_parts_add_up_to_the_products(outputs, inputs, rows, dtype):
    torch.manual_seed(rows)
    x = torch.randn(rows, inputs).to(DEVICE, dtype)
    weight = (torch.randn(outputs, inputs) * inputs**-0.5).to(DEVICE, dtype)
    parts = some_rows.multiply_in_parts(x, weight, 2)
    assert parts.dtype == torch.float32
    assert parts.shape[0] == 2
    assert error(parts.sum(0), F.linear(x.double(), weight.double())) < 1e-3


def test_only_long_products_that_fill_the_device_are_cut():
    def parts(outputs, inputs, rows=256):
        x, weight = (
            torch.empty(n, inputs, dtype=torch.bfloat16, device=DEVICE) for n in (rows, outputs)
        )
        return some_rows.num_parts(x, weight)

    full = torch.cuda.get_device_properties(DEVICE).multi_processor_count // 4 * 128
    assert parts(full, 8192) == 2
    assert parts(full, 8192, rows=128) == 1
    assert parts(full, 8192 + 64) == 1
    assert parts(full, 4096) == 1
    assert parts(full // 2, 8192) == 1
    assert parts(full * 2, 8192) == 1


def test_where_it_is_taken():
    layer = Linear(128, 512, False, torch.bfloat16, DEVICE)
    layer.weight.copy_(torch.randn(512, 128))

    def is_taken(rows):
        return layer.gated(torch.randn(rows, 128, device=DEVICE).bfloat16()) is not None

    assert [rows for rows in (64, 65, 128, 129, 192, 193, 256, 257) if is_taken(rows)] == [
        64, 65, 128, 193, 256,
    ]  # fmt: skip


def test_it_can_be_captured_again_and_again():
    """Tiles of all programs, one call behind the other: what stages hold from the call before is not taken for new."""
    torch.manual_seed(1)
    x = torch.randn(256, 512).to(DEVICE, torch.bfloat16)
    weights = [(torch.randn(40000, 512) * 0.05).to(DEVICE, torch.bfloat16) for _ in range(2)]
    wanted = [some_rows.gated(x, weight) for weight in weights]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [some_rows.gated(x, weights[i % 2]) for i in range(6)]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for i, got in enumerate(found):
        assert torch.equal(got, wanted[i % 2])


def test_parts_can_be_captured_again_and_again():
    torch.manual_seed(2)
    x = torch.randn(256, 2048).to(DEVICE, torch.bfloat16)
    weights = [(torch.randn(9000, 2048) * 0.05).to(DEVICE, torch.bfloat16) for _ in range(2)]
    wanted = [some_rows.multiply_in_parts(x, weight, 2) for weight in weights]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [some_rows.multiply_in_parts(x, weights[i % 2], 2) for i in range(6)]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for i, got in enumerate(found):
        assert torch.equal(got, wanted[i % 2])
