"""Which captured steps a start makes, and which an idle engine."""

from unittest.mock import MagicMock

from verify_service.executor.captured.graphs import DecodeGraphs
from verify_service.executor.captured.shapes import PaddedShapes
from verify_service.executor.captured.shared_keys import BlockSizes


class Recorded(DecodeGraphs):
    """Notes the steps that are run, and takes them for captured.

    Args:
        can_share: Whether steps can read shared keys once.
    """

    def __init__(self, can_share: bool = False) -> None:
        self.shapes = PaddedShapes(2, 4)
        self.buffers = self.two_phase = MagicMock()
        self._step = MagicMock()
        self._step.block_sizes = lambda batch, rows: BlockSizes(2, can_share * (batch // 2), 1)
        self._steps, self.ran = {}, []  # type: ignore[assignment]

    def idle_step(
        self, batch: int, rows: int, is_filtered: bool = False, shares_keys: bool = False
    ) -> None:
        self.ran.append((batch, rows, is_filtered) + (shares_keys,) * shares_keys)
        kind = self._kind(batch, rows, self.capture, is_filtered, shares_keys)
        self._steps[kind] = None  # type: ignore[assignment]


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


def test_steps_of_shared_keys_wait_behind_them() -> None:
    made = Recorded(can_share=True)
    made.warm_up(())
    made.idle_step(2, 4, shares_keys=True)  # sequences shared keys
    made.ran.clear()
    while made.capture_next():
        pass
    filtered = [(1, 1, True), (2, 1, True), (1, 4, True)]
    both = [(2, 1, True, True), (2, 4, True, True)]
    assert made.ran == [*filtered, (2, 1, False, True), *both]
