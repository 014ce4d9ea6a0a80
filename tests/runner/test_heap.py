"""Memory of activations: kept for the next forward where the C library can be told so."""

import ctypes

import pytest

from foredraft.runner.heap import keep_freed_memory


def test_glibc_takes_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    is_glibc = hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
    assert keep_freed_memory() == is_glibc


def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()
