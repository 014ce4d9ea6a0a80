"""A verifier with the real protocol and scripted tokens, for cases that a real one does not
produce on demand.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import grpc

from foredraft.api.verify.v1 import verify_pb2, verify_pb2_grpc

Submit = verify_pb2.SubmitRequest
Script = Callable[["Conversation", Submit], Awaitable[None]]


class Conversation:
    """A Run stream in the hands of a script."""

    def __init__(self) -> None:
        self.cancelled: set[int] = set()
        self.outbox: asyncio.Queue[verify_pb2.RunResponse | None] = asyncio.Queue()

    async def say(self, id: int, tokens: Sequence[int] = (), **finish: object) -> None:
        """Sends tokens of a request, and its end when fields of Finish are given."""
        output = verify_pb2.SequenceOutput(id=id, tokens=tokens)
        if finish:
            output.finish.CopyFrom(verify_pb2.Finish(**finish))  # type: ignore[arg-type]
        await self.outbox.put(verify_pb2.RunResponse(outputs=[output]))

    async def fail(
        self,
        id: int,
        code: int,
        message: str = "scripted",
        tokens: Sequence[int] = (),
        **error: object,
    ) -> None:
        """Refuses a request, or ends it behind some tokens."""
        finish = verify_pb2.Finish(reason=verify_pb2.FINISH_REASON_ERROR)
        finish.error.CopyFrom(verify_pb2.Error(code=code, message=message, **error))  # type: ignore[arg-type]
        output = verify_pb2.SequenceOutput(id=id, tokens=tokens, finish=finish)
        await self.outbox.put(verify_pb2.RunResponse(outputs=[output]))

    async def wait(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        """Returns once the condition holds, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    await asyncio.sleep(0.01)

    async def breathe(self) -> None:
        """Lets earlier messages go out before the next."""
        while self.outbox.qsize() > 8:
            await asyncio.sleep(0)

    async def end(self) -> None:
        """Ends the stream."""
        await self.outbox.put(None)


class ScriptedVerifier(verify_pb2_grpc.VerifyServiceServicer):
    """Runs the script for every submitted request."""

    def __init__(self, model: Path, vocab_size: int) -> None:
        self._info = verify_pb2.GetModelInfoResponse(
            model="scripted",
            model_path=str(model),
            vocab_size=vocab_size,
            context_length=4096,
            kv_tokens=8192,
            speculative_algorithm="NONE",
        )
        self.script: Script | None = None
        self.submitted: list[Submit] = []
        self.cancelled: list[int] = []

    def forget(self) -> None:
        """Resets the counters."""
        self.submitted, self.cancelled = [], []

    async def GetModelInfo(
        self, request: verify_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> verify_pb2.GetModelInfoResponse:
        return self._info

    async def Run(
        self, requests: AsyncIterator[verify_pb2.RunRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[verify_pb2.RunResponse]:
        conversation = Conversation()
        reader = asyncio.create_task(self._read(requests, conversation))
        try:
            while (message := await conversation.outbox.get()) is not None:
                yield message
        finally:
            reader.cancel()

    async def _read(
        self, requests: AsyncIterator[verify_pb2.RunRequest], conversation: Conversation
    ) -> None:
        async with asyncio.TaskGroup() as group:
            async for request in requests:
                if request.HasField("cancel"):
                    self.cancelled.append(request.cancel.id)
                    conversation.cancelled.add(request.cancel.id)
                else:
                    self.submitted.append(request.submit)
                    assert self.script is not None
                    group.create_task(self.script(conversation, request.submit))  # type: ignore[arg-type]


@contextlib.contextmanager
def serving(verifier: ScriptedVerifier, address: str) -> Iterator[None]:
    """Serves on an address from a thread of its own."""
    started, stop = threading.Event(), threading.Event()

    async def run() -> None:
        server = grpc.aio.server()
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(verifier, server)
        server.add_insecure_port(address)
        await server.start()
        started.set()
        await asyncio.to_thread(stop.wait)
        await server.stop(0)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert started.wait(60)
    try:
        yield
    finally:
        stop.set()
        thread.join()
