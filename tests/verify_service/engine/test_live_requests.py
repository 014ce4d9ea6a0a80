"""The account of a request as its submitter gets it, and what is counted of requests that end."""

import pytest

from foredraft.errors import Unavailable
from foredraft.telemetry.metrics import value
from foredraft.types import FinishReason, SamplingParams
from verify_service.engine.live_requests import EngineRequest, Live, LiveRequests
from verify_service.outputs import Finish, Load, StepOutput
from verify_service.scheduler.request import Sequence

LOAD = Load(waiting=0, running=0, free_pages=1, total_pages=1, draft_available=False)
OUTCOME = "foredraft_verifier_requests_total"


class Inbox:
    """Requests' outputs, as the last `emit` handed them out."""

    def __init__(self) -> None:
        self.live = LiveRequests()
        self.news: list[StepOutput] = []

    def add(self, number: int, is_probe: bool = False) -> tuple[Sequence, Live]:
        request = EngineRequest(
            10 + number, [5, 6, 7], SamplingParams(), self._take, is_probe=is_probe
        )
        live = Live(request, submitted=0.0, queue_seconds=1.5)
        self.live.add(number, live)
        return Sequence(number, request.prompt, request.sampling), live

    def emitted(self) -> list[StepOutput]:
        self.news = []
        self.live.emit(LOAD)
        return self.news

    def _take(self, outputs: list[StepOutput], load: Load) -> None:
        self.news += outputs


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


def test_the_account_of_a_request(inbox: Inbox) -> None:
    sequence, live = inbox.add(1)
    sequence.append_tokens([8, 9])
    sequence.num_cached, sequence.num_preemptions = 2, 4
    for num_drafted, num_accepted in ((5, 0), (5, 3), (5, 1), (0, 0), (5, 3)):
        sequence.count_step(num_drafted, num_accepted)
        live.count(num_accepted, is_lossy=num_accepted == 1)
    inbox.live.finish(sequence, FinishReason.LENGTH)
    [output] = inbox.emitted()
    assert output.tag == 11
    assert output.finish == Finish(
        reason=FinishReason.LENGTH,
        prompt_tokens=3,
        completion_tokens=2,
        cached_tokens=2,
        verify_steps=5,
        drafted_tokens=20,
        accepted_tokens=7,
        preemptions=4,
        queue_seconds=1.5,
        lossy=True,
        accepted_histogram=(2, 1, 0, 2),
    )


def test_a_request_that_never_ran_has_no_histogram(inbox: Inbox) -> None:
    sequence, _ = inbox.add(1)
    inbox.live.finish(sequence, FinishReason.CANCELLED)
    [output] = inbox.emitted()
    assert output.finish is not None
    assert output.finish.accepted_histogram == ()


def test_the_last_tokens_come_with_the_end(inbox: Inbox) -> None:
    sequence, live = inbox.add(1)
    inbox.live.queue(live, StepOutput(11, [8], [False]))
    inbox.live.finish(sequence, FinishReason.STOP, output=StepOutput(11, [9], [True]))
    first, last = inbox.emitted()
    assert (first.tokens, first.finish) == ([8], None)
    assert (last.tokens, last.drafted) == ([9], [True])
    assert last.finish is not None
    assert last.finish.reason is FinishReason.STOP
    assert not inbox.live.has_news
    assert inbox.emitted() == []


def test_probes_end_uncounted(inbox: Inbox) -> None:
    before = value(OUTCOME, outcome="length")
    own, _ = inbox.add(1, is_probe=True)
    clients, _ = inbox.add(2)
    assert inbox.live.probes == {1}
    inbox.live.finish(own, FinishReason.LENGTH)
    assert value(OUTCOME, outcome="length") == before
    assert inbox.live.probes == set()
    inbox.live.finish(clients, FinishReason.LENGTH)
    assert value(OUTCOME, outcome="length") == before + 1
    assert inbox.live.by_number == {}


def test_an_end_of_all_is_told_to_each(inbox: Inbox) -> None:
    for number in (1, 2):
        inbox.add(number, is_probe=number == 2)
    error = Unavailable("stopped")
    inbox.live.end_all(error)
    assert [(news.tag, news.finish) for news in inbox.emitted()] == [
        (11, Finish(FinishReason.ERROR, error=error)),
        (12, Finish(FinishReason.ERROR, error=error)),
    ]
    assert not inbox.live.by_number
    assert not inbox.live.probes
