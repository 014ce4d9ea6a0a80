"""The choice of a verifier: by prefix, by load, bounded; and a pool that follows health and the
loss of caches.
"""

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from foredraft.api.verify.v1 import verify_pb2, verify_pb2_grpc
from foredraft.telemetry import metrics
from gateway import routing, verifier_connection
from gateway.routing import BLOCK_TOKENS, Reason, Route, Router
from gateway.verifier_pool import VerifierPool
from testing.bare_verifiers import Verifier, eventually

IDLE = {1: 0, 2: 0}


def prompt(seed: int, blocks: int = 3) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000) for _ in range(blocks * BLOCK_TOKENS)]


def test_a_conversation_stays_and_others_spread() -> None:
    router = Router()
    homes = [router.choose(prompt(seed), IDLE).holder for seed in range(10)]
    assert homes.count(1) == homes.count(2) == 5
    for turn in range(1, 4):
        for seed, home in enumerate(homes):
            longer = prompt(seed) + prompt(100 * turn + seed, turn)
            assert router.choose(longer, IDLE) == Route(home, Reason.PREFIX)


def test_what_is_short_goes_by_load_alone() -> None:
    router = Router()
    short = prompt(0)[: BLOCK_TOKENS - 1]
    assert router.choose(short, {1: 3, 2: 2}) == Route(2, Reason.LOAD)
    assert router.choose(short, {1: 1, 2: 2}) == Route(1, Reason.LOAD)
    assert len(router) == 0


def test_a_much_busier_holder_is_left_and_the_other_learns() -> None:
    router = Router()
    home = router.choose(prompt(0), {1: 0, 2: 1}).holder
    assert home == 1
    assert router.choose(prompt(0), {1: 4, 2: 0}) == Route(1, Reason.PREFIX)
    assert router.choose(prompt(0), {1: 5, 2: 0}) == Route(2, Reason.BUSY)
    # Both have it now: the load decides.
    assert router.choose(prompt(0), {1: 1, 2: 0}) == Route(2, Reason.PREFIX)
    assert router.choose(prompt(0), {1: 0, 2: 1}) == Route(1, Reason.PREFIX)
    # The margin grows with the load.
    longer = prompt(0) + prompt(1)
    router.choose(longer, {1: 0})
    assert router.choose(longer, {1: 34, 2: 20}).holder == 1
    assert router.choose(longer, {1: 35, 2: 20}) == Route(2, Reason.BUSY)


def test_one_that_is_gone_or_came_back_empty_is_not_chosen_for_its_past() -> None:
    router = Router()
    assert router.choose(prompt(0), {1: 0, 2: 1}).holder == 1
    assert router.choose(prompt(0), {2: 1}) == Route(2, Reason.LOAD)
    # 1 is back as 3: 2 has the prompt by now.
    assert router.choose(prompt(0), {2: 1, 3: 0}) == Route(2, Reason.PREFIX)
    assert set(router._used) == {2, 3}


def test_a_block_counts_only_behind_the_same_beginning() -> None:
    router = Router()
    router.choose(prompt(0) + prompt(1), {1: 0})
    # The second half alone, and the first half behind another beginning.
    for other in (prompt(1), prompt(2) + prompt(0)):
        assert router.choose(other, {1: 1, 2: 0}) == Route(2, Reason.LOAD)
    # What stands behind the last whole block decides nothing.
    assert router.choose([*prompt(0), 5], {1: 1, 2: 0}) == Route(1, Reason.PREFIX)


def test_a_block_that_all_have_is_remembered_of_the_newest() -> None:
    router = Router()
    for life in range(1, routing.MAX_HOLDERS + 3):
        assert router.choose(prompt(0), {life: 0}).holder == life
    newest = routing.MAX_HOLDERS + 2
    assert router.choose(prompt(0), {1: 0, newest: 3}) == Route(newest, Reason.PREFIX)
    known = dict.fromkeys(range(3, newest + 1), 3)
    assert router.choose(prompt(0), {1: 0, 2: 0, **known}).reason is Reason.PREFIX
    router = Router()
    for life in range(1, newest + 1):
        router.choose(prompt(0), {life: 0})
    assert router.choose(prompt(0), {1: 0, 2: 0}).reason is Reason.LOAD


