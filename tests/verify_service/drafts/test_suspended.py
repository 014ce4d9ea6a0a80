"""While drafting is suspended nothing is sent, not even which slots were given back; what is sent
next says that.
"""

from typing import Any

from foredraft.api.draft.v1 import draft_pb2
from foredraft.types import SamplingParams
from verify_service.drafts.proposals import DraftRequest
from verify_service.drafts.remote_draft import RemoteDraft
from verify_service.drafts.settings import DraftSettings
from verify_service.metrics import SpeculationMetrics
from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.request import Sequence, Status


class Client:
    """The connection to a draft model that reads tokens; notes what is sent."""

    epoch, late_epoch, step_timeout = 1, 0, 1.0
    info = draft_pb2.GetDraftInfoResponse(algorithm="STANDALONE", uses_pages=True, weight_bytes=1)

    def __init__(self) -> None:
        self.sent: list[draft_pb2.StepRequest] = []

    def send(self, request: draft_pb2.StepRequest, epoch: int, has_answer: bool = True) -> None:
        self.sent.append(request)

    def receive(self) -> draft_pb2.StepResponse:
        return draft_pb2.StepResponse(step=self.sent[-1].step)


class NoArena:
    def exchange(self, epoch: int) -> None:
        return None


def running(number: int, slot: int, page: int) -> Sequence:
    sequence = Sequence(number, [5, 6, 7], SamplingParams())
    sequence.status, sequence.slot = Status.RUNNING, slot
    sequence.num_computed, sequence.pages = 2, [page]
    return sequence


def test_slots_given_back_are_told_with_the_next_news() -> None:
    client: Any = Client()
    arena: Any = NoArena()
    settings = DraftSettings(128, (3, 1), "request", 100)
    metrics = SpeculationMetrics("STANDALONE")
    draft = RemoteDraft("", client, arena, PagePool(16, 4), settings, metrics)
    draft.refresh()
    first, second = running(1, 0, 0), running(2, 1, 1)
    draft.ask([DraftRequest(first, 3), DraftRequest(second, 3)], [])
    assert [one.slot for one in client.sent[-1].sequences] == [0, 1]
    draft.suspend(True)
    for _ in range(3):
        draft.release([0])
        draft.forget(first)
        draft.ask([DraftRequest(second, 0)], [])
        first = running(
            first.request_id + 2, 0, 2
        )  # takes the slot, and the draft never hears of it
    assert len(client.sent) == 1
    draft.ask([DraftRequest(first, 3), DraftRequest(second, 0)], [])
    [told] = client.sent[1:]
    assert list(told.released_slots) == [0]
    assert told.sequences[0].slot == 0
    assert told.sequences[0].HasField("begin")
    draft.ask([DraftRequest(first, 3)], [])
    assert not client.sent[-1].released_slots
