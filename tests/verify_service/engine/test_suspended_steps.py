"""Tests that a suspended draft costs the host no extra call for any sequence, and no message."""

import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.trees.draft_tree import EMPTY
from foredraft.types import SamplingParams
from testing.scheduling import scheduler_of
from verify_service.controller.controller import Controller
from verify_service.controller.messages import DraftKind
from verify_service.drafts.drafts import Drafts
from verify_service.drafts.remote_draft import RemoteDraft
from verify_service.drafts.settings import DraftSettings
from verify_service.engine.engine import Engine, EngineLimits
from verify_service.engine.live_requests import EngineRequest
from verify_service.executor.base import (
    DeviceOutcome,
    Executor,
    FinishedStep,
    PendingStep,
    Step,
    StepResult,
)
from verify_service.executor.choice.sampler import Outcome
from verify_service.executor.choice.verification import Verified
from verify_service.metrics import SpeculationMetrics
from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.prefix_tree import PrefixTree

PAGE, WIDTH, NUM_PAGES = 64, 2, 200


class Plain(PendingStep):
    """Gives every sequence the token 5; its hidden states say which step it was."""

    num_rows, is_done = 1, True

    def __init__(self, size: int, number: int) -> None:
        self._size = size
        output: Any = SimpleNamespace(hidden=torch.full((size, WIDTH), float(number)))
        self.outcome = DeviceOutcome(size, torch.empty(0), torch.empty(0), output)

    def choose(self) -> None:
        pass

    def finish(self) -> StepResult:
        outcomes = [Outcome(Verified([0], [5])) for _ in range(self._size)]
        rows = range(self._size)
        trees = [EMPTY] * self._size
        return StepResult(outcomes, self.outcome.output, rows, self._size, 0.0, (), trees)


class Target(Executor):
    """Computes nothing."""

    def __init__(self) -> None:
        self._num_steps = 0

    def forget(self, sequence: Any) -> None:
        pass

    def close(self) -> None:
        pass

    def can_overlap(self, step: Step) -> bool:
        return not step.chunks

    def submit(self, step: Step) -> PendingStep:
        if self.can_overlap(step):
            self._num_steps += 1
            return Plain(len(step.batch), self._num_steps)
        chunks = step.chunks
        counts = [chunk.num_tokens for chunk in chunks]
        output: Any = SimpleNamespace(hidden=torch.zeros(sum(counts), WIDTH))
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        outcomes = [Outcome(Verified([0], [5])) for _ in chunks]
        scores: list[Any] = [[] for _ in chunks]
        result = StepResult(outcomes, output, firsts, len(chunks), 0.0, prompt_logprobs=scores)
        return FinishedStep(result)


class Client:
    """The connection to a draft on the same device; nothing may be sent."""

    epoch, late_epoch, step_timeout = 1, 0, 1.0
    info = draft_pb2.GetDraftInfoResponse(
        algorithm="EAGLE", uses_pages=True, weight_bytes=1, hidden=draft_pb2.HiddenNeeds()
    )


class Resting(Controller):
    """Believes that drafting does not pay."""

    stays_suspended = True


def engine(num_sequences: int, has_draft: bool) -> Engine:
    """Whose sequences have all begun."""
    pool = PagePool(NUM_PAGES, PAGE)
    metrics = SpeculationMetrics("EAGLE")
    drafts = Drafts()
    if has_draft:
        client: Any = Client()
        device = SimpleNamespace(trees=torch.zeros(1))
        exchange = SimpleNamespace(layers=(), fusion=None, writer=None, device=device)
        arena: Any = SimpleNamespace(exchange=lambda epoch: exchange)
        settings = DraftSettings(64, (3, 1), "request", 100)
        draft = RemoteDraft("", client, arena, pool, settings, metrics)
        draft.suspend(True)  # as before the requests came
        drafts = Drafts([draft])
    scheduler = scheduler_of(
        pool,
        PrefixTree(pool),
        max_running_requests=num_sequences,
        chunked_prefill_size=4096,
        usable_prefix=drafts.usable_prefix if has_draft else None,
    )
    limits = EngineLimits(64, 4096, NUM_PAGES, PAGE, num_sequences, frozenset(), 3)
    made = Engine(Target(), scheduler, drafts, Resting(None, [DraftKind(3, 3)]), limits, metrics)
    for i in range(num_sequences):
        sampling = SamplingParams(temperature=0.0, max_new_tokens=1000, ignore_eos=True)
        made.submit(EngineRequest(i, [i] * (PAGE + 1), sampling, lambda news, load: None))
    made._take_inbox()
    for _ in range(4):
        made._steps.run()
    return made


def num_calls(num_sequences: int, has_draft: bool) -> int:
    """Counts calls of Python and built-in functions in a step that follows another one."""
    made = engine(num_sequences, has_draft)
    counts = []
    for _ in range(20):
        count = 0

        def note(frame: FrameType, event: str, arg: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        assert made._steps.is_in_flight
        sys.setprofile(note)
        try:
            made._steps.run()
        finally:
            sys.setprofile(None)
        counts.append(count)
    assert made._steps.is_in_flight
    return min(counts)  # of steps in which nobody takes a page and nothing is published


@pytest.mark.parametrize("few", [2, 8])
def test_a_suspended_draft_costs_no_call_for_each_sequence(few: int) -> None:
    more = [num_calls(count, True) - num_calls(count, False) for count in (few, 32)]
    assert more[0] == more[1]
    assert more[0] < 40


def test_all_that_came_is_there_when_it_is_asked_for() -> None:
    made = engine(3, True)
    for _ in range(100):
        made._steps.run()
    hidden = made._drafts.each[0]._hidden  # type: ignore[attr-defined]
    assert hidden._runs == {}  # nobody has asked
    for sequence in made._scheduler.running:
        run = hidden.run_of(sequence)
        assert run is not None
        assert (run.first, run.end) == (0, sequence.num_computed)
        rows = run.rows(0)
        assert rows[: PAGE + 1].eq(0).all()  # the prompt
        assert rows[PAGE + 1 :, 0].tolist() == [*range(1, len(rows) - PAGE)]
