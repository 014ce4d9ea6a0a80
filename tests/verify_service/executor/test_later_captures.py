"""Which captured steps a start makes, and which an idle engine."""

from unittest.mock import MagicMock

from verify_service.executor.captured.graphs import DecodeGraphs
from verify_service.executor.captured.shapes import PaddedShapes
from verify_service.executor.captured.step import StepKind


class Recorded(DecodeGraphs):
    """Notes the steps that are run, and takes them for captured."""

    def __init__(self) -> None:
        self.shapes = PaddedShapes(2, 4)
        self.buffers = self.two_phase = MagicMock()
        self._steps, self.ran = {}, []  # type: ignore[assignment]

    def idle_step(self, batch: int, rows: int, is_filtered: bool = False) -> None:
        self.ran.append((batch, rows, is_filtered))
        self._steps[StepKind(batch, rows, self.capture, is_filtered)] = None  # type: ignore[assignment]


def test_steps_with_filters_may_wait() -> None:
    made = Recorded()
    made.warm_up((2,))
    plain = [(2, 4, False), (1, 4, False), (2, 1, False), (1, 1, False)]
    assert made.ran == [(2, 4, True), *plain]
    made.idle_step(2, 1, is_filtered=True)  # a request has asked for it
    made.ran.clear()
    assert made.capture_next()
    assert made.capture_next()
    assert not made.capture_next()
    assert made.ran == [(1, 1, True), (1, 4, True)]
