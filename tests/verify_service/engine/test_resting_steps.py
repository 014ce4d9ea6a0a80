"""What a step costs the host beside a draft that rests: no call more for each sequence than without one, and no message."""

import sys
from collections.abc import Callable, Sequence
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.trees.draft_tree import EMPTY, DraftTree
from foredraft.types import SamplingParams
from verify_service.controller.controller import Controller, DraftKind
from verify_service.drafts.drafting import Drafting
from verify_service.drafts.hidden_states import HiddenStates
from verify_service.drafts.page_marks import DraftMarks
from verify_service.engine.engine import Engine, EngineLimits
from verify_service.engine.live_requests import EngineRequest
from verify_service.executor.sampler import Outcome, VerifyRows
from verify_service.executor.target_step import (
    AheadRows,
    DeviceOutcome,
    StartedStep,
    StepResult,
    TargetStep,
)
from verify_service.executor.verification import Verified
from verify_service.metrics import SpeculationMetrics
from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.prefix_tree import PrefixTree
from verify_service.scheduler.scheduler import Scheduler
from verify_service.scheduler.step_plan import PrefillChunk

PAGE, WIDTH, NUM_PAGES = 64, 2, 200


class Step(StartedStep):
    """Gives every sequence the token 5; its hidden states say which step it was."""

    num_rows, is_done = 1, True

    def __init__(self, size: int, number: int) -> None:
        self._size = size
        output: Any = SimpleNamespace(hidden=torch.full((size, WIDTH), float(number)))
        self.outcome = DeviceOutcome(size, torch.empty(0), torch.empty(0), output)

    def choose(self) -> None:
        pass

    def finish(self) -> tuple[StepResult, list[DraftTree]]:
        outcomes = [Outcome(Verified([0], [5])) for _ in range(self._size)]
        rows = range(self._size)
        result = StepResult(outcomes, self.outcome.output, rows, self._size, 0.0)
        return result, [EMPTY] * self._size


class Target(TargetStep):
    """Computes nothing."""

    def __init__(self) -> None:
        self._num_steps = 0

    def forget(self, sequence: Any) -> None:
        pass

    def can_start(self, batch: Sequence[VerifyRows]) -> bool:
        return True

    def start(self, batch: Sequence[Any], capture: Sequence[int]) -> StartedStep:
        self._num_steps += 1
        return Step(len(batch), self._num_steps)

    def start_ahead(
        self,
        batch: Sequence[AheadRows],
        capture: Sequence[int],
        num_rows: int,
        fetch: Callable[[torch.Tensor], None] | None,
    ) -> StartedStep:
        return self.start(batch, capture)

    def run(
        self, batch: Sequence[VerifyRows], chunks: Sequence[PrefillChunk], capture: Sequence[int]
    ) -> StepResult:
        counts = [chunk.num_tokens for chunk in chunks]
        output: Any = SimpleNamespace(hidden=torch.zeros(sum(counts), WIDTH))
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        outcomes = [Outcome(Verified([0], [5])) for _ in chunks]
        return StepResult(outcomes, output, firsts, len(chunks), 0.0)


class Client:
    """The connection to a draft on the same device; nothing may be sent."""

    epoch, step_timeout = 1, 1.0
    info = draft_pb2.GetDraftInfoResponse(algorithm="EAGLE", uses_pages=True, weight_bytes=1)


class Resting(Controller):
    """Believes that drafting does not pay."""

    rests_on = True


def engine(num_sequences: int, has_draft: bool) -> Engine:
    """Whose sequences have all begun."""
    pool = PagePool(NUM_PAGES, PAGE)
    metrics = SpeculationMetrics("EAGLE")
    drafting = None
    if has_draft:
        marks, client = DraftMarks(pool), Client()
        device = SimpleNamespace(trees=torch.zeros(1))
        exchange = SimpleNamespace(layers=(), writer=None, device=device)
        arena: Any = SimpleNamespace(exchange=lambda epoch: exchange)
        hidden = HiddenStates(arena, marks, PAGE, 100)
        drafting = Drafting(client, marks, PAGE, 64, (3, 1), "request", 100, metrics, hidden)  # type: ignore[arg-type]
        drafting.is_resting = True  # as before the requests came
    scheduler = Scheduler(
        pool,
        PrefixTree(pool),
        max_running_requests=num_sequences,
        chunked_prefill_size=4096,
        usable_prefix=None if drafting is None else drafting.usable_prefix,
    )
    limits = EngineLimits(64, 4096, NUM_PAGES, PAGE, num_sequences, frozenset(), 3)
    made = Engine(Target(), scheduler, drafting, Resting(None, [DraftKind(3, 3)]), limits, metrics)
    for i in range(num_sequences):
        sampling = SamplingParams(temperature=0.0, max_new_tokens=1000, ignore_eos=True)
        made.submit(EngineRequest(i, [i] * (PAGE + 1), sampling, lambda news, load: None))
    made._take_inbox()
    for _ in range(4):
        made.step()
    return made


def num_calls(num_sequences: int, has_draft: bool) -> int:
    """Of Python functions and of built-in ones in a step that follows another one."""
    made = engine(num_sequences, has_draft)
    counts = []
    for _ in range(20):
        count = 0

        def note(frame: FrameType, event: str, arg: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        assert made._flight is not None
        sys.setprofile(note)
        try:
            made.step()
        finally:
            sys.setprofile(None)
        counts.append(count)
    assert made._flight is not None
    return min(counts)  # of steps in which nobody takes a page and nothing is published


@pytest.mark.parametrize("few", [2, 8])
def test_a_draft_that_rests_costs_no_call_for_each_sequence(few: int) -> None:
    more = [num_calls(count, True) - num_calls(count, False) for count in (few, 32)]
    assert more[0] == more[1]
    assert more[0] < 40


def test_all_that_came_is_there_when_it_is_asked_for() -> None:
    made = engine(3, True)
    for _ in range(100):
        made.step()
    hidden = made._drafting._hidden  # type: ignore[union-attr]
    assert hidden._runs == {}  # nobody has asked
    for sequence in made._scheduler.running:
        run = hidden.run(sequence)
        assert run is not None
        assert (run.first, run.end) == (0, sequence.num_computed)
        rows = run.rows(0)
        assert rows[: PAGE + 1].eq(0).all()  # the prompt
        assert rows[PAGE + 1 :, 0].tolist() == [*range(1, len(rows) - PAGE)]
