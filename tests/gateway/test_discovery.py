"""Verifiers behind a name that is looked up again and again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from foredraft.api.verify.v1 import verify_pb2_grpc
from foredraft.rpc.address import Address
from foredraft.telemetry import metrics
from gateway import discovery
from gateway.verifier_pool import VerifierPool
from testing.bare_verifiers import Verifier, eventually


@asynccontextmanager
async def verifier(host: str, port: int = 0) -> AsyncIterator[tuple[grpc.aio.Server, int]]:
    server = grpc.aio.server()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(Verifier(), server)
    port = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    try:
        yield server, port
    finally:
        await server.stop(0)


def test_a_name_is_looked_up_for_all_its_addresses() -> None:
    async def main() -> None:
        assert "127.0.0.1:7" in await discovery.resolve(Address(host="localhost", port=7))
        assert await discovery.resolve(Address(host="127.0.0.1", port=7)) == {"127.0.0.1:7"}

    asyncio.run(main())


def test_verifiers_come_and_go_with_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        answer: set[str] | OSError = set()

        async def resolve(name: Address) -> set[str]:
            assert name == Address(host="verifiers", port=50052)
            if isinstance(answer, OSError):
                raise answer
            return set(answer)

        # Nobody here can give a name of this machine several addresses; the look-up itself is
        # tested above.
        monkeypatch.setattr(discovery, "resolve", resolve)
        monkeypatch.setattr(discovery, "LOOKUP_SECONDS", 0.05)
        async with verifier("127.0.0.1") as (first, port), verifier("127.0.0.2", port) as (_, _):
            one, two = f"127.0.0.1:{port}", f"127.0.0.2:{port}"
            pool = VerifierPool(["dns:verifiers:50052"])
            try:
                assert pool.num_usable == 0
                answer = {one}
                await eventually(lambda: set(pool.loads) == {one})
                answer = {one, two}
                await eventually(lambda: set(pool.loads) == {one, two})
                await eventually(lambda: all(load.total_pages for load in pool.loads.values()))
                assert metrics.value("foredraft_gateway_waiting_requests") == 6
                assert metrics.value("foredraft_gateway_kv_usage_ratio") == 0.75
                # A name server that is away takes no verifier away.
                answer = OSError("no answer")
                await asyncio.sleep(0.2)
                assert set(pool.loads) == {one, two}
                # One that left the name is used until it ends.
                answer = {two}
                await asyncio.sleep(0.2)
                assert set(pool.loads) == {one, two}
                await first.stop(0)
                await eventually(lambda: set(pool.loads) == {two} and len(pool._connections) == 1)
            finally:
                await pool.close()

    asyncio.run(main())
