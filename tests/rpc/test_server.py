"""The gRPC server of every service: health, errors, sockets, and an orderly end."""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from foredraft import errors
from foredraft.api.draft.v1 import draft_pb2, draft_pb2_grpc
from foredraft.rpc import listening
from foredraft.rpc import server as rpc_server
from foredraft.rpc.address import Address
from foredraft.rpc.channel import aio_channel, channel, check_health
from foredraft.rpc.errors import from_rpc_error
from foredraft.rpc.server import RpcServer, serve
from foredraft.telemetry.logging import request_id
from testing.ready import wait_ready

NAME = "foredraft.api.draft.v1.DraftService"


class Draft(draft_pb2_grpc.DraftServiceServicer):
    """Fails as it is told to; otherwise answers with the request id it runs under."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.release = asyncio.Event()
        self.ended = asyncio.Event()

    async def GetDraftInfo(
        self, request: draft_pb2.GetDraftInfoRequest, context: grpc.aio.ServicerContext
    ) -> draft_pb2.GetDraftInfoResponse:
        if self.error:
            raise self.error
        return draft_pb2.GetDraftInfoResponse(algorithm="NGRAM", model=request_id())

    async def Speculate(
        self,
        requests: AsyncIterator[draft_pb2.SpeculateRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[draft_pb2.SpeculateResponse]:
        try:
            async for request in requests:
                if request.HasField("attach"):
                    raise self.error or errors.AttachRefused("page_size", "32, not 16")
                if request.step.step == 99:
                    await self.release.wait()
                yield draft_pb2.SpeculateResponse(
                    step=draft_pb2.StepResponse(step=request.step.step)
                )
        finally:
            self.ended.set()


async def start(listen: str, servicer: Draft) -> RpcServer:
    server = RpcServer(listen, max_message_bytes=2**20)
    server.add(draft_pb2_grpc.add_DraftServiceServicer_to_server, servicer, NAME)
    await server.start()
    return server


def step(number: int) -> draft_pb2.SpeculateRequest:
    return draft_pb2.SpeculateRequest(step=draft_pb2.StepRequest(step=number))


@pytest.fixture(params=["tcp", "unix"])
def listen(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path}/run/draft.sock"


def test_health_follows_the_service(listen: str) -> None:
    async def main() -> None:
        server = await start(listen, Draft())
        assert await asyncio.to_thread(check_health, server.address, timeout=60) == "NOT_SERVING"
        await server.set_serving()
        await asyncio.to_thread(wait_ready, server.address, 60, service=NAME)
        await server.set_health("draft", False)
        assert (
            await asyncio.to_thread(check_health, server.address, timeout=60, service="draft")
            == "NOT_SERVING"
        )
        assert await asyncio.to_thread(check_health, server.address, timeout=60) == "SERVING"
        assert (
            await asyncio.to_thread(check_health, server.address, timeout=60, service="other")
            == "SERVICE_UNKNOWN"
        )
        await server.stop()
        assert await asyncio.to_thread(check_health, server.address) == "UNREACHABLE"

    asyncio.run(main())


def test_waiting_for_nobody_ends(tmp_path: Path) -> None:
    with pytest.raises(errors.Unavailable, match="UNREACHABLE"):
        wait_ready(f"unix:{tmp_path}/none.sock", 0.2)


def test_a_thread_can_wait_and_call(listen: str) -> None:
    async def main() -> None:
        server = await start(listen, Draft())
        await server.set_serving()

        def call() -> str:
            wait_ready(server.address, 60)
            with channel(server.address) as connection:
                stub = draft_pb2_grpc.DraftServiceStub(connection)
                return str(stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest(), timeout=60).algorithm)

        assert await asyncio.to_thread(call) == "NGRAM"
        await server.stop()

    asyncio.run(main())


def test_errors_reach_the_client_with_their_fields(listen: str) -> None:
    async def main() -> None:
        error = errors.InvalidRequest("tokens", "too many")
        server = await start(listen, Draft(error))
        async with aio_channel(server.address) as connection:
            stub = draft_pb2_grpc.DraftServiceStub(connection)
            with pytest.raises(grpc.RpcError) as failed:
                await stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest(), timeout=60)
            back = from_rpc_error(failed.value)
            assert isinstance(back, errors.InvalidRequest)
            assert (back.field, back.message) == ("tokens", "too many")
        await server.stop()

    asyncio.run(main())


def test_a_refused_attach_names_the_field_on_a_stream(listen: str) -> None:
    async def main() -> None:
        server = await start(listen, Draft())
        async with aio_channel(server.address) as connection:
            call = draft_pb2_grpc.DraftServiceStub(connection).Speculate()
            await call.write(step(1))
            assert (await call.read()).step.step == 1
            await call.write(draft_pb2.SpeculateRequest(attach=draft_pb2.AttachRequest()))
            with pytest.raises(grpc.RpcError) as failed:
                await call.read()
            back = from_rpc_error(failed.value)
            assert isinstance(back, errors.AttachRefused)
            assert back.field == "page_size"
        await server.stop()

    asyncio.run(main())


def test_a_defect_is_told_to_the_log_alone(listen: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        server = await start(listen, Draft(ValueError("the secret")))
        async with aio_channel(server.address) as connection:
            stub = draft_pb2_grpc.DraftServiceStub(connection)
            for call in (
                stub.GetDraftInfo(
                    draft_pb2.GetDraftInfoRequest(), metadata=(("x-request-id", "r1"),)
                ),
                stub.Speculate(
                    iter([draft_pb2.SpeculateRequest(attach=draft_pb2.AttachRequest())]),
                    metadata=(("x-request-id", "r1"),),
                ),
            ):
                with pytest.raises(grpc.RpcError) as failed:
                    await (call if isinstance(call, grpc.aio.UnaryUnaryCall) else call.read())
                assert failed.value.code() == grpc.StatusCode.INTERNAL
                assert "r1" in failed.value.details()
                assert "secret" not in str(failed.value)
        await server.stop()

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert caplog.text.count("the secret") >= 2


def test_a_handler_knows_the_request_id() -> None:
    async def main() -> None:
        server = await start("127.0.0.1:0", Draft())
        async with aio_channel(server.address) as connection:
            stub = draft_pb2_grpc.DraftServiceStub(connection)
            request = draft_pb2.GetDraftInfoRequest()
            given = await stub.GetDraftInfo(request, metadata=(("x-request-id", "mine"),))
            made = await stub.GetDraftInfo(request)
            again = await stub.GetDraftInfo(request)
        await server.stop()
        assert given.model == "mine"
        assert made.model
        assert made.model != again.model

    asyncio.run(main())


def test_reflection_lists_the_services() -> None:
    async def main() -> None:
        server = await start("127.0.0.1:0", Draft())
        async with aio_channel(server.address) as connection:
            stub = reflection_pb2_grpc.ServerReflectionStub(connection)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            call = stub.ServerReflectionInfo(iter([request]))
            names = {service.name for service in (await call.read()).list_services_response.service}
        await server.stop()
        assert {NAME, "grpc.health.v1.Health"} <= names

    asyncio.run(main())


def test_too_large_a_message_is_the_clients_mistake() -> None:
    async def main() -> None:
        server = await start("127.0.0.1:0", Draft())
        async with aio_channel(server.address) as connection:
            call = draft_pb2_grpc.DraftServiceStub(connection).Speculate()
            large = draft_pb2.StepRequest(released_slots=[2**31] * 300_000)
            await call.write(draft_pb2.SpeculateRequest(step=large))
            with pytest.raises(grpc.RpcError) as failed:
                await call.read()
        await server.stop()
        assert isinstance(from_rpc_error(failed.value), errors.InvalidRequest)

    asyncio.run(main())


def test_a_socket_is_private_and_goes_with_the_server(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "run" / "draft.sock"
        server = await start(f"unix:{path}", Draft())
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        await server.stop()
        assert not path.exists()

    mask = os.umask(0)
    try:
        asyncio.run(main())
    finally:
        os.umask(mask)


def test_a_folder_that_another_thread_makes_meanwhile_can_be_entered(tmp_path: Path) -> None:
    """An example is a cache that is made while the model loads."""
    modes = []

    class Listening:
        def __init__(self, server: grpc.aio.Server) -> None:
            self._server = server

        def add_insecure_port(self, target: str) -> int:
            thread = threading.Thread(target=(tmp_path / f"cache {len(modes)}").mkdir)
            thread.start()
            thread.join()
            modes.append((tmp_path / f"cache {len(modes)}").stat().st_mode & 0o700)
            return self._server.add_insecure_port(target)

    async def main() -> None:
        server = grpc.aio.server()
        for where in (Address(path=f"{tmp_path}/sock"), Address(host="127.0.0.1", port=0)):
            listening.bind(Listening(server), where, None)  # type: ignore[arg-type]
        await server.start()
        await server.stop(0)

    asyncio.run(main())
    assert modes == [0o700, 0o700]


def test_an_address_in_use_is_refused(listen: str) -> None:
    async def main() -> None:
        first = await start(listen, Draft())
        with pytest.raises(errors.ConfigError, match="cannot listen on"):
            await start(str(first.address), Draft())
        await first.set_serving()
        await asyncio.to_thread(wait_ready, first.address, 60)
        await first.stop()

    asyncio.run(main())


def test_the_socket_of_a_server_that_stands_still_is_left(tmp_path: Path) -> None:
    path = tmp_path / "busy.sock"
    with socket.socket(socket.AF_UNIX) as server, ExitStack() as stack:
        server.bind(str(path))
        server.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(str(path))
        with pytest.raises(errors.ConfigError, match="takes none in"):
            asyncio.run(start(f"unix:{path}", Draft()))
        assert path.is_socket()


def test_a_dead_servers_socket_is_replaced_but_a_file_is_not(tmp_path: Path) -> None:
    dead = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(dead))
    file = tmp_path / "precious"
    file.write_text("text")

    async def main() -> None:
        server = await start(f"unix:{dead}", Draft())
        assert await asyncio.to_thread(check_health, server.address, timeout=60) == "NOT_SERVING"
        await server.stop()
        with pytest.raises(errors.ConfigError, match="not a socket"):
            await start(f"unix:{file}", Draft())

    asyncio.run(main())
    assert file.read_text() == "text"


def test_stopping_drains_first_and_then_cancels(listen: str) -> None:
    async def main() -> None:
        servicer = Draft()
        server = await start(listen, servicer)
        await server.set_serving()
        stop, answered = asyncio.Event(), asyncio.Event()
        seen: list[str] = []

        async def drain() -> None:
            seen.append(await asyncio.to_thread(check_health, server.address, timeout=60))
            servicer.release.set()
            await answered.wait()

        serving = asyncio.create_task(serve(server, drain=drain, stop=stop))
        async with aio_channel(server.address) as connection:
            call = draft_pb2_grpc.DraftServiceStub(connection).Speculate()
            await call.write(step(99))
            stop.set()
            assert (await call.read()).step.step == 99
            answered.set()
            await serving
            assert seen == ["NOT_SERVING"]
            await asyncio.wait_for(servicer.ended.wait(), 60)

    asyncio.run(main())


def test_a_drain_that_hangs_does_not_hold_the_exit() -> None:
    async def main() -> None:
        server = await start("127.0.0.1:0", Draft())
        stop = asyncio.Event()
        stop.set()
        await serve(server, drain_timeout=0.05, drain=asyncio.Event().wait, stop=stop)

    before = threading.active_count()
    asyncio.run(main())
    assert threading.active_count() <= before + 2


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame (RFC 9113, section 4.1)."""
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header field without indexing (RFC 7541, section 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def send_path(where: Address, path: bytes) -> None:
    """Makes a call by hand, since no client of gRPC's would send such a path, and waits for what
    comes of it.
    """
    fields = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x"}
    fields |= {b"te": b"trailers", b"content-type": b"application/grpc"}
    headers = b"".join(literal(name, value) for name, value in fields.items())
    family = socket.AF_UNIX if where.is_unix else socket.AF_INET
    with socket.socket(family) as connection:
        connection.settimeout(0.5)
        connection.connect(where.path if where.is_unix else (where.host, where.port))
        connection.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + frame(4, 0, 0, b"")
            + frame(1, 4, 1, headers)
            + frame(0, 1, 1, bytes(5))
        )
        with contextlib.suppress(TimeoutError):
            while connection.recv(4096):
                pass


