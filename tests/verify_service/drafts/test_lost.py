"""A draft that is lost while an answer is open has failed once, whoever notices it."""

from typing import Any

import pytest

from foredraft.api.draft.v1 import draft_pb2
from foredraft.errors import DraftError
from foredraft.telemetry.metrics import value
from foredraft.types import SamplingParams
from verify_service.drafts.proposals import DraftRequest
from verify_service.drafts.remote_draft import RemoteDraft
from verify_service.drafts.settings import DraftSettings
from verify_service.metrics import SpeculationMetrics
from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.request import Sequence, Status

NAME = "STANDALONE"


class Client:
    """The connection to a draft that can be lost."""

    step_timeout = 1.0
    info = draft_pb2.GetDraftInfoResponse(algorithm=NAME, uses_pages=True, weight_bytes=1)

    def __init__(self) -> None:
        self.epoch, self.is_lost = 1, False
        self.late_epoch = 0

    def send(self, request: draft_pb2.StepRequest, epoch: int, has_answer: bool = True) -> None:
        if self.is_lost:
            raise DraftError("no draft is attached")

    def has_answer(self, patience: float = 0.0) -> bool:
        return self.is_lost

    def receive(self) -> draft_pb2.StepResponse:
        raise DraftError("no answer within 1 s")


class NoArena:
    def exchange(self, epoch: int) -> None:
        return None


@pytest.fixture
def sequence() -> Sequence:
    sequence = Sequence(1, [5, 6, 7], SamplingParams())
    sequence.status, sequence.slot = Status.RUNNING, 0
    sequence.num_computed, sequence.pages = 2, [0]
    return sequence


def asked(client: Any, sequence: Sequence, is_trial: bool) -> RemoteDraft:
    """Returns a draft that was asked for a tree, and has not answered."""
    arena: Any = NoArena()
    settings = DraftSettings(128, (3, 1), "request", 100)
    draft = RemoteDraft("", client, arena, PagePool(16, 4), settings, SpeculationMetrics(NAME))
    draft.refresh()
    draft.ask([DraftRequest(sequence, 3, is_trial)], [])
    return draft


def failures() -> float:
    return value("foredraft_draft_failures_total", algorithm=NAME)


def test_a_draft_that_is_lost_during_a_trial_has_failed_once(
    sequence: Sequence, caplog: pytest.LogCaptureFixture
) -> None:
    client, before = Client(), failures()
    draft = asked(client, sequence, is_trial=True)
    assert draft.take_trials() is None
    client.is_lost = True
    assert draft.take_trials() == []
    draft.ask([DraftRequest(sequence, 0)], [])  # the rest of the same step
    draft.ask([DraftRequest(sequence, 3)], [])
    assert not draft.collect()
    assert failures() == before + 1
    assert len(caplog.records) == 1


def test_a_loss_that_another_thread_notices_first_counts_too(sequence: Sequence) -> None:
    client, before = Client(), failures()
    draft = asked(client, sequence, is_trial=True)
    for epoch in (0, 2):
        client.epoch = epoch
        draft.refresh()
        assert failures() == before + 1
    client.is_lost = True  # the next attach fails too
    draft.ask([DraftRequest(sequence, 3)], [])
    assert failures() == before + 2


def test_an_answer_that_is_late_between_steps_counts(sequence: Sequence) -> None:
    client, before = Client(), failures()
    draft = asked(client, sequence, is_trial=False)
    client.epoch, client.late_epoch = 0, 1
    for _ in range(2):
        draft.refresh()
        assert failures() == before + 1
    client.epoch = 2
    draft.refresh()
    client.epoch = 0  # that one left in time
    draft.refresh()
    assert failures() == before + 1


def test_a_draft_that_leaves_between_steps_has_not_failed(sequence: Sequence) -> None:
    """What it was asked ahead may have been answered, though nobody has read it."""
    client, before = Client(), failures()
    draft = asked(client, sequence, is_trial=False)
    client.epoch = 0
    draft.refresh()
    assert failures() == before
