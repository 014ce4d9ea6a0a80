"""Products of few rows in CUDA C++: against float64 on this CPU, and Triton's kernels on a GPU."""

import shutil

import pytest
import torch

from foredraft.layers import cuda_programs, exact_gemm, fp8_cuda, skinny_native
from foredraft.layers.heads import Heads
from foredraft.layers.linear import Linear
from foredraft.layers.quantized_matrix import Matrix
from foredraft.layers.rotary import rotate
from foredraft.layers.weight_scheme import WeightScheme
from testing.emulated_kernels import Emulated
from testing.triton_device import needs_gpu

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
UNITS = 132
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def emulate(monkeypatch, tmp_path, units: int) -> None:
    program = Emulated(tmp_path, "skinny.cu", "multiply_few_rows")
    monkeypatch.setattr(skinny_native, "_PROGRAM", program)
    monkeypatch.setattr(skinny_native, "compute_units", lambda device: units)
    monkeypatch.setattr(cuda_programs, "are_supported", lambda device: True)


def numbers(kind: torch.dtype, rows: int, outputs: int, inputs: int):
    """x, weights, and factors of the rows and outputs where numbers have 8 bits."""
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, inputs, generator=generator).to(kind) for n in (rows, outputs))
    if kind == BF16:
        return x, weight, None
    return x, weight, tuple(torch.rand(n, generator=generator) + 0.5 for n in (rows, outputs))


