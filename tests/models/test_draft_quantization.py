"""Weight-only int8: what it computes, and what it leaves alone."""

import pytest
import torch
from torch import nn

from foredraft.errors import ConfigError
from foredraft.layers.conversions import convert_linears
from foredraft.layers.draft_quantization import quantize_fp8, quantize_int8
from foredraft.layers.embedding import Embedding, LMHead
from foredraft.layers.linear import Linear

CPU = torch.device("cpu")


def random_linear(num_outputs: int, num_inputs: int, bias: bool, dtype: torch.dtype) -> Linear:
    linear = Linear(num_inputs, num_outputs, bias, dtype, CPU)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    return linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 8, 40])
def test_products_of_rounded_weights(num_rows: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(num_rows)
    linear = random_linear(96, 64, bias, dtype)
    linear.weight[5] = 0  # a row without any scale
    # Half of the largest bfloat16 weight lies between two numbers; float32 decides for one.
    weight = linear.weight.float()
    scales = weight.abs().amax(1, keepdim=True) / 127
    rounded = (weight / scales.clamp_min(1e-30)).round().double() * scales.double()
    quantize_int8(linear)
    assert linear.weight.dtype == torch.uint8
    x = torch.randn(num_rows, 64, dtype=dtype)
    expected = x.double() @ rounded.T
    if linear.bias is not None:
        expected += linear.bias.double()
    found = linear(x)
    assert found.dtype == dtype
    bound = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=bound)


def test_a_tied_embedding_stays() -> None:
    embedding = Embedding(50, 16, 1.0, torch.float32, CPU)
    embedding.weight.normal_()
    before = embedding.weight.clone()
    head = LMHead(16, 50, embedding, None, torch.float32, CPU)
    module = nn.ModuleList([embedding, head])
    x = torch.randn(3, 16)
    expected = head(x)
    quantize_int8(module)
    quantize_int8(module)  # a second time changes nothing
    assert torch.equal(embedding.weight, before)
    assert head.weight.dtype == torch.uint8
    torch.testing.assert_close(head(x), expected, atol=0.2, rtol=0.05)


def multiplies_by_row() -> bool:
    """Whether this torch has products of 8-bit floats with a scale per row on the CPU; not all
    versions do.
    """
    rows, scales = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(
            rows, rows.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16
        )
    except RuntimeError:
        return False
    return True


DEVICES = [CPU] if multiplies_by_row() else []
if torch.cuda.is_available():
    DEVICES.append(torch.device("cuda"))


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_products_of_8_bit_floats(num_rows: int, bias: bool, device: torch.device) -> None:
    """On the CPU torch multiplies them by a reference; what is tested there is the rounding around
    it.
    """
    torch.manual_seed(num_rows)
    linear = random_linear(96, 64, bias, torch.bfloat16).to(device)
    linear.weight[5] = 0  # a row without any scale
    scales = linear.weight.double().abs().amax(1, keepdim=True) / 448
    rounded = (linear.weight.double() / scales.clamp_min(1e-30)).to(torch.float8_e4m3fn)
    expected_weight = rounded.double() * scales
    quantize_fp8(linear)
    assert linear.weight.dtype == torch.float8_e4m3fn
    x = torch.randn(num_rows, 64, dtype=torch.bfloat16, device=device)
    expected = x.double() @ expected_weight.T
    if linear.bias is not None:
        expected += linear.bias.double()
    found = linear(x)
    assert found.dtype == torch.bfloat16
    # 4 bits of mantissa in x: each product is off by at most 1 part in 16.
    bound = x.double().abs() @ expected_weight.abs().T / 16 + 0.05 + 0.01 * expected.abs()
    assert ((found.double() - expected).abs() <= bound).all()


def test_matrices_that_do_not_fit_8_bit_products_stay() -> None:
    odd = random_linear(96, 40, False, torch.bfloat16)
    quantize_fp8(odd)
    assert odd.weight.dtype == torch.bfloat16


def test_8_bit_floats_are_refused_where_no_card_multiplies_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linear = random_linear(32, 32, False, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"--speculative-draft-model-quantization fp8.*CPU"):
        convert_linears(linear, "fp8", CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ConfigError, match=r"A100 is sm_80.*sm_89"):
        convert_linears(linear, "fp8", torch.device("cuda"))
    assert linear.weight.dtype == torch.bfloat16
