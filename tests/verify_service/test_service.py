"""A gateway's stream, where it goes otherwise than requests and answers."""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from foredraft import __version__
from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.verify.v1 import verify_pb2, verify_pb2_grpc
from foredraft.errors import InvalidRequest, Unavailable
from foredraft.types import Grammar
from verify_service import service as service_module
from verify_service.exactness import Exactness
from verify_service.outputs import Load, StepOutput
from verify_service.service import ServedDraft, ServedModel, VerifyService


class Engine:
    """Takes requests and never ends one."""

    def __init__(self) -> None:
        self.limits: Any = SimpleNamespace(vocab_size=10)
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


class SlowCompiler:
    """Takes as many seconds by a clock of its own as it is told; without any, for ever."""

    def __init__(self, seconds: float | None = None) -> None:
        self.now = 100.0
        self._seconds = seconds

    def cached(self, grammar: Grammar) -> None:
        return None

    async def compile(self, grammar: Grammar) -> Any:
        if self._seconds is None:
            await asyncio.Event().wait()
        self.now += self._seconds or 0.0
        return "compiled"


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
    drains: bool = False,
) -> list[verify_pb2.RunResponse]:
    """All that a stream says until it ends; the gateway says no more after `requests`, or nothing
    at all.
    """
    service = VerifyService()
    service.open(engine, None, compiler)  # type: ignore[arg-type]
    if drains:
        service.drain()

    async def said() -> AsyncIterator[verify_pb2.RunRequest]:
        for request in requests:
            yield request
        if not ends:
            await asyncio.Event().wait()

    async def main() -> list[verify_pb2.RunResponse]:
        context: Any = None
        async with asyncio.timeout(120):
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


def test_a_verifier_that_stops_takes_nothing_new() -> None:
    engine = Engine()
    said = messages(engine, [submit(3)], ends=True, drains=True)
    [output] = [output for message in said for output in message.outputs]
    assert output.id == 3
    assert output.finish.error.code == verify_pb2.ERROR_CODE_UNAVAILABLE
    assert not engine.submitted


def test_a_gateway_that_goes_takes_its_requests_with_it() -> None:
    engine = Engine()
    service = VerifyService()
    service.open(engine, None, None)  # type: ignore[arg-type]

    async def said() -> AsyncIterator[verify_pb2.RunRequest]:
        for number in (6, 7):
            yield submit(number)
        await asyncio.Event().wait()

    async def main() -> None:
        context: Any = None
        stream = service.Run(said(), context)
        async with asyncio.timeout(120):
            await anext(stream)
            while len(engine.submitted) < 2:
                await asyncio.sleep(0)
            await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(main())
    assert sorted(engine.cancelled) == [1, 2]


def test_a_cancelled_request_is_the_engines_to_end() -> None:
    engine = Engine()
    cancel = verify_pb2.RunRequest(cancel=verify_pb2.CancelRequest(id=7))
    unknown = verify_pb2.RunRequest(cancel=verify_pb2.CancelRequest(id=99))
    requests = [submit(6), submit(7), cancel, unknown, submit(6)]  # the last one ends the stream
    with pytest.raises(InvalidRequest, match="6 is in use"):
        messages(engine, requests)
    assert engine.cancelled[0] == 2
    assert sorted(engine.cancelled[1:]) == [1, 2]


def with_grammar(number: int, timeout: float = 0.0) -> verify_pb2.RunRequest:
    request = submit(number, grammar=verify_pb2.Grammar(regex="a+"))
    request.submit.timeout_seconds = timeout
    return request


