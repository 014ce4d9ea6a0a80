"""`--quantization`: what plain checkpoints become while they are loaded."""

import math

import pytest
import torch

from foredraft.errors import CheckpointError
from foredraft.layers.quantized_matrix import dequantize
from foredraft.layers.quantizing import quantize
from foredraft.layers.weight_scheme import WeightScheme
from foredraft.models.loader import load_model
from foredraft.models.quantization_config import on_load
from testing.quantized_checkpoints import FORMATS, tiny_llama, write
from verify_service.exactness import make_exact

KINDS = ("fp8", "int8", "int4")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("plain"))


def scheme_of(kind: str, group_size: int = 128) -> WeightScheme:
    return on_load(None, kind, group_size, None).scheme


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_eight_bits_are_the_nearest_to_each_weight(kind):
    weight = torch.randn(40, 200, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    got = dequantize(quantize(weight, scheme_of(kind)), 128, torch.float64)
    most = weight.double().abs().amax(1, keepdim=True)
    if kind == "int8":
        bound = (most / 127 / 2).expand_as(got)
    else:  # half a unit in the last of three places, or half the smallest step
        bound = torch.maximum(weight.double().abs() / 16, most / 448 * 2**-10)
    assert bool(((got - weight.double()).abs() <= bound * (1 + 1e-6)).all())


def with_exact_product(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """The nearest scales of as many bits as make zero * scale or (15 - zero) * scale a bfloat16, in
    float64.
    """
    found = []
    for scale, zero in zip(scales.flatten().tolist(), zeros.flatten().tolist(), strict=True):
        exponent = math.frexp(scale)[1]
        for bits in (8, 7, 6, 5, 4):
            unit = 2.0 ** (exponent - bits)
            rounded = round(scale / unit) * unit
            products = torch.tensor([zero, 15 - zero], dtype=torch.float64) * rounded
            if bool((products.bfloat16().double() == products).any()):
                break
        found.append(rounded)
    return torch.tensor(found, dtype=torch.float64).view(scales.shape)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_four_bits_are_no_worse_than_the_whole_range_rounded(size):
    weight = torch.randn(64, 320, generator=torch.Generator().manual_seed(0))
    matrix = quantize(weight, scheme_of("int4", size))
    assert int(matrix.numbers.max()) == 15
    assert matrix.scales.shape == (64, -(-320 // size))
    got = dequantize(matrix, size, torch.float64)
    worse = total = 0.0
    for begin in range(0, 320, size):
        group = weight[:, begin : begin + size].double()
        low, high = (
            group.amin(1, keepdim=True).clamp(max=0),
            group.amax(1, keepdim=True).clamp(min=0),
        )
        scale = ((high - low) / 15).bfloat16()
        zero = (-low / scale).round().clamp(0, 15)
        scale = with_exact_product(scale, zero)
        plain = ((group / scale + zero).round().clamp(0, 15) - zero) * scale
        own = (got[:, begin : begin + size] - group).square().sum(1)
        assert bool((own <= (plain - group).square().sum(1) * (1 + 1e-5)).all())
        worse, total = worse + float((plain - group).square().sum()), total + float(own.sum())
    assert total < 0.97 * worse


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_quantised_while_it_is_loaded_is_the_one_quantised_before(kind, plain):
    model = load_model(plain, torch.float32, quantization=kind)
    reference = load_model(plain, torch.float32)
    scheme = scheme_of(kind)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(model.decoder_layers, reference.decoder_layers, strict=True):
        for part in (lambda layer: layer.attention.qkv, lambda layer: layer.mlp.gate_up):
            weight = dequantize(quantize(part(theirs).weight, scheme), 128, torch.float64)
            want = x.double() @ weight.T
            error = float((part(ours)(x) - want).norm() / want.norm())
            assert error < 1e-5
    assert torch.equal(model.lm_head.weight, reference.lm_head.weight)
    if kind != "fp8":
        assert all(
            parameter.dtype in (torch.int8, torch.uint8)
            for name, parameter in model.named_parameters()
            if name.endswith(("qkv.weight", "output.weight", "gate_up.weight", "down.weight"))
        )


def test_a_quantised_checkpoint_stays_what_it_is(plain, tmp_path):
    write(plain, tmp_path, FORMATS["awq"])
    assert (
        load_model(tmp_path, torch.float32, quantization="int4").config.quantization.method == "awq"
    )
    with pytest.raises(CheckpointError, match=r"--quantization fp8: the checkpoint is awq int4"):
        load_model(tmp_path, torch.float32, quantization="fp8")
    size = {"quantization": "int4", "quantization_group_size": 32}
    with pytest.raises(CheckpointError, match=r"-group-size 32: the checkpoint is awq int4.*flags"):
        load_model(tmp_path, torch.float32, **size)


def test_quantised_weights_on_a_cpu_have_the_level_of_float32(plain):
    levels = {
        kind: make_exact(load_model(plain, torch.float32, quantization=kind), "strict").level
        for kind in ("unquant", "fp8", "int8", "int4")
    }
    assert set(levels.values()) == {"float32"}


def test_a_group_divides_a_matrix_where_it_can(tmp_path):
    model = load_model(
        tiny_llama(tmp_path, hidden_size=320, intermediate_size=136),
        torch.float32,
        quantization="int4",
    )
    layer = model.decoder_layers[0]
    assert layer.mlp.gate_up.scales.shape[1] == 320 // 64
    assert layer.mlp.down.scales.shape[1] == 2  # of 136 inputs 8 have their own
    x = torch.randn(3, 320)
    plain = load_model(tmp_path, torch.float32).decoder_layers[0].mlp(x)
    assert float((layer.mlp(x) - plain).norm() / plain.norm()) < 0.3