def test_memory_is_bounded_and_the_oldest_goes() -> None:
    router = Router(max_blocks=1000)
    kept = prompt(-1, 5)
    router.choose(kept, {1: 0, 2: 1})
    for seed in range(1000):
        router.choose(prompt(seed), IDLE)
        assert router.choose(kept, {1: 2, 2: 0}).reason is Reason.PREFIX
        assert len(router) <= 1000
    assert router.choose(prompt(0), IDLE).reason is Reason.LOAD
    assert router.choose(prompt(999), IDLE).reason is Reason.PREFIX
    # One prompt larger than everything: its beginning stays known.
    huge = prompt(5000, 1500)
    router.choose(huge, {1: 1, 2: 0})
    assert len(router) == 1000
    assert router.choose(huge[: 900 * BLOCK_TOKENS], {1: 0, 2: 1}) == Route(2, Reason.PREFIX)
    entry = sys.getsizeof(router._holders) / 1000 + sys.getsizeof(1 << 60)
    entry += sys.getsizeof((1,) * routing.MAX_HOLDERS)
    assert entry * routing.MAX_BLOCKS < 32 * 2**20


@asynccontextmanager
async def verifier() -> AsyncIterator[tuple[health.aio.HealthServicer, str]]:
    """Starts a verifier with the health service, like the real one."""
    server, servicer = grpc.aio.server(), health.aio.HealthServicer()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(Verifier(), server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await say(servicer, True)
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def say(servicer: health.aio.HealthServicer, serving: bool) -> None:
    status = health_pb2.HealthCheckResponse
    await servicer.set(
        verifier_connection.SERVICE_NAME, status.SERVING if serving else status.NOT_SERVING
    )


def test_a_verifier_that_says_not_serving_gets_nothing_new() -> None:
    async def main() -> None:
        async with verifier() as (one, here), verifier() as (_, there):
            pool = VerifierPool([here, there])
            try:
                await eventually(lambda: pool.num_usable == 2)
                assert metrics.value("foredraft_gateway_verifiers") == 2
                first = await pool.pick(prompt(0), 1)
                assert (await pool.pick(prompt(0), 1)) is first
                await say(one, False)
                await eventually(lambda: pool.num_usable == 1)
                assert (pool.num_known, len(pool.loads)) == (2, 2)
                for seed in range(4):
                    assert (await pool.pick(prompt(seed), 1)).target == there
                await say(one, True)
                await eventually(lambda: pool.num_usable == 2)
                assert {(await pool.pick(prompt(10 + n), 1)).target for n in range(2)} == {
                    here,
                    there,
                }
            finally:
                await pool.close()

    asyncio.run(main())


def test_a_silent_verifier_is_asked_only_if_there_is_no_other() -> None:
    async def main() -> None:
        async with verifier() as (_, here), verifier() as (_, there):
            pool = VerifierPool([here, there])
            try:
                await eventually(lambda: pool.num_usable == 2)
                await eventually(lambda: all(load.total_pages for load in pool.loads.values()))
                one, two = pool._connections
                one._heard -= verifier_connection.SILENT_SECONDS + 1
                for seed in range(4):
                    assert await pool.pick(prompt(seed), 1) is two
                two._heard -= verifier_connection.SILENT_SECONDS + 1
                assert await pool.pick(prompt(0), 1) in (one, two)
            finally:
                await pool.close()

    asyncio.run(main())


def test_a_stream_that_broke_forgets_what_was_cached_there() -> None:
    class Restarting(Verifier):
        def __init__(self) -> None:
            self.end = asyncio.Event()

        async def Run(
            self, requests: object, context: object
        ) -> AsyncIterator[verify_pb2.RunResponse]:
            yield verify_pb2.RunResponse(load=verify_pb2.Load(total_pages=1))
            await self.end.wait()
            self.end.clear()

    async def main() -> None:
        server, servicer = grpc.aio.server(), Restarting()
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with verifier() as (_, there):
            pool = VerifierPool([f"127.0.0.1:{port}", there])
            try:
                await eventually(lambda: pool.num_usable == 2)
                one = pool._connections[0]
                life = one.life
                servicer.end.set()
                await eventually(lambda: one.usable and one.life != life)
                assert one.life > life
            finally:
                await pool.close()
                await server.stop(0)

    asyncio.run(main())


class Deaf:
    """A connection that accepts a ticket's messages and never answers."""

    def cancel(self, number: int) -> None:
        return

    forget = cancel


def test_what_came_to_its_end_outlives_its_verifier() -> None:
    async def main() -> None:
        whole, part = (verifier_connection.Ticket(Deaf(), number, 60) for number in (1, 2))  # type: ignore[arg-type]
        end = verify_pb2.Finish(reason=verify_pb2.FINISH_REASON_LENGTH)
        whole.push(verify_pb2.SequenceOutput(id=1, tokens=[5], finish=end))
        part.push(verify_pb2.SequenceOutput(id=2, tokens=[5]))
        for ticket in (whole, part):
            ticket.fail(verifier_connection.VerifierLost("killed"))
        assert [list(output.tokens) for output in await whole.take()] == [[5]]
        with pytest.raises(verifier_connection.VerifierLost):
            await part.take()
        for ticket in (whole, part):
            ticket.close()

    asyncio.run(main())
