"""What a failed capture leaves behind; without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foredraft.runner import aside


class Streams:
    """Stands for CUDA's streams, and for captures whose end fails.

    Attributes:
        current: The current stream.
        order: What waited for what: pairs of streams.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[tuple[str, str]] = []
        self.own, self.side = self._stream("own"), self._stream("side")
        self.current = self.own
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(
            torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream)
        )
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
        monkeypatch.setattr(torch.cuda, "graph", self._broken)
        monkeypatch.setattr(aside, "_side_stream", lambda device: self.side)

    def _stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name, wait_stream=lambda other: self.order.append((name, other.name))
        )

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def _broken(self, graph: object, **options: object) -> Iterator[None]:
        """Leaves its stream current, as torch does where a capture cannot be ended."""
        self.current = self._stream("capture")
        try:
            yield
        finally:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )


def fail() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def test_work_after_a_failed_capture_goes_where_it_went_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams(monkeypatch)
    with pytest.raises(RuntimeError, match="previous error") as failed:
        aside.capture_graph(fail, None)
    assert aside.ran_out(failed.value)
    assert streams.current is streams.own


def test_work_after_a_failed_run_waits_for_what_it_had_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams(monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        aside.run_aside(fail, torch.device("cpu"))
    assert streams.order == [("side", "own"), ("own", "side")]
    assert streams.current is streams.own
