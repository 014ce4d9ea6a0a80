"""What waits for the device comes before the stream waits for a draft, and behind a step that waits
for one only when that has ended: else nobody could end the wait for a draft that hangs.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from foredraft.models.decoder import ModelOutput
from foredraft.trees.draft_tree import EMPTY
from foredraft.types import SamplingParams
from verify_service.controller.messages import Plan
from verify_service.drafts.proposals import DeviceProposals
from verify_service.engine.overlap import OverlapScheduler, StepInFlight
from verify_service.executor.base import Ahead, FinishedStep, Step
from verify_service.executor.captured.executor import GraphExecutor
from verify_service.executor.captured.graph_store import GraphStore, Shortage
from verify_service.executor.captured.graphs import DecodeGraphs
from verify_service.executor.captured.mixed import MixedGraphs, MixedKind
from verify_service.executor.captured.shapes import PaddedShapes
from verify_service.executor.captured.two_phase_graphs import TwoPhaseGraphs
from verify_service.executor.choice.sampler import VerifyRows
from verify_service.scheduler.request import Sequence
from verify_service.scheduler.step_plan import PrefillChunk


class Noted(DecodeGraphs):
    """Notes what is done, and computes nothing."""

    def __init__(self, done: list[str]) -> None:
        buffers: Any = MagicMock()
        buffers.upload.side_effect = lambda count: done.append("upload")
        capturer: Any = MagicMock()
        graph = SimpleNamespace(replay=lambda: done.append("replay"))
        capturer.run_and_capture.side_effect = lambda run: (
            done.append("capture") or (graph, MagicMock())
        )
        self.shapes, self.buffers, self._capturer = PaddedShapes(2, 4), buffers, capturer
        self.two_phase, self._listener = MagicMock(), None
        self._step, self.trees = MagicMock(), torch.empty(0)
        self.accepted = self.accepted_index = torch.empty(0)
        self.layers, self._steps = (), GraphStore(Shortage())


class NotedPrompts(MixedGraphs):
    """Notes what is done, and computes nothing.

    Args:
        done: What is done.
        takes: Whether it takes forwards.
    """

    def __init__(self, done: list[str], takes: bool) -> None:
        model: Any = MagicMock()
        self._model, self._done, self._takes = model, done, takes
        self._listener, self._uploaded, self.sizes = None, MagicMock(), [32]
        self._hidden, self._graphs = torch.zeros(32, 8), GraphStore(Shortage())

    def takes(self, rows: Any) -> bool:
        return self._takes

    def _upload(self, kind: MixedKind, rows: Any) -> torch.Tensor:
        self._done.append("upload")
        return torch.zeros(0, dtype=torch.int64)

    def _capture(self, kind: MixedKind) -> Any:
        self._done.append("capture")
        return SimpleNamespace(replay=lambda: self._done.append("replay"))


def executor_of(done: list[str], members: SimpleNamespace, takes: bool = True) -> GraphExecutor:
    """Returns an executor that notes what it does.

    Args:
        done: What it does.
        members: Sequences of its steps, see `RecordFiller`.
        takes: Whether there are graphs of forwards with prompts.
    """
    executor = GraphExecutor.__new__(GraphExecutor)
    runner: Any = MagicMock()
    runner.forward.side_effect = lambda *args, **options: done.append("forward") or MagicMock()
    executor._runner, executor._sampler, executor._dynamic_from = runner, MagicMock(), None
    executor._graphs, executor._mixed = Noted(done), NotedPrompts(done, takes)
    filler: Any = MagicMock(shares_keys=members.shares_keys)
    filler.members = members
    executor._filler, executor._vocab_size, executor._tables = filler, 128, MagicMock()
    return executor


@pytest.mark.parametrize("shares_keys", [False, True])
@pytest.mark.parametrize("is_filtered", [False, True])
def test_graphs_are_captured_before_the_wait_for_a_draft(
    is_filtered: bool, shares_keys: bool
) -> None:
    done: list[str] = []
    members = SimpleNamespace(is_two_phase=False, is_filtered=is_filtered, shares_keys=shares_keys)
    executor = executor_of(done, members)
    batch = [VerifyRows(Sequence(1, [5], SamplingParams()), EMPTY)]
    ahead = Ahead(4, [0], lambda trees: done.append("fetch"))
    step = Step(batch, ahead=ahead, settle=lambda: done.append("settle"))
    executor.submit(step)
    assert done == ["settle", "upload", "capture", "upload", "fetch", "replay"]
    done.clear()
    executor.submit(step)
    assert done == ["upload", "fetch", "replay"]


def test_graphs_of_two_phases_are_captured_before_the_wait_for_a_draft() -> None:
    done: list[str] = []
    members = SimpleNamespace(is_two_phase=True, is_filtered=False, shares_keys=False)
    executor = executor_of(done, members)
    graphs, capturer = executor._graphs, MagicMock()
    capturer.run_aside.side_effect = lambda run: done.append("capture")
    graph = SimpleNamespace(replay=lambda: done.append("replay"))
    output = ModelOutput(torch.zeros(1, 8), torch.zeros(1, 8))
    capturer.capture.side_effect = lambda run: (graph, SimpleNamespace(output=output))
    step_of: Any = MagicMock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", MagicMock)
        graphs.two_phase = TwoPhaseGraphs(step_of, graphs.buffers, capturer, Shortage())
    graphs.buffers.turn = 0
    batch = [VerifyRows(Sequence(1, [5], SamplingParams(logprobs=1)), EMPTY)]
    ahead = Ahead(4, [0], lambda trees: done.append("fetch"))
    step = Step(batch, ahead=ahead, settle=lambda: done.append("settle"))
    executor.submit(step)
    captured = ["settle", "upload", "capture", "upload"]
    assert done == [*captured, "upload", "fetch", "replay", "replay"]
    done.clear()
    executor.submit(step)
    assert done == ["upload", "fetch", "replay", "replay"]


@pytest.mark.parametrize("is_two_phase", [False, True])
def test_a_step_without_a_graph_has_its_trees_before_it_is_computed(
    is_two_phase: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    members = SimpleNamespace(is_two_phase=is_two_phase, is_filtered=False, shares_keys=False)
    executor = executor_of(done, members)
    graphs, capturer, step_of = executor._graphs, MagicMock(), MagicMock()
    capturer.run_and_capture.side_effect = torch.OutOfMemoryError("CUDA out of memory")
    capturer.run_aside.side_effect = torch.OutOfMemoryError("CUDA out of memory")
    shortage = Shortage()
    shortage.is_tolerated = True
    monkeypatch.setattr(torch.cuda, "Event", MagicMock)
    graphs._step, graphs._capturer = step_of, capturer
    graphs._steps = GraphStore(shortage)
    graphs.two_phase = TwoPhaseGraphs(step_of, graphs.buffers, capturer, shortage)
    graphs.buffers.turn = 0
    step_of.forward.side_effect = lambda kind: (
        done.append("compute")
        or MagicMock(output=ModelOutput(torch.zeros(1, 8), torch.zeros(1, 8)))
    )
    batch = [VerifyRows(Sequence(1, [5], SamplingParams()), EMPTY)]
    ahead = Ahead(4, [0], lambda trees: done.append("fetch"), lambda is_over: done.append("trees"))
    for _ in range(2):
        done.clear()
        executor.submit(Step(batch, ahead=ahead, settle=lambda: done.append("settle")))
        assert [one for one in done if one != "upload"] == ["settle", "fetch", "trees", "compute"]


@pytest.mark.parametrize("takes", [False, True])
def test_prompts_wait_for_the_device_when_nothing_else_does(takes: bool) -> None:
    """Without a graph they are copied from memory that the device must have read."""
    done: list[str] = []
    executor = executor_of(done, SimpleNamespace(shares_keys=False), takes)
    chunk = PrefillChunk(Sequence(1, [5, 6, 7, 8], SamplingParams()), 0, 2)
    step = Step((), [chunk], settle=lambda: done.append("settle"))
    executor.submit(step)
    assert done == (["settle", "upload", "capture", "replay"] if takes else ["settle", "forward"])
    done.clear()
    executor.submit(step)
    assert done == (["upload", "replay"] if takes else ["settle", "forward"])


class HungTrees:
    """Trees that never come; the wait for them ends when they are abandoned."""

    is_abandoned = False

    def fetch(self, trees: torch.Tensor) -> None:
        pass

    def is_late(self, waiting: float) -> bool:
        return True

    def abandon(self) -> None:
        self.is_abandoned = True


def hung_step(trees: HungTrees) -> StepInFlight:
    """Returns a step that waits for such trees."""

    class Started(FinishedStep):
        num_rows, is_done = 4, property(lambda self: trees.is_abandoned)  # type: ignore[assignment]
        outcome = MagicMock()

    proposals = DeviceProposals(trees, 0, 3)  # type: ignore[arg-type]
    sequence = Sequence(1, [5], SamplingParams())
    return StepInFlight([sequence], Started(MagicMock()), [0], proposals)


@pytest.mark.parametrize("has_prompts", [False, True])
def test_a_hung_draft_is_dropped_before_anything_waits_behind_its_step(has_prompts: bool) -> None:
    trees, executor = HungTrees(), MagicMock()
    running = hung_step(trees)
    drafts: Any = MagicMock(are_stale=False, capture=None)
    scheduler: Any = MagicMock()
    scheduler.going_on.return_value = running.sequences
    scheduler.schedule_ahead.return_value = None

    def submit(step: Step) -> Any:
        step.settle()
        assert trees.is_abandoned
        return MagicMock(num_rows=1)

    executor.submit.side_effect = submit
    overlap = OverlapScheduler(executor, scheduler, drafts)
    if has_prompts:
        overlap.compute_behind(running, [MagicMock()])
    else:
        assert overlap.start_behind(running, lambda going: Plan([0], 1)) is not None
    executor.submit.assert_called_once()


def test_a_hung_draft_is_dropped_before_anything_waits_behind_its_own_trees() -> None:
    trees, executor = HungTrees(), MagicMock()
    running = StepInFlight([Sequence(1, [5], SamplingParams())], FinishedStep(MagicMock()), [0])
    running.started.num_rows, running.started.outcome = 1, MagicMock()
    drafts: Any = MagicMock(are_stale=False, capture=None)
    drafts.follow.return_value = DeviceProposals(trees, 0, 3)  # type: ignore[arg-type]
    scheduler: Any = MagicMock()
    scheduler.going_on.return_value = running.sequences
    scheduler.schedule_ahead.return_value = None

    def submit(step: Step) -> Any:
        assert step.ahead is not None
        step.ahead.await_trees(lambda: trees.is_abandoned)
        return MagicMock(num_rows=4)

    executor.submit.side_effect = submit
    overlap = OverlapScheduler(executor, scheduler, drafts)
    assert overlap.start_behind(running, lambda going: Plan([3], 4)) is not None
    assert trees.is_abandoned
