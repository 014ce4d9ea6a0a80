"""Which captured steps a start makes, and which an idle engine."""

import logging
import weakref
from collections.abc import Callable
from unittest.mock import MagicMock

import pytest
import torch

from verify_service.executor.captured.executor import GraphExecutor
from verify_service.executor.captured.graph_store import GraphStore, Shortage
from verify_service.executor.captured.graphs import DecodeGraphs
from verify_service.executor.captured.shapes import PaddedShapes
from verify_service.executor.captured.shared_keys import BlockSizes
from verify_service.executor.captured.step import StepKind


class Recorded(DecodeGraphs):
    """Notes the steps that are run, and takes them for captured.

    Args:
        can_share: Whether steps can read shared keys once.
    """

    _listener = None

    def __init__(self, can_share: bool = False) -> None:
        self.shapes = PaddedShapes(2, 4)
        self.buffers = self.two_phase = MagicMock()
        self._step = MagicMock()
        self._step.block_sizes = lambda batch, rows: BlockSizes(2, can_share * (batch // 2), 1)
        self.shortage, self.ran = Shortage(), []  # type: ignore[assignment]
        self._steps = GraphStore(self.shortage)

    def idle_step(self, kind: StepKind) -> None:
        shares_keys = (True,) * kind.shares_keys
        self.ran.append((kind.batch, kind.rows, kind.is_filtered, *shares_keys))
        self._steps.add(kind, MagicMock())


def test_steps_with_filters_may_wait() -> None:
    made = Recorded()
    made.warm_up((2,))
    plain = [(2, 4, False), (1, 4, False), (2, 1, False), (1, 1, False)]
    assert made.ran == [(2, 4, True), *plain]
    made.idle_step(StepKind(2, 1, (2,), is_filtered=True))  # a request has asked for it
    made.ran.clear()
    assert made.capture_next()
    assert made.capture_next()
    assert not made.capture_next()
    assert made.ran == [(1, 1, True), (1, 4, True)]


def test_steps_of_shared_keys_wait_behind_them() -> None:
    made = Recorded(can_share=True)
    made.warm_up(())
    made.idle_step(StepKind(2, 4, (), shares_keys=True))  # sequences shared keys
    made.ran.clear()
    while made.capture_next():
        pass
    filtered = [(1, 1, True), (2, 1, True), (1, 4, True)]
    both = [(2, 1, True, True), (2, 4, True, True)]
    assert made.ran == [*filtered, (2, 1, False, True), *both]


class Short(Recorded):
    """Fails in every step with filters after the largest.

    Args:
        fail: Raises the error.
    """

    def __init__(self, fail: Callable[[], object]) -> None:
        super().__init__()
        self._fail = fail

    def idle_step(self, kind: StepKind) -> None:
        super().idle_step(kind)
        if kind.is_filtered and self.shapes.all()[0] != (kind.batch, kind.rows):
            self._fail()


def exhaust(kept: weakref.WeakSet[torch.Tensor]) -> None:
    """Fails as a capture does whose end fails too."""
    taken = torch.ones(4)
    kept.add(taken)
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee the manual")
    finally:
        raise RuntimeError("CUDA error: capture failed due to a previous error")


def test_without_memory_no_more_are_captured_ahead(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    left: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append(len(kept)))
    made = Short(lambda: exhaust(kept))
    made.warm_up(())
    made.shortage.is_tolerated = True
    made.ran.clear()
    with caplog.at_level(logging.WARNING):
        while made.capture_next():
            pass
    assert made.ran == [(1, 1, True)]
    assert made._steps[StepKind(1, 1, (), is_filtered=True)] is None  # no graph that has failed
    assert left == [0]  # the memory was free when it was given back
    [record] = caplog.records
    assert record.getMessage().startswith("no memory for more CUDA graphs; steps run without: ")


def test_other_errors_of_later_captures_end_the_engine() -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    made = Short(fail)
    made.warm_up(())
    made.shortage.is_tolerated = True
    with pytest.raises(RuntimeError, match="illegal memory"):
        made.capture_next()


def test_without_memory_at_the_start_there_is_none() -> None:
    """What calls it names the flags that help."""
    made = Short(lambda: exhaust(weakref.WeakSet()))
    made.warm_up(())
    with pytest.raises(RuntimeError, match="capture failed"):
        made.capture_next()


@pytest.mark.parametrize("ranks", [None, MagicMock()])
def test_ranks_do_not_part_ways(ranks: MagicMock | None) -> None:
    """Where another rank has begun the step, this one cannot leave it out."""
    made = Short(lambda: exhaust(weakref.WeakSet()))
    made.warm_up(())
    executor = GraphExecutor(MagicMock(), MagicMock(), made, MagicMock(), None, ranks)
    if ranks is None:
        assert executor.prepare()
        return
    with pytest.raises(RuntimeError, match="capture failed"):
        executor.prepare()
