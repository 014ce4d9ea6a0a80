"""Kernels in CUDA C++, compiled for this CPU with the instructions of GPUs emulated, against
float64 products.
"""

import shutil

import pytest
import torch

from foredraft.layers import cuda_programs, words_cuda, words_native
from foredraft.layers.linear import Linear
from foredraft.layers.quantized_matrix import Matrix, dequantize
from foredraft.layers.weight_scheme import WeightScheme
from foredraft.layers.words_factors import Form
from testing.emulated_kernels import Emulated
from testing.triton_device import needs_gpu

CPU = torch.device("cpu")

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "parts", "gated", "group", "bias", "form"),
    [
        (1, 32, 2048, 4, False, 128, False, Form.OFFSETS),
        (1, 64, 2560, 1, True, 128, True, Form.STEPS),  # more units than are kept, and half a block
        (5, 48, 1024, 2, False, 32, False, Form.LARGE_OFFSETS),
        (8, 64, 1024, 4, True, 64, True, Form.STEPS),
        (3, 32, 768, 1, False, 0, True, Form.OFFSETS),  # one scale for all inputs
    ],
)
def test_words(tmp_path, monkeypatch, rows, outputs, inputs, parts, gated, group, bias, form):
    program = Emulated(tmp_path, "words.cu", "multiply_words")
    monkeypatch.setattr(words_native, "_PROGRAM", program)
    monkeypatch.setattr(words_native, "compute_units", lambda device: 1)
    monkeypatch.setattr(words_cuda, "_cuts", lambda *_: (32, parts))
    generator = torch.Generator().manual_seed(1)
    groups = inputs // group if group else 1
    numbers = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(outputs, groups, generator=generator) + 0.5) * 0.01
    if form == Form.LARGE_OFFSETS:
        scales *= 32
    range_of_zeros = (3, 12) if form == Form.STEPS else (8, 9)
    zeros = torch.randint(*range_of_zeros, scales.shape, dtype=torch.uint8, generator=generator)
    matrix = Matrix(numbers, scales.bfloat16().float(), zeros)
    granularity = "group" if group else "channel"
    scheme = WeightScheme("packed", 4, granularity, group, has_zeros=True)
    linear = Linear(inputs, outputs, bias, torch.bfloat16, CPU)
    if bias:
        linear.bias.copy_(torch.randn(outputs, generator=generator))
    method = words_cuda.WordsMethod(scheme, inputs, outputs, torch.bfloat16)
    method.set_matrix(linear, matrix)
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    assert method._form == form
    got = words_native.multiply(linear, x, group or inputs, parts, gated, form)
    want = x.double() @ dequantize(matrix, group or inputs, torch.bfloat16).double().T
    if bias:
        want += linear.bias.double()
    if gated:
        gate, up = want.chunk(2, 1)
        want = gate * torch.sigmoid(gate) * up
    assert float((got.double() - want).norm() / want.norm()) < 5e-3


def test_nothing_is_compiled_for_a_cpu():
    assert not cuda_programs.are_supported(CPU)


def test_a_kernel_that_does_not_compile_is_not_tried_again(monkeypatch):
    tried = []

    def refuse(file, constants):
        tried.append(constants)
        raise RuntimeError("NVRTC_ERROR_COMPILATION")

    monkeypatch.setattr(cuda_programs, "compiled", refuse)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    program = cuda_programs.Program("words.cu", "multiply_words")
    assert not program.is_ready({"PARTS": 1})
    assert not program.is_ready({"PARTS": 2})
    assert tried == [{"PARTS": 1}]


def test_kernels_are_taken_instead_of_launched(monkeypatch):
    found = {}
    program = cuda_programs.Program("words.cu", "multiply_words")
    monkeypatch.setattr(program, "_load", lambda constants: constants == {"PARTS": 1})
    with cuda_programs.taken(found.__setitem__):
        for parts in (1, 2, 1):
            assert program.is_ready({"PARTS": parts})
            program.launch({"PARTS": parts}, 1, 32, 0, ())
    assert [load() for load in found.values()] == [True, False]


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("groups", [0, 2, 8])
@pytest.mark.parametrize("shape", [(6144, 4096, 4), (4096, 14336, 4), (14336, 4096, 1)])
def test_blocks_have_the_shared_memory_that_they_need(rows, groups, shape):
    """The shapes of Llama-3.1-8B on an H200."""
    outputs, inputs, parts = shape
    found = words_native.plan(rows, outputs, inputs, parts, 2 if parts == 1 else 1, groups, 132)
    assert -(-outputs // 16 // found.own) <= 132
    assert found.stages >= 2
    assert 114 * 1024 < found.shared_bytes <= 227 * 1024


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("group", [32, 64, 128, 0])
@pytest.mark.parametrize(
    ("shape", "gated"),
    [((6144, 4096), False), ((4096, 14336), False), ((28672, 4096), True), ((1536, 1024), True)],
)
def test_words_have_the_bits_of_triton(monkeypatch, shape, gated, group, form):
    granularity = "group" if group else "channel"
    scheme = WeightScheme("packed", 4, granularity, group, has_zeros=True)
    device = torch.device("cuda")
    numbers = torch.randint(0, 16, shape, dtype=torch.uint8, device=device)
    scales = torch.rand(shape[0], shape[1] // group if group else 1, device=device)
    scales = scales.bfloat16().float() * (2**-2 if form == Form.LARGE_OFFSETS else 2**-7)
    range_of_zeros = (3, 12) if form == Form.STEPS else (8, 9)
    zeros = torch.randint(*range_of_zeros, scales.shape, dtype=torch.uint8, device=device)
    linear = Linear(shape[1], shape[0], True, torch.bfloat16, device)
    linear.bias.copy_(torch.randn(shape[0], device=device))
    method = linear.method = words_cuda.WordsMethod(scheme, *shape[::-1], torch.bfloat16)
    method.set_matrix(linear, Matrix(numbers, scales, zeros))
    assert method._form == form
    multiply = linear.gated if gated else linear
    launched = []
    own = words_native.multiply
    monkeypatch.setattr(words_native, "multiply", lambda *args: launched.append(args) or own(*args))
    for rows in (1, 2, 3, 5, 7, 8):
        x = torch.randn(rows, shape[1], device=device).bfloat16()
        got = multiply(x)
        assert launched
        with monkeypatch.context() as patch:
            patch.setattr(method, "early_rows", 0)
            assert torch.equal(got, multiply(x)), rows
