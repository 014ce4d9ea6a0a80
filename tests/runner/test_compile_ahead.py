"""Kernels that are compiled ahead are not compiled again, and nothing runs while they are found."""

import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.layers.fused import rms_norm
from foredraft.runner.compile_ahead import compile_ahead, first_kernel
from testing.triton_device import needs_gpu

WIDTHS = (72, 136, 264)  # a kernel each, which no model of other tests launches


@pytest.mark.gpu
@needs_gpu
def test_later_runs_compile_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    device = torch.device("cuda")
    num_runs = torch.zeros((), device=device)
    rows = [torch.randn(4, width, device=device) for width in WIDTHS]
    results: dict[int, torch.Tensor] = {}

    def run(x: torch.Tensor) -> None:
        num_runs.add_(1)
        results[x.shape[1]] = rms_norm(x, x.new_ones(x.shape[1]), 1e-6, True)

    assert compile_ahead([partial(run, x) for x in rows], device) == len(WIDTHS)
    assert num_runs.item() == 0
    compiled: list[str] = []

    def note(*, src: Any, **_: object) -> None:
        compiled.append(src.name)

    monkeypatch.setattr(knobs.compilation, "listener", note)
    for x in rows:
        run(x)
        norm = x.double().square().mean(1, keepdim=True).add(1e-6).rsqrt()
        torch.testing.assert_close(results[x.shape[1]].double(), x * norm, atol=1e-5, rtol=1e-5)
    assert not compiled
    assert num_runs.item() == len(WIDTHS)


@pytest.mark.gpu
@needs_gpu
def test_a_kept_cache_ends_the_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    device = torch.device("cuda")
    tried: list[int] = []

    def run(width: int) -> None:
        tried.append(width)
        x = torch.ones(2, width, dtype=torch.float16, device=device)
        rms_norm(x, x[0], 1e-6, True)

    runs = [partial(run, width) for width in WIDTHS]
    assert compile_ahead(runs, device) == len(WIDTHS)
    assert compile_ahead(runs, device) == 0
    assert tried == [*WIDTHS, WIDTHS[0]]


@pytest.mark.gpu
@needs_gpu
def test_a_run_that_cannot_be_captured_leaves_its_kernels_to_the_launch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    device = torch.device("cuda")
    x = torch.ones(2, 520, device=device)

    def run() -> list[float]:
        return rms_norm(x, x[0], 1e-6, True)[0, :2].tolist()

    with caplog.at_level(logging.WARNING):
        compile_ahead([run], device)
    [record] = caplog.records
    assert record.getMessage().startswith("kernels are compiled one by one: ")
    assert run() == pytest.approx([1.0, 1.0], abs=1e-5)


def test_without_triton_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    tried: list[int] = []
    with caplog.at_level(logging.WARNING):
        assert compile_ahead([lambda: tried.append(1)], torch.device("cpu")) == 0
    [record] = caplog.records
    assert record.getMessage().startswith("kernels are compiled one by one: ")
    assert not tried


def test_a_first_kernel_that_fails_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(number: int) -> None:
        raise RuntimeError(f"no card {number}")

    monkeypatch.setattr(torch.cuda, "set_device", fail)
    with caplog.at_level(logging.WARNING), first_kernel(torch.device("cuda", 3)):
        done = True
    assert done
    assert caplog.messages == ["the first kernel: RuntimeError: no card 3"]
    with first_kernel(torch.device("cpu")):
        pass
    assert len(caplog.records) == 1
