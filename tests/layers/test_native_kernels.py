"""Kernels in CUDA C++, compiled for this CPU with the instructions of GPUs emulated, against
float64 products.
"""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from foredraft.layers import cuda_programs, fp8_native, words_cuda, words_native
from foredraft.layers.linear import Linear
from foredraft.layers.quantized_matrix import Matrix, dequantize
from foredraft.layers.weight_scheme import WeightScheme
from testing.triton_device import needs_gpu

LAYERS = Path(cuda_programs.__file__).parent
NATIVE = Path(__file__).parent / "native"
CPU = torch.device("cpu")

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


class Emulated:
    """Compiles and runs a kernel on this CPU, in place of `Program`."""

    def __init__(self, folder: Path, file: str, name: str) -> None:
        self._folder, self._file, self._name = folder, file, name

    def launch(self, constants, blocks, threads, shared_bytes, arguments):
        assert shared_bytes <= 227 * 1024
        macros = constants | {
            "KERNEL_FILE": f'"{self._file}"', "KERNEL_NAME": self._name,
            "NUM_ARGUMENTS": len(arguments),
        }  # fmt: skip
        program = self._folder / "program"
        subprocess.run(
            ["g++", "-std=c++20", "-O1", "-pthread", "-w", f"-I{LAYERS}",
             *(f"-D{name}={value}" for name, value in macros.items()),
             str(NATIVE / "main.cpp"), "-o", str(program)], check=True,
        )  # fmt: skip
        tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
        paths = [self._folder / str(index) for index in range(len(tensors))]
        for path, tensor in zip(paths, tensors, strict=True):
            path.write_bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        numbers = [one for one in arguments if not isinstance(one, torch.Tensor)]
        command = [program, blocks, len(tensors), *paths, *numbers]
        subprocess.run(list(map(str, command)), check=True, timeout=120)
        found = torch.frombuffer(bytearray(paths[-1].read_bytes()), dtype=tensors[-1].dtype)
        tensors[-1].copy_(found.view(tensors[-1].shape))


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "parts", "gated"),
    [
        (1, 32, 2048, 4, False),
        (1, 64, 1536, 1, True),  # more units than stages
        (5, 32, 1024, 2, False),
        (8, 64, 1024, 4, True),
    ],
)
def test_words(tmp_path, monkeypatch, rows, outputs, inputs, parts, gated):
    program = Emulated(tmp_path, "words.cu", "multiply_words")
    monkeypatch.setattr(words_native, "_PROGRAM", program)
    monkeypatch.setattr(words_cuda, "_cuts", lambda *_: (32, parts))
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(outputs, inputs // 128, generator=generator) + 0.5) * 0.01
    zeros = torch.randint(3, 12, scales.shape, dtype=torch.uint8, generator=generator)
    matrix = Matrix(numbers, scales.bfloat16().float(), zeros)
    scheme = WeightScheme("packed", 4, "group", 128, has_zeros=True)
    linear = Linear(inputs, outputs, False, torch.bfloat16, CPU)
    method = words_cuda.WordsMethod(scheme, inputs, outputs, torch.bfloat16)
    method.set_matrix(linear, matrix)
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    got = words_native.multiply(linear, x, parts, gated)
    want = x.double() @ dequantize(matrix, 128, torch.bfloat16).double().T
    if gated:
        gate, up = want.chunk(2, 1)
        want = gate * torch.sigmoid(gate) * up
    assert float((got.double() - want).norm() / want.norm()) < 5e-3


@pytest.mark.parametrize(
    ("rows", "dtype", "bias", "group", "unit", "parts", "gated", "is_taken"),
    [
        (1, torch.bfloat16, False, 128, 32, 4, False, True),
        (1, torch.bfloat16, False, 128, 32, 1, True, True),
        (2, torch.bfloat16, False, 128, 32, 4, False, False),
        (1, torch.float16, False, 128, 32, 4, False, False),
        (1, torch.bfloat16, True, 128, 32, 4, False, False),
        (1, torch.bfloat16, False, 64, 32, 4, False, False),
        (1, torch.bfloat16, False, 128, 16, 4, False, False),
        (1, torch.bfloat16, False, 128, 32, 1, False, False),
    ],
)
def test_which_rows_are_taken(monkeypatch, rows, dtype, bias, group, unit, parts, gated, is_taken):
    monkeypatch.setattr(cuda_programs, "are_supported", lambda device: True)
    linear = Linear(1024, 64, bias, dtype, CPU)
    x = torch.zeros(rows, 1024, dtype=dtype)
    assert words_native.supports(linear, x, group, unit, parts, gated) == is_taken


def test_nothing_is_compiled_for_a_cpu():
    assert not cuda_programs.are_supported(CPU)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "gated"), [((6144, 4096), False), ((28672, 4096), True)])
def test_words_have_the_bits_of_triton(monkeypatch, shape, gated):
    scheme = WeightScheme("packed", 4, "group", 128, has_zeros=True)
    device = torch.device("cuda")
    numbers = torch.randint(0, 16, shape, dtype=torch.uint8, device=device)
    scales = torch.rand(shape[0], shape[1] // 128, device=device).bfloat16().float() * 2**-7
    zeros = torch.randint(3, 12, scales.shape, dtype=torch.uint8, device=device)
    linear = Linear(shape[1], shape[0], False, torch.bfloat16, device)
    method = linear.method = words_cuda.WordsMethod(scheme, shape[1], shape[0], torch.bfloat16)
    method.set_matrix(linear, Matrix(numbers, scales, zeros))
    x = torch.randn(1, shape[1], device=device).bfloat16()
    multiply = linear.gated if gated else linear
    got = multiply(x)
    monkeypatch.setattr(words_native, "MOST_ROWS", 0)
    assert torch.equal(got, multiply(x))


def check(got, x, weight, bias, gated):
    """Compares with x W^T + b in float64, with the gate's product where asked."""
    want = x @ weight.T
    if bias is not None:
        want += bias.double()
    if gated:
        gate, up = want.chunk(2, 1)
        want = gate * torch.sigmoid(gate) * up
    assert float((got.double() - want).norm() / want.norm()) < 5e-3


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "gated", "bias"),
    [
        (1, 128, 512, False, True),
        (7, 96, 1280, False, False),  # more units than stages, and half a block of outputs
        (16, 128, 384, True, True),
        (20, 64, 256, False, False),
    ],
)
def test_fp8(tmp_path, monkeypatch, rows, outputs, inputs, gated, bias):
    monkeypatch.setattr(fp8_native, "_PROGRAM", Emulated(tmp_path, "fp8.cu", "multiply_fp8"))
    generator = torch.Generator().manual_seed(2)
    linear = Linear(inputs, outputs, bias, torch.bfloat16, CPU)
    if bias:
        linear.bias.copy_(torch.randn(outputs, generator=generator))
    weight = (torch.randn(outputs, inputs, generator=generator) * 64).to(torch.float8_e4m3fn)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    linear.scales = torch.rand(1, outputs, generator=generator) * 0.001
    numbers = (torch.randn(rows, inputs, generator=generator) * 64).to(torch.float8_e4m3fn)
    scales = torch.rand(1, rows, generator=generator) * 0.1
    x = numbers.double() * scales.T.double()
    got = fp8_native.multiply(linear, x.bfloat16(), numbers, scales, gated)
    check(got, x, weight.double() * linear.scales.T.double(), linear.bias, gated)
