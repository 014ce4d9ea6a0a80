"""Selection of the device that models run on."""

import logging

import pytest
import torch

from foredraft.attention.choice import (
    attention_for,
    device_for,
    exact_attention_for,
    target_attention_for,
)
from foredraft.attention.cpu import CpuAttention
from foredraft.attention.exact_triton import ExactAttention
from foredraft.attention.hopper_prompts import HopperAttention
from foredraft.attention.paged_triton import TritonAttention
from foredraft.errors import ConfigError


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """A GPU of that compute capability, or none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")


@pytest.mark.parametrize("asked", ["auto", "cuda"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_a_gpu_is_taken(monkeypatch, asked, capability):
    pretend(monkeypatch, capability)
    device = device_for(asked)
    assert device.type == "cuda"
    assert isinstance(attention_for(device), TritonAttention)
    for attention, backend in (
        (target_attention_for(device), TritonAttention),
        (exact_attention_for(device), ExactAttention),
    ):
        others = attention.others if isinstance(attention, HopperAttention) else attention
        assert isinstance(others, backend)
    assert device_for("cpu").type == "cpu"


@pytest.mark.parametrize(
    ("capability", "version", "is_taken"),
    [
        ((9, 0), "3.6.0", True),
        ((9, 0), "3.7.0", False),
        ((8, 0), "3.6.0", False),
        ((10, 0), "3.6.0", False),
    ],
)
def test_prompts_have_a_kernel_where_it_was_tested(monkeypatch, capability, version, is_taken):
    pretend(monkeypatch, capability)
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    for choose in (target_attention_for, exact_attention_for):
        assert isinstance(choose(torch.device("cuda")), HopperAttention) == is_taken


def test_without_one_the_cpu_is_taken_silently(monkeypatch, caplog):
    pretend(monkeypatch, None)
    device = device_for("auto")
    assert device.type == "cpu"
    assert isinstance(attention_for(device), CpuAttention)
    assert not caplog.records
    with pytest.raises(ConfigError, match="--device cuda: this process sees no CUDA device"):
        device_for("cuda")


def test_one_that_is_too_old_is_not(monkeypatch, caplog):
    pretend(monkeypatch, (7, 5))
    with caplog.at_level(logging.WARNING):
        assert device_for("auto").type == "cpu"
    assert (
        "Tesla T4 is sm_75, and the kernels need sm_80 or newer: running on the CPU" in caplog.text
    )
    with pytest.raises(ConfigError, match="--device cuda: Tesla T4 is sm_75"):
        device_for("cuda")
