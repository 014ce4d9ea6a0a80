"""Selection of a target's attention backend, and refusals by name."""

from types import SimpleNamespace

import pytest
import torch

from foredraft.attention import choice
from foredraft.attention.cpu import CpuAttention
from foredraft.attention.exact_triton import ExactAttention
from foredraft.attention.hopper_prompts import HopperAttention
from foredraft.attention.paged_triton import TritonAttention
from foredraft.attention.sdpa import SdpaAttention
from foredraft.config.services import VerifyConfig
from foredraft.errors import ConfigError
from verify_service import attention_backend
from verify_service.attention_backend import check_attention_flags, choose_attention
from verify_service.flashinfer_prompts import FlashInferAttention

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def chosen(asked, device, level, windows=(None,)):
    config = VerifyConfig(attention_backend=asked, exactness="strict" if level == "strict" else "off")  # fmt: skip  # noqa: E501
    check_attention_flags(config, device)
    shape = SimpleNamespace(windows=windows, head_dim=64)
    model = SimpleNamespace(device=device, dtype=torch.bfloat16, config=shape)
    return type(choose_attention(config, model, torch.bfloat16, level))


@pytest.mark.parametrize(("asked", "expected"), [("auto", CpuAttention), ("sdpa", SdpaAttention)])
@pytest.mark.parametrize("level", ["float32", "off"])
def test_a_cpu_has_ours_and_that_of_torch(asked, expected, level):
    assert chosen(asked, CPU, level) is expected


@pytest.mark.parametrize("asked", ["auto", "triton"])
def test_a_gpu_has_one_for_each_exactness(asked):
    assert chosen(asked, GPU, "strict") is ExactAttention
    assert chosen(asked, GPU, "off") is TritonAttention


def test_a_hopper_card_computes_prompts_by_a_kernel_of_their_own(monkeypatch):
    monkeypatch.setattr(choice, "has_kernel", lambda device: True)
    assert chosen("auto", GPU, "strict") is HopperAttention
    assert chosen("auto", GPU, "off") is HopperAttention
    assert chosen("triton", GPU, "strict") is ExactAttention
    assert chosen("triton", GPU, "off") is TritonAttention


def test_flashinfer_is_taken_where_its_kernels_are(monkeypatch):
    monkeypatch.setattr(attention_backend, "why_not", lambda *asked: "")
    assert chosen("flashinfer", GPU, "off") is FlashInferAttention
    assert chosen("auto", GPU, "off") is FlashInferAttention
    assert chosen("auto", GPU, "strict") is ExactAttention
    assert chosen("triton", GPU, "off") is TritonAttention


@pytest.mark.parametrize(
    ("asked", "device", "level", "words"),
    [
        ("triton", CPU, "off", "--attention-backend triton: on a cpu device give auto or sdpa"),
        (
            "flashinfer",
            CPU,
            "off",
            "--attention-backend flashinfer: on a cpu device give auto or sdpa",
        ),
        (
            "sdpa",
            GPU,
            "off",
            "--attention-backend sdpa: on a cuda device give auto or triton or flashinfer",
        ),
        ("flashinfer", GPU, "strict", "give --exactness off too"),
    ],
)
def test_what_is_refused(asked, device, level, words):
    with pytest.raises(ConfigError, match=words):
        chosen(asked, device, level)


def test_flashinfer_is_refused_where_a_layer_is_not_its_own():
    with pytest.raises(ConfigError, match=r"--attention-backend flashinfer: .*sliding windows"):
        chosen("flashinfer", GPU, "off", (None, 512))
