"""A step behind another is captured before its stream waits for a draft: a capture waits for the
stream, and nobody could end the wait for a draft that hangs.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from foredraft.trees.draft_tree import EMPTY
from foredraft.types import SamplingParams
from verify_service.executor.base import Ahead, Step
from verify_service.executor.captured.captures import Captures, Shortage
from verify_service.executor.captured.executor import GraphExecutor
from verify_service.executor.captured.graphs import DecodeGraphs
from verify_service.executor.captured.shapes import PaddedShapes
from verify_service.executor.choice.sampler import VerifyRows
from verify_service.scheduler.request import Sequence


class Noted(DecodeGraphs):
    """Notes what is done, and computes nothing."""

    def __init__(self, done: list[str]) -> None:
        buffers: Any = MagicMock()
        buffers.upload.side_effect = lambda count: done.append("upload")
        capturing: Any = MagicMock()
        graph = SimpleNamespace(replay=lambda: done.append("replay"))
        capturing.record.side_effect = lambda run: done.append("capture") or (graph, MagicMock())
        self.shapes, self.buffers, self._capturing = PaddedShapes(2, 4), buffers, capturing
        self.two_phase, self._listener = MagicMock(), None
        self._step, self.trees = MagicMock(), torch.empty(0)
        self.accepted = self.accepted_index = torch.empty(0)
        self.capture, self._steps = (), Captures(Shortage())


@pytest.mark.parametrize("shares_keys", [False, True])
@pytest.mark.parametrize("is_filtered", [False, True])
def test_graphs_are_captured_before_the_wait_for_a_draft(
    is_filtered: bool, shares_keys: bool
) -> None:
    done: list[str] = []
    executor = GraphExecutor.__new__(GraphExecutor)
    executor._graphs = Noted(done)
    filler: Any = MagicMock(shares_keys=shares_keys)
    filler.members = SimpleNamespace(is_two_phase=False, is_filtered=is_filtered)
    executor._filler, executor._vocab_size = filler, 128
    batch = [VerifyRows(Sequence(1, [5], SamplingParams()), EMPTY)]
    step = Step(batch, ahead=Ahead(4, [0], lambda trees: done.append("fetch")))
    executor.submit(step)
    assert done == ["upload", "capture", "upload", "fetch", "replay"]
    done.clear()
    executor.submit(step)
    assert done == ["upload", "fetch", "replay"]
