"""The kernels of quantised weights and of strict products compiled for cards, which needs none of
them: the interpreter takes what the compiler refuses, and inline assembly it does not run.
"""

import importlib.util
from typing import Any

import pytest
import torch

from foredraft import kernel_launch
from foredraft.layers import exact_gemm, fp8_cuda, words_cuda
from foredraft.layers.fp8_cuda import Fp8Method, quantize_rows
from foredraft.layers.heads import Heads
from foredraft.layers.linear import Linear
from foredraft.layers.weight_scheme import WeightScheme
from foredraft.layers.words_cuda import MOST_ROWS, WordsMethod
from foredraft.layers.words_factors import Form
from testing.triton_compiled import SHARED, Recorder
from testing.triton_device import INTERPRETED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or INTERPRETED, reason="needs Triton's compiler"
    ),
]
BF16, FP16 = torch.bfloat16, torch.float16
CPU = torch.device("cpu")
INPUTS = 1024


@pytest.fixture(params=[80, 89, 90])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A card that the launches are for."""
    able = {"launch_pdl": request.param >= 90, "DEPENDENT": request.param >= 90}
    monkeypatch.setattr(kernel_launch, "overlapped", lambda device: able)
    for module in (fp8_cuda, words_cuda, exact_gemm):
        monkeypatch.setattr(module, "overlapped", lambda device: able)
    monkeypatch.setattr(words_cuda, "shared_memory", lambda device: SHARED[request.param])
    return request.param


def recorded(monkeypatch: pytest.MonkeyPatch, module: Any, *names: str) -> list[Recorder]:
    """Recorders in the place of a module's kernels."""
    recorders = [Recorder(getattr(module, name)) for name in names]
    for name, recorder in zip(names, recorders, strict=True):
        monkeypatch.setattr(module, name, recorder)
    return recorders


def check_fits(recorders: list[Recorder], capability: int) -> None:
    for recorder in recorders:
        assert recorder.launches
        assert max(recorder.shared_memory(capability)) <= SHARED[capability]


def layer(outputs: int, dtype: torch.dtype, weight: torch.Tensor, scales: torch.Tensor) -> Linear:
    linear = Linear(16, 16, False, dtype, CPU)
    linear.num_inputs, linear.num_outputs = INPUTS, outputs
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    linear.scales = torch.nn.Parameter(scales, requires_grad=False)
    return linear


@pytest.mark.parametrize("outputs", [4096, 8192, 16384])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 0)])
def test_words_compile_and_fit(monkeypatch, capability, bits, group, dtype, outputs):
    from foredraft.layers import words_kernels as kernels

    layout = "packed" if bits == 4 else "int8"
    granularity = "group" if group else "channel"
    scheme = WeightScheme(layout, bits, granularity, group, has_zeros=bits == 4)
    method = WordsMethod(scheme, INPUTS, outputs, dtype)
    if bits == 4 and dtype == BF16:
        method._form = Form.OFFSETS if group == 128 else Form.LARGE_OFFSETS
    words = torch.zeros(outputs, INPUTS * bits // 32, dtype=torch.int32)
    scales = torch.zeros(INPUTS // (group or INPUTS), outputs)
    if bits == 4:
        scales = scales.int()
    linear = layer(outputs, dtype, words, scales)
    recorders = recorded(monkeypatch, kernels, "multiply_few", "multiply_some", "dequantize_words")
    for rows in (1, 16, 32, 64, 128, 256, MOST_ROWS):
        x = torch.zeros(rows, INPUTS, dtype=dtype)
        method._multiply(linear, x, gated=rows in (16, 64, MOST_ROWS) and outputs > 8192)
    for launch in recorders[0].launches + recorders[1].launches:
        launch["ASM"] = bits == 4  # as on a GPU
    method.dequantized(linear)
    if outputs == 16384:  # which are not cut into parts
        recorders.pop(0)
    check_fits(recorders, capability)


def heads_of(x: torch.Tensor, outputs: int) -> Heads:
    """Heads of 128 numbers that so many outputs are, in a cache of 8-bit floats."""
    kept = torch.zeros(4, 100, 128, dtype=torch.float8_e5m2)
    angles, slots = torch.zeros(len(x), 1, 128), torch.zeros(len(x), dtype=torch.int64)
    return Heads(outputs // 128 - 8, (angles, angles), kept, kept, slots, (0.5, 0.5))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("granularity", ["channel", "block"])
def test_8_bit_floats_compile_and_fit(monkeypatch, capability, granularity, dtype):
    from foredraft.layers import fp8_kernels as kernels

    recorders = recorded(monkeypatch, kernels, "quantize_rows", "multiply_fp8")
    method = Fp8Method(WeightScheme("fp8", 8, granularity))
    for outputs in (4096, 16384):
        weight = torch.zeros(outputs, INPUTS, dtype=torch.float8_e4m3fn)
        scales = torch.zeros(1, outputs)
        if granularity == "block":
            scales = torch.zeros(outputs // 128, INPUTS // 128)
        linear = layer(outputs, dtype, weight, scales)
        for rows in (1, 17, 64):
            x = torch.zeros(rows, INPUTS, dtype=dtype)
            method._multiply(linear, x, None)
        method._multiply(linear, x, None, gated=True)
        method._multiply(linear, x, None, heads=heads_of(x, outputs))
    if capability < 90:  # others take the library for the product
        recorders.pop()
    if capability < 89:  # and have no such floats
        return
    quantize_rows(torch.zeros(3, 14336, dtype=dtype), 0)
    check_fits(recorders, capability)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("outputs", [4096, 6144])
def test_strict_products_compile_and_fit(monkeypatch, capability, dtype, outputs):
    from foredraft.layers import exact_gemm_kernels, skinny_gemm_kernels

    monkeypatch.setattr(exact_gemm, "is_hopper", lambda device: False)
    recorders = [
        *recorded(monkeypatch, skinny_gemm_kernels, "multiply"),
        *recorded(monkeypatch, exact_gemm_kernels, "multiply_tiles"),
    ]
    weight = torch.zeros(outputs, 2048, dtype=dtype)
    for rows in (1, 40, 200):
        exact_gemm.multiply(torch.zeros(rows, 2048, dtype=dtype), weight, None)
    exact_gemm.multiply(torch.zeros(3, 2048, dtype=dtype), weight, None, gated=True)
    if capability == 90:
        monkeypatch.setattr(exact_gemm, "is_hopper", lambda device: True)
        for rows in (1, 32, 64):
            exact_gemm.multiply(torch.zeros(rows, 2048, dtype=dtype), weight, None)
            exact_gemm.multiply(torch.zeros(rows, 2048, dtype=dtype), weight, None, gated=True)
            x = torch.zeros(rows, 2048, dtype=dtype)
            exact_gemm.multiply_to_heads(x, weight, None, heads_of(x, outputs))
        for rows in (1, 32):
            exact_gemm.multiply_in_parts(torch.zeros(rows, 2048, dtype=dtype), weight, 2)
    check_fits(recorders, capability)