def test_the_wait_for_a_grammar_counts_for_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, compiler = Engine(), SlowCompiler(2.0)
    clock = SimpleNamespace(monotonic=lambda: compiler.now)
    monkeypatch.setattr(service_module, "time", clock)

    async def main() -> None:
        service = VerifyService()
        service.open(engine, None, compiler)  # type: ignore[arg-type]

        async def said() -> AsyncIterator[verify_pb2.RunRequest]:
            yield with_grammar(1, 5.0)
            yield with_grammar(2)
            await asyncio.Event().wait()

        context: Any = None
        stream = service.Run(said(), context)
        async with asyncio.timeout(120):
            await anext(stream)
            while len(engine.submitted) < 2:
                await asyncio.sleep(0)
            await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(main())
    limited, unlimited = sorted(engine.submitted, key=lambda request: int(request.tag))
    # Both wait at once, so that the clock may show the time of both.
    assert limited.timeout_seconds in (3.0, 1.0)
    assert unlimited.timeout_seconds is None
    assert limited.grammar == unlimited.grammar == "compiled"


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        (
            verify_pb2.RunRequest(cancel=verify_pb2.CancelRequest(id=3)),
            verify_pb2.FINISH_REASON_CANCELLED,
        ),
        (None, verify_pb2.FINISH_REASON_DEADLINE),
    ],
    ids=["cancelled", "late"],
)
def test_a_request_can_end_while_its_grammar_is_compiled(
    ending: verify_pb2.RunRequest | None, reason: verify_pb2.FinishReason
) -> None:
    engine = Engine()
    requests = [with_grammar(3, 0.0 if ending else 0.01), *([ending] if ending else [])]
    said = messages(engine, requests, ends=True, compiler=SlowCompiler())
    [output] = [output for message in said for output in message.outputs]
    assert (output.id, output.finish.reason) == (3, reason)
    assert not engine.submitted


def link(info: draft_pb2.GetDraftInfoResponse | None, note: str) -> Any:
    return SimpleNamespace(client=SimpleNamespace(info=info), note=note)


def test_what_is_served_is_told_under_its_name() -> None:
    engine = Engine()
    engine.limits = SimpleNamespace(
        vocab_size=10,
        context_length=11,
        num_pages=12,
        page_size=13,
        eos_token_ids=frozenset({7, 3}),
        max_running_requests=14,
    )
    said = draft_pb2.GetDraftInfoResponse(
        checksum="abc", quantization="int8", trained_for="organisation/target"
    )
    model = ServedModel(
        name="name",
        path="path",
        architecture="architecture",
        dtype="dtype",
        device="device",
        weight_bytes=15,
        tensor_parallel_size=19,
        quantization="int4",
        algorithm="algorithm",
        draft_model="draft",
        tree_limits=(16, 17, 18),
        checksum="sum",
        drafts=[
            ServedDraft("EAGLE3", "head", link(said, "another quantisation")),
            ServedDraft("NGRAM", "", link(None, "")),
        ],
        exactness=Exactness("strict", {"card": "one"}),
    )
    service, context = VerifyService(), Any
    with pytest.raises(Unavailable, match="loading"):
        asyncio.run(service.GetModelInfo(verify_pb2.GetModelInfoRequest(), context))  # type: ignore[arg-type]
    service.open(engine, model, None)  # type: ignore[arg-type]
    info = asyncio.run(service.GetModelInfo(verify_pb2.GetModelInfoRequest(), context))  # type: ignore[arg-type]
    assert info == verify_pb2.GetModelInfoResponse(
        model="name",
        model_path="path",
        architecture="architecture",
        vocab_size=10,
        context_length=11,
        kv_tokens=156,
        page_size=13,
        eos_token_ids=[3, 7],
        max_running_requests=14,
        speculative_algorithm="algorithm",
        draft_model="draft",
        speculative_num_steps=16,
        speculative_eagle_topk=17,
        speculative_num_draft_tokens=18,
        dtype="dtype",
        device="device",
        version=__version__,
        weight_bytes=15,
        tensor_parallel_size=19,
        quantization="int4",
        checksum="sum",
        drafts=[
            verify_pb2.ConfiguredDraft(
                name="EAGLE3",
                model="head",
                checksum="abc",
                quantization="int8",
                trained_for="organisation/target",
                note="another quantisation",
            ),
            verify_pb2.ConfiguredDraft(name="NGRAM", model=""),
        ],
        exactness=verify_pb2.Exactness(
            level="strict",
            fingerprint=Exactness("strict", {"card": "one"}).fingerprint,
            depends_on={"card": "one"},
        ),
    )
    early = VerifyService()

    async def ask_early() -> verify_pb2.GetModelInfoResponse:
        asking = asyncio.create_task(early.GetModelInfo(verify_pb2.GetModelInfoRequest(), context))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        early.open(engine, model, None)  # type: ignore[arg-type]
        return await asking

    assert asyncio.run(ask_early()) == info


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
        async with asyncio.timeout(120), grpc.aio.insecure_channel(address) as channel:
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