def test_a_path_that_is_not_utf8_ends_neither_the_server_nor_its_calls(listen: str) -> None:
    async def main() -> None:
        server = await start(listen, Draft())
        await server.set_serving()
        async with aio_channel(server.address) as connection:
            call = draft_pb2_grpc.DraftServiceStub(connection).Speculate()
            await call.write(step(1))
            assert (await call.read()).step.step == 1
            for number in (2, 3):
                await asyncio.to_thread(send_path, server.address, b"/a.b\xe3/C")
                await asyncio.to_thread(wait_ready, server.address, 60, service=NAME)
                await call.write(step(number))
                assert (await call.read()).step.step == number
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
        await server.stop(0)
        assert await asyncio.to_thread(check_health, server.address) == "UNREACHABLE"

    asyncio.run(main())


def test_a_server_that_cannot_listen_again_at_once_does_so_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An example is a process that is short of descriptors."""
    failures = [OSError(errno.EMFILE, "Too many open files")]

    def bind(*arguments: Any) -> Address:
        if failures:
            raise failures.pop()
        return listening.bind(*arguments)

    async def main() -> None:
        server = await start(f"unix:{tmp_path}/socket", Draft())
        await server.set_serving()
        monkeypatch.setattr(rpc_server, "bind", bind)
        await asyncio.to_thread(send_path, server.address, b"/a.b\xe3/C")
        await asyncio.to_thread(wait_ready, server.address, 20, service=NAME)
        assert not failures
        await server.stop(0)

    asyncio.run(main())
