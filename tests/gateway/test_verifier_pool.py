"""A pool of verifiers: one model for all, and what is known of each decides where requests go."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest

from foredraft.api.verify.v1 import verify_pb2, verify_pb2_grpc
from foredraft.errors import Overloaded, Unavailable
from gateway import verifier_connection
from gateway.routing import BLOCK_TOKENS
from gateway.verifier_pool import VerifierPool
from testing.bare_verifiers import eventually

PROMPT = list(range(BLOCK_TOKENS * 2))


class Verifier(verify_pb2_grpc.VerifyServiceServicer):
    """A verifier that reports a given model and load, records calls, and answers no request."""

    def __init__(
        self, vocab_size: int = 8, model: str = "m", checksum: str = "a", **load: int
    ) -> None:
        self.info = verify_pb2.GetModelInfoResponse(
            model=model, vocab_size=vocab_size, checksum=checksum
        )
        self.load = verify_pb2.Load(**load)  # type: ignore[arg-type]
        self.asked: list[verify_pb2.RunRequest] = []
        self.num_infos = 0
        self.num_flushes = 0
        self.is_run = False

    async def GetModelInfo(
        self, request: object, context: object
    ) -> verify_pb2.GetModelInfoResponse:
        self.num_infos += 1
        return self.info

    async def FlushCache(self, request: object, context: object) -> verify_pb2.FlushCacheResponse:
        self.num_flushes += 1
        return verify_pb2.FlushCacheResponse(pages=5)

    async def Run(
        self, requests: AsyncIterator[verify_pb2.RunRequest], context: object
    ) -> AsyncIterator[verify_pb2.RunResponse]:
        self.is_run = True
        yield verify_pb2.RunResponse(load=self.load)
        async for request in requests:
            self.asked.append(request)

    def cancelled(self) -> list[int]:
        return [request.cancel.id for request in self.asked if request.HasField("cancel")]


@asynccontextmanager
async def pool_of(*verifiers: Verifier) -> AsyncIterator[VerifierPool]:
    """Creates a pool whose connections are in the order of the verifiers."""
    async with AsyncExitStack() as stack:
        targets = []
        for verifier in verifiers:
            server = grpc.aio.server()
            verify_pb2_grpc.add_VerifyServiceServicer_to_server(verifier, server)
            targets.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            await server.start()
            stack.push_async_callback(server.stop, 0)
        pool = VerifierPool(targets)
        stack.push_async_callback(pool.close)
        yield pool


def run(test: Callable[[], Awaitable[Any]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(main())


def submit(**fields: Any) -> verify_pb2.SubmitRequest:
    return verify_pb2.SubmitRequest(prompt=PROMPT, **fields)


@pytest.mark.parametrize("other", [{"vocab_size": 9}, {"model": "n"}])
def test_a_verifier_of_another_model_gets_nothing(
    other: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        ours, theirs = Verifier(), Verifier(**other)
        async with pool_of(ours) as alone:
            await eventually(lambda: alone.num_usable == 1)
            info = alone.info
            assert info is not None
        async with pool_of(ours, theirs) as pool:
            pool.info = info  # whoever answers first says which model it is
            await eventually(lambda: pool.num_usable == 1 and theirs.num_infos > 1)
            assert [connection.usable for connection in pool._connections] == [True, False]

    run(main)
    assert "it serves another model" in caplog.text


def test_other_weights_under_the_same_name_get_nothing_beside_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They do once no verifier with the first weights is left: then the deployment has changed."""

    async def main() -> None:
        verifiers = Verifier(), Verifier(checksum="b"), Verifier(checksum="")
        async with pool_of(*verifiers) as pool:
            await eventually(lambda: all(each.num_infos > 1 or each.is_run for each in verifiers))
            await eventually(lambda: pool.num_usable == 2)
            first, second = pool._connections[:2]
            assert first.usable != second.usable
            old, new = (first, second) if first.usable else (second, first)
            for connection in (old, pool._connections[2]):
                await connection.close()
            await eventually(lambda: new.usable)

    run(main)
    assert "it serves another model: checksum" in caplog.text


def test_what_a_verifier_says_of_its_load_counts_beside_what_was_sent_there() -> None:
    async def main() -> None:
        async with pool_of(Verifier(running=2, waiting=1), Verifier(running=1)) as pool:
            one, two = pool._connections
            await eventually(lambda: (one.busy, two.busy) == (3, 1))
            assert await pool.pick(PROMPT, 1) is two
            tickets = [two.submit(submit(), 60) for _ in range(5)]
            assert two.busy == 5
            assert await pool.pick(PROMPT[:5], 1) is one
            for ticket in tickets:
                ticket.close()
            assert two.busy == 1

    run(main)


def test_a_cache_that_was_flushed_is_no_reason_to_go_there() -> None:
    async def main() -> None:
        verifiers = Verifier(), Verifier()
        async with pool_of(*verifiers) as pool:
            await eventually(lambda: pool.num_usable == 2)
            first = await pool.pick(PROMPT, 1)
            assert await pool.pick(PROMPT, 1) is first
            assert await pool.flush_cache() == 10
            assert [verifier.num_flushes for verifier in verifiers] == [1, 1]
            # Neither has it now, so that the load decides.
            ticket = first.submit(submit(), 60)
            assert await pool.pick(PROMPT, 1) is not first
            ticket.close()

    run(main)


def test_a_verifier_that_said_that_it_stops_is_left_alone_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verifier_connection, "AVOID_SECONDS", 1.0)

    async def main() -> None:
        async with pool_of(Verifier()) as pool:
            await eventually(lambda: pool.num_usable == 1)
            [only] = pool._connections
            only.avoid()
            assert pool.num_usable == 0
            with pytest.raises(Unavailable, match="no verifier is ready"):
                await pool.pick(PROMPT, 0)
            assert await pool.pick(PROMPT, 20) is only

    run(main)


def test_requests_have_numbers_of_their_own_and_end_at_the_verifier() -> None:
    async def main() -> None:
        verifier = Verifier()
        async with pool_of(verifier) as pool:
            await eventually(lambda: pool.num_usable == 1)
            [only] = pool._connections
            one, two = only.submit(submit(), 60), only.submit(submit(), 0)
            await eventually(lambda: len(verifier.asked) == 2)
            numbers = [request.submit.id for request in verifier.asked]
            assert len(set(numbers)) == 2
            assert all(numbers)
            assert verifier.asked[0].submit.timeout_seconds == 60
            assert 0 < verifier.asked[1].submit.timeout_seconds < 1  # 0 would be no deadline
            one.cancel()
            two.close()
            await eventually(lambda: verifier.cancelled() == numbers)
            one.push(verify_pb2.SequenceOutput(id=numbers[0], finish=verify_pb2.Finish()))
            one.close()  # it has ended: there is nothing to cancel
            only.submit(submit(), 60)
            await eventually(lambda: len(verifier.asked) == 5)
            assert verifier.cancelled() == numbers

    run(main)


def test_a_gateway_bounds_what_it_has_at_a_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_connection, "MAX_LIVE_REQUESTS", 3)

    async def main() -> None:
        async with pool_of(Verifier()) as pool:
            await eventually(lambda: pool.num_usable == 1)
            [only] = pool._connections
            tickets = [only.submit(submit(), 60) for _ in range(3)]
            with pytest.raises(Overloaded, match="3 requests run already"):
                only.submit(submit(), 60)
            tickets.pop().close()
            tickets.append(only.submit(submit(), 60))
            for ticket in tickets:
                ticket.close()

    run(main)