def exact(x, weight, scales, bias=None):
    want = x.double() @ weight.double().T
    if scales is not None:
        want = (want * scales[0].double()[:, None] * scales[1].double()).bfloat16().double()
    return want if bias is None else want + bias.double()


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "rows", "outputs", "inputs", "units", "gated", "bias"),
    [  # with three pieces under way
        (BF16, 1, 64, 64, 1, False, False),
        (FP8, 3, 40, 1024, 4, False, True),  # three blocks of 16 outputs, the last one with 8
        (BF16, 8, 2 * 136, 256, 1, True, True),  # three tiles of 48 in a block
        (FP8, 8, 2 * 136, 256, 1, True, True),
        (BF16, 5, 2 * 24, 1024, 1, True, False),
    ],
)
def test_products(tmp_path, monkeypatch, kind, rows, outputs, inputs, units, gated, bias):
    emulate(monkeypatch, tmp_path, units)
    monkeypatch.setattr(skinny_native, "_RING", 0)
    x, weight, scales = numbers(kind, rows, outputs, inputs)
    added = torch.randn(outputs).bfloat16() if bias else None
    out = torch.empty(rows, outputs // 2 if gated else outputs, dtype=BF16)
    assert skinny_native.multiply(x, weight, added, out, scales=scales, gated=gated)
    want = exact(x, weight, scales, added)
    if gated:
        gate, up = want.chunk(2, 1)
        want = gate * torch.sigmoid(gate) * up
    assert float((out.double() - want).norm() / want.norm()) < 5e-3


@needs_compiler
def test_parts_of_the_inputs_are_left_to_be_added_up(tmp_path, monkeypatch):
    emulate(monkeypatch, tmp_path, 2)
    x, weight, _ = numbers(BF16, 4, 48, 1024)
    out = torch.empty(2, 4, 48)
    assert skinny_native.multiply(x, weight, None, out)
    for part, left, right in zip(out, x.chunk(2, 1), weight.chunk(2, 1), strict=True):
        want = exact(left, right, None)
        assert float((part.double() - want).norm() / want.norm()) < 1e-5


@needs_compiler
@pytest.mark.parametrize(("kind", "head_dim", "units"), [(BF16, 64, 8), (FP8, 128, 2)])
def test_heads_are_rotated_and_stored(tmp_path, monkeypatch, kind, head_dim, units):
    emulate(monkeypatch, tmp_path, units)
    rows, num_heads, kv_heads, num_slots = 5, 2, 1, 40
    x, weight, scales = numbers(kind, rows, (num_heads + 2 * kv_heads) * head_dim, 256)
    bias = torch.randn(len(weight)).bfloat16()
    angles = torch.randn(rows, 1, head_dim // 2)
    cos, sin = angles.cos().repeat(1, 1, 2), angles.sin()
    cache = torch.zeros(2, kv_heads, num_slots, head_dim, dtype=BF16)
    slots = torch.tensor([7, 0, 39, 8, 21])
    heads = Heads(num_heads, (cos, torch.cat((-sin, sin), 2)), *cache, slots, (1.0, 1.0))
    out = torch.empty(heads.queries_shape, dtype=BF16)
    assert skinny_native.multiply(x, weight, bias, out, scales=scales, heads=heads)
    want = exact(x, weight, scales, bias).bfloat16().view(rows, -1, head_dim)
    turned = rotate(want[:, : num_heads + kv_heads].float(), *heads.angles)
    torch.testing.assert_close(out.float(), turned[:, :num_heads], atol=0.02, rtol=0.02)
    keys, values = cache.clone(), cache[1, :, slots]
    torch.testing.assert_close(
        keys[0][:, slots].float(), turned[:, num_heads:].transpose(0, 1), atol=0.02, rtol=0.02
    )
    torch.testing.assert_close(values, want[:, -kv_heads:].transpose(0, 1), atol=0.02, rtol=0.02)
    keys[:, :, slots] = 0
    assert not keys.any()  # nothing else was written


def test_plans_fit_the_cards():
    """The matrices of 8B, 32B and 70B models, whole and shared by ranks, in both types."""
    for itemsize in (1, 2):
        for outputs, inputs, parts, halves, head_dim in (
            (6144, 4096, 1, 1, 128), (4096, 4096, 2, 1, 0), (14336, 4096, 1, 2, 0),
            (4096, 14336, 2, 1, 0), (1536, 4096, 1, 1, 128), (4096, 1024, 1, 1, 0),
            (7168, 8192, 1, 2, 0), (28672, 8192, 1, 2, 0), (25600, 5120, 1, 2, 0),
            (8192, 28672, 1, 1, 0), (5120, 12800, 2, 1, 0),
        ):  # fmt: skip
            line_bytes = inputs * itemsize // parts
            found = skinny_native.plan(outputs, line_bytes, parts, halves, head_dim, UNITS)
            own = found.lines * found.groups
            assert found.lines % 8 == 0
            assert own <= 256
            assert -(-outputs // own) * parts <= UNITS
            assert line_bytes % (found.lots * 128) == 0
            assert found.stages <= 64
            assert 114 * 1024 < found.shared_bytes <= 227 * 1024
            assert not head_dim or head_dim % own == 0


@pytest.mark.parametrize(
    ("rows", "dtype", "outputs", "inputs", "parts", "takes"),
    [
        (8, BF16, 4096, 4096, 2, True),
        (9, BF16, 4096, 4096, 2, False),
        (1, torch.float16, 4096, 4096, 1, False),
        (1, BF16, 4096, 4096 + 32, 1, False),  # not whole lots
        (1, BF16, 4100, 4096, 1, False),
        (1, BF16, 128256, 4096, 1, False),  # a vocabulary
    ],
)
def test_which_products_are_taken(monkeypatch, rows, dtype, outputs, inputs, parts, takes):
    monkeypatch.setattr(skinny_native, "compute_units", lambda device: UNITS)
    monkeypatch.setattr(cuda_programs, "are_supported", lambda device: True)
    x = torch.empty(rows, inputs, dtype=dtype, device="meta")
    weight = torch.empty(outputs, inputs, dtype=dtype, device="meta")
    assert skinny_native.takes(x, weight, parts) == takes


SHAPES = [
    (6144, 4096, False, 1), (4096, 4096, False, 2), (28672, 4096, True, 1),
    (4096, 14336, False, 2), (4096, 1024, False, 1), (200, 1024, False, 1), (14336, 8192, True, 1),
    (3072, 8192, False, 1),
]  # fmt: skip


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kind", [BF16, FP8])
@pytest.mark.parametrize(("outputs", "inputs", "gated", "parts"), SHAPES)
def test_products_have_the_bits_of_triton(monkeypatch, kind, outputs, inputs, gated, parts):
    device = torch.device("cuda")
    weight = torch.randn(outputs, inputs, device=device) * 0.02
    has_bias = parts == 1 or kind == FP8
    linear = Linear(inputs, outputs, has_bias, BF16, device)
    if has_bias:
        linear.bias.copy_(torch.randn(outputs, device=device))
    if kind == FP8:
        scales = weight.abs().amax(1, keepdim=True) / 448
        linear.method = fp8_cuda.Fp8Method(WeightScheme("fp8", 8, "channel", 0))
        linear.method.set_matrix(linear, Matrix((weight / scales).to(FP8), scales, None))
    weight, own = weight.bfloat16(), skinny_native.multiply
    launched = []

    def multiply(*args, **options):
        launched.append(own(*args, **options))
        return launched[-1]

    monkeypatch.setattr(skinny_native, "multiply", multiply)
    for rows in (1, 2, 3, 5, 7, 8):
        x = torch.randn(rows, inputs, device=device).bfloat16()

        def product(x=x):
            if kind == FP8:
                return linear.gated(x) if gated else linear(x)
            if parts > 1:
                return exact_gemm.multiply_in_parts(x, weight, parts)
            return exact_gemm.multiply(x, weight, linear.bias, gated=gated)

        got = product()
        assert launched.pop()
        with monkeypatch.context() as patch:
            patch.setattr(skinny_native, "MOST_ROWS", 0)
            assert torch.equal(got, product()), rows
        assert launched.pop() is False
