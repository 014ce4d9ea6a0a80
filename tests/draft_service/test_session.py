"""A verifier's session by itself: steps in their order, and nothing left open behind it."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from draft_service.drafters.base import Proposer
from draft_service.metrics import DrafterMetrics
from draft_service.session import Session
from foredraft.api.draft.v1 import draft_pb2
from foredraft.errors import InvalidRequest
from foredraft.telemetry.metrics import value

NAME = "SESSION-TEST"


class End:
    """An end of an arena."""

    def __init__(self) -> None:
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


class Echo(Proposer):
    """Answers every step with nothing."""

    def __init__(self, breaks: bool = False) -> None:
        self.steps: list[int] = []
        self.hidden, self.exchange = End(), End()  # type: ignore[assignment]
        self._breaks = breaks

    def step(self, request: draft_pb2.StepRequest) -> draft_pb2.StepResponse:
        self.steps.append(request.step)
        return draft_pb2.StepResponse()

    def close(self) -> None:
        if self._breaks:
            raise RuntimeError("cannot be closed")


@pytest.mark.parametrize("numbers", [[2], [0], [1, 1], [1, 2, 4], [1, 2, 1]])
def test_a_step_out_of_order_is_refused_and_not_run(numbers: list[int]) -> None:
    proposer, metrics = Echo(), DrafterMetrics(NAME)
    refused = value("foredraft_drafter_refused_steps_total", algorithm=NAME)

    async def run() -> None:
        with ThreadPoolExecutor(1) as worker:
            session = Session(proposer, worker, metrics)
            for number in numbers[:-1]:
                answer = await session.step(draft_pb2.StepRequest(step=number))
                assert answer is not None
                assert answer.step == number
            with pytest.raises(InvalidRequest) as raised:
                await session.step(draft_pb2.StepRequest(step=numbers[-1]))
            assert raised.value.field == "step"
            await session.close()

    asyncio.run(run())
    assert proposer.steps == numbers[:-1]
    assert value("foredraft_drafter_refused_steps_total", algorithm=NAME) == refused + 1


@pytest.mark.parametrize("breaks", [False, True])
def test_closing_ends_both_ends_of_the_arena_and_is_counted(breaks: bool) -> None:
    proposer, metrics = Echo(breaks), DrafterMetrics(NAME)
    before = value("foredraft_drafter_sessions", algorithm=NAME)

    async def run() -> None:
        with ThreadPoolExecutor(1) as worker:
            session = Session(proposer, worker, metrics)
            assert value("foredraft_drafter_sessions", algorithm=NAME) == before + 1
            if breaks:
                with pytest.raises(RuntimeError):
                    await session.close()
            else:
                await session.close()

    asyncio.run(run())
    assert value("foredraft_drafter_sessions", algorithm=NAME) == before
    assert [end.num_closed for end in (proposer.hidden, proposer.exchange)] == [1, 1]  # type: ignore[union-attr]
