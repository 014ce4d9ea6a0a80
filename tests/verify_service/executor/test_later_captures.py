"""Which captured steps a start makes, and which an idle engine."""

from typing import Any

import pytest

from verify_service.executor.captured import graphs
from verify_service.executor.captured.graphs import DecodeGraphs
from verify_service.executor.captured.step import StepKind


class Recorded(DecodeGraphs):
    """Notes the steps that are run, and takes them for captured."""

    def __init__(self) -> None:
        self.batch_sizes = [1, 2]
        self._row_sizes = {1: [1, 4], 2: [1, 4]}
        self._steps, self.ran = {}, []  # type: ignore[assignment]

    def idle_step(self, batch: int, rows: int, is_filtered: bool = False) -> None:
        self.ran.append((batch, rows, is_filtered))
        self._steps[StepKind(batch, rows, self.capture, is_filtered)] = None  # type: ignore[assignment]


def test_steps_with_filters_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = lambda *arguments: None  # noqa: E731
    for name in ("records", "_pad", "upload", "start_two_phase"):
        monkeypatch.setattr(Recorded, name, nothing)
    monkeypatch.setattr(graphs.DecodeGraphs, "choose_two_phase", lambda *_: _Done())
    made = Recorded()
    made._host_records, made._current = [[]], 0  # type: ignore[list-item]
    made.warm_up((2,))
    plain = [(2, 4, False), (1, 4, False), (2, 1, False), (1, 1, False)]
    assert made.ran == [(2, 4, True), *plain]
    made.idle_step(2, 1, is_filtered=True)  # a request has asked for it
    made.ran.clear()
    assert made.capture_next()
    assert made.capture_next()
    assert not made.capture_next()
    assert made.ran == [(1, 1, True), (1, 4, True)]


class _Done:
    def chosen(self) -> None:
        pass
