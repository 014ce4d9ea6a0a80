"""A gateway's stream, where it goes otherwise than requests and answers."""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from foredraft.api.verify.v1 import verify_pb2, verify_pb2_grpc
from foredraft.errors import InvalidRequest
from foredraft.types import Grammar
from verify_service import service as service_module
from verify_service.outputs import Load, StepOutput
from verify_service.service import VerifyService


class Engine:
    """Takes requests and never ends one."""

    def __init__(self) -> None:
        self.limits = SimpleNamespace(vocab_size=10)
        self.submitted: list[Any] = []
        self.cancelled: list[int] = []

    def load(self) -> Load:
        return Load(waiting=0, running=0, free_pages=1, total_pages=1, draft_available=False)

    def submit(self, request: Any) -> int:
        self.submitted.append(request)
        return len(self.submitted)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)


class BrokenEngine(Engine):
    """Fails in a way that nobody foresaw."""

    def submit(self, request: object) -> int:
        raise ZeroDivisionError("a defect")


class BrokenCompiler:
    """Likewise, as where no process can be started any more."""

    def cached(self, grammar: Grammar) -> None:
        return None

    async def compile(self, grammar: Grammar) -> None:
        raise OSError("too many open files")


def submit(number: int, **sampling: Any) -> verify_pb2.RunRequest:
    params = verify_pb2.Sampling(max_new_tokens=4, **sampling)
    return verify_pb2.RunRequest(
        submit=verify_pb2.SubmitRequest(id=number, prompt=[1], sampling=params)
    )


def messages(
    engine: Engine,
    requests: list[verify_pb2.RunRequest],
    *,
    ends: bool = False,
    compiler: Any = None,
) -> list[verify_pb2.RunResponse]:
    """All that a stream says until it ends; the gateway says no more after `requests`, or nothing at all."""
    service = VerifyService()
    service.open(engine, None, compiler)  # type: ignore[arg-type]

    async def said() -> AsyncIterator[verify_pb2.RunRequest]:
        for request in requests:
            yield request
        if not ends:
            await asyncio.Event().wait()

    async def main() -> list[verify_pb2.RunResponse]:
        context: Any = None
        async with asyncio.timeout(20):
            return [message async for message in service.Run(said(), context)]

    return asyncio.run(main())


def test_a_stream_whose_requests_are_not_read_any_more_ends() -> None:
    with pytest.raises(ZeroDivisionError):
        messages(BrokenEngine(), [submit(1)])


def test_a_number_that_is_in_use_ends_the_stream_and_what_runs_for_it() -> None:
    engine = Engine()
    with pytest.raises(InvalidRequest, match="7 is in use"):
        messages(engine, [submit(6), submit(7), submit(7)])
    assert len(engine.submitted) == 2
    assert sorted(engine.cancelled) == [1, 2]


def test_a_grammar_that_cannot_be_compiled_for_whatever_reason_is_answered() -> None:
    grammar = verify_pb2.Grammar(regex="a+")
    said = messages(Engine(), [submit(3, grammar=grammar)], ends=True, compiler=BrokenCompiler())
    [output] = [output for message in said for output in message.outputs]
    assert output.id == 3
    assert output.finish.error.code == verify_pb2.ERROR_CODE_INTERNAL


@pytest.mark.parametrize("timeout", [math.nan, -1.0])
def test_a_timeout_that_is_no_time_is_refused(timeout: float) -> None:
    request = submit(4)
    request.submit.timeout_seconds = timeout
    said = messages(Engine(), [request], ends=True)
    [output] = [output for message in said for output in message.outputs]
    assert output.finish.error.code == verify_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert output.finish.error.field == "timeout_seconds"


def test_what_runs_for_a_gateway_that_reads_nothing_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "MAX_PENDING_MESSAGES", 8)
    engine = Engine()

    async def main() -> None:
        server, address = grpc.aio.server(), f"unix:{tmp_path}/verify.sock"
        service = VerifyService()
        service.open(engine, None, None)  # type: ignore[arg-type]
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(service, server)
        server.add_insecure_port(address)
        await server.start()
        async with asyncio.timeout(20), grpc.aio.insecure_channel(address) as channel:
            call = verify_pb2_grpc.VerifyServiceStub(channel).Run()
            await call.write(submit(1))
            while not engine.submitted:
                await asyncio.sleep(0.001)
            output = StepOutput(1, [5] * 100_000)  # more than gRPC takes while nobody reads
            while not engine.cancelled:
                engine.submitted[0].sink([output], engine.load())
                await asyncio.sleep(0.001)
            await call.write(submit(2))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                [message async for message in call]
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await server.stop(0)

    asyncio.run(main())
    assert len(engine.submitted) == 1
    assert engine.cancelled == [1]
