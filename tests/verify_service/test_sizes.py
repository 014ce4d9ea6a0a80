"""Sizes that follow from the device, and flags that override them."""

from types import SimpleNamespace

import pytest
import torch

from foredraft.config.services import VerifyConfig
from verify_service.sizes import arena_bytes, chunk_size

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("gib", "tokens", "arena"), [(16, 2048, 128), (24, 2048, 128), (48, 4096, 256), (80, 8192, 512)]
)
def test_a_gpu_s_chunk_follows_its_memory(monkeypatch, gib, tokens, arena):
    card = SimpleNamespace(total_memory=int((gib - 0.5) * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert chunk_size(VerifyConfig(), GPU) == tokens
    assert arena_bytes(VerifyConfig(), GPU) == arena << 20
    given = VerifyConfig(chunked_prefill_size=100, arena_mb=7)
    assert chunk_size(given, GPU) == 100
    assert arena_bytes(given, GPU) == 7 << 20
    assert arena_bytes(VerifyConfig(chunked_prefill_size=100), GPU) == 64 << 20


def test_a_cpu_s_chunk_is_small():
    assert chunk_size(VerifyConfig(), CPU) == 512
    assert arena_bytes(VerifyConfig(), CPU) == 64 << 20
