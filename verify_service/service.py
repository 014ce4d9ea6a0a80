"""The verifier's gRPC service: validates requests, passes them to the engine's thread, streams
outputs.
"""

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import grpc

from foredraft import __version__
from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.verify.v1 import verify_pb2, verify_pb2_grpc
from foredraft.errors import ForedraftError, InvalidRequest, Overloaded, Unavailable
from foredraft.rpc.server import wait_briefly
from foredraft.telemetry import tracing
from foredraft.telemetry.tracing import Span
from foredraft.types import FinishReason, Grammar
from verify_service.attach.links import DraftLink
from verify_service.engine.engine import Engine
from verify_service.engine.live_requests import EngineRequest
from verify_service.exactness import Exactness
from verify_service.grammar.compiler import GrammarCompiler
from verify_service.messages import engine_request, response
from verify_service.outputs import Finish, Load, StepOutput

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
MAX_PENDING_MESSAGES = 4096  # steps that a gateway may lag behind before its stream is ended


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Fields of GetModelInfo's answer beside the engine's limits."""

    name: str
    path: str
    architecture: str
    dtype: str
    device: str
    weight_bytes: int
    quantization: str
    algorithm: str
    draft_model: str
    tree_limits: tuple[int, int, int]
    checksum: str
    drafts: list["ServedDraft"]
    tensor_parallel_size: int
    exactness: Exactness


@dataclass(frozen=True, slots=True)
class ServedDraft:
    """A configured draft.

    Attributes:
        name: Algorithm of the draft.
        model: Name of its model; empty where it has none of its own.
        link: Link that has the draft's own description.
    """

    name: str
    model: str
    link: DraftLink

    def message(self) -> verify_pb2.ConfiguredDraft:
        """Returns the draft's message in GetModelInfo's answer."""
        said = self.link.client.info or draft_pb2.GetDraftInfoResponse()
        return verify_pb2.ConfiguredDraft(
            name=self.name,
            model=self.model,
            checksum=said.checksum,
            quantization=said.quantization,
            trained_for=said.trained_for,
            note=self.link.note,
        )


class VerifyService(verify_pb2_grpc.VerifyServiceServicer):
    """Implements foredraft.api.verify.v1.VerifyService over one engine."""

    def __init__(self) -> None:
        self._serving: tuple[Engine, ServedModel, GrammarCompiler] | None = None
        self._is_open = asyncio.Event()
        self._draining = False

    def open(self, engine: Engine, model: ServedModel, grammars: GrammarCompiler) -> None:
        """Answers calls from now on, once the model is loaded."""
        self._serving = (engine, model, grammars)
        self._is_open.set()

    def _opened(self) -> tuple[Engine, ServedModel, GrammarCompiler]:
        if self._serving is None:
            raise Unavailable("the verifier is loading its model; retry")
        return self._serving

    def drain(self) -> None:
        """Refuses new requests from now on."""
        self._draining = True

    async def GetModelInfo(
        self, request: verify_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> verify_pb2.GetModelInfoResponse:
        await wait_briefly(self._is_open)
        engine, model, _ = self._opened()
        limits = engine.limits
        kv_tokens = limits.num_pages * limits.page_size
        steps, topk, tokens = model.tree_limits
        return verify_pb2.GetModelInfoResponse(
            model=model.name,
            model_path=model.path,
            architecture=model.architecture,
            vocab_size=limits.vocab_size,
            # The newest token of a sequence is not in the pool.
            context_length=min(limits.context_length, kv_tokens + 1),
            kv_tokens=kv_tokens,
            page_size=limits.page_size,
            eos_token_ids=sorted(limits.eos_token_ids),
            max_running_requests=limits.max_running_requests,
            speculative_algorithm=model.algorithm,
            draft_model=model.draft_model,
            speculative_num_steps=steps,
            speculative_eagle_topk=topk,
            speculative_num_draft_tokens=tokens,
            dtype=model.dtype,
            device=model.device,
            version=__version__,
            weight_bytes=model.weight_bytes,
            quantization=model.quantization,
            checksum=model.checksum,
            drafts=[draft.message() for draft in model.drafts],
            tensor_parallel_size=model.tensor_parallel_size,
            exactness=verify_pb2.Exactness(
                level=model.exactness.level,
                fingerprint=model.exactness.fingerprint,
                depends_on=model.exactness.depends_on,
            ),
        )

    async def FlushCache(
        self, request: verify_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> verify_pb2.FlushCacheResponse:
        pages = await asyncio.wrap_future(self._opened()[0].flush_cache())
        return verify_pb2.FlushCacheResponse(pages=pages)

    async def Run(
        self,
        requests: AsyncIterator[verify_pb2.RunRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[verify_pb2.RunResponse]:
        engine, _, grammars = self._opened()
        stream = _Stream(engine, grammars, asyncio.get_running_loop())
        reader = asyncio.create_task(self._read(requests, stream))
        try:
            yield stream.heartbeat()
            while (message := await stream.next()) is not None:
                yield message
        finally:
            reader.cancel()
            stream.close()
        if stream.failure is not None:
            raise stream.failure
        if stream.overflowed:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the gateway is {MAX_PENDING_MESSAGES} messages behind",
            )

    async def _read(
        self, requests: AsyncIterator[verify_pb2.RunRequest], stream: "_Stream"
    ) -> None:
        try:
            async for request in requests:
                if stream.overflowed:
                    return
                kind = request.WhichOneof("message")
                if kind == "submit":
                    if self._draining:
                        stream.refuse(request.submit.id, Unavailable("the verifier is stopping"))
                    else:
                        stream.submit(request.submit)
                elif kind == "cancel":
                    stream.cancel(request.cancel.id)
        except Exception as error:
            # Nothing would read the gateway's further messages: it has to connect again.
            stream.fail(error)
            return
        stream.end_of_requests()


class _Stream:
    """Serves one gateway's stream: its live requests and the messages that wait to be sent."""

    def __init__(
        self, engine: Engine, grammars: GrammarCompiler, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._engine = engine
        self._grammars = grammars
        self._loop = loop
        self._messages: asyncio.Queue[verify_pb2.RunResponse | None] = asyncio.Queue()
        self._live: dict[int, int] = {}  # the gateway's id -> the engine's
        self._compiling: dict[int, asyncio.Task[None]] = {}  # by the gateway's id
        self._spans: dict[int, Span] = {}  # by the gateway's id
        self._ended = False
        self.overflowed = False
        self.failure: Exception | None = None

    async def next(self) -> verify_pb2.RunResponse | None:
        """Returns the next message, or None after the last.

        After a while without messages, the message is the engine's load.
        """
        try:
            async with asyncio.timeout(HEARTBEAT_SECONDS):
                return await self._messages.get()
        except TimeoutError:
            return self.heartbeat()

    def heartbeat(self) -> verify_pb2.RunResponse:
        """Sends the engine's load only."""
        return response([], self._engine.load())

    def submit(self, submit: verify_pb2.SubmitRequest) -> None:
        """Passes a request to the engine, or answers why not. A new grammar is compiled first.

        Raises:
            InvalidRequest: Its id is in use, so that no answer could be told from the other
                request's.
        """
        if submit.id in self._live or submit.id in self._compiling:
            raise InvalidRequest("id", f"{submit.id} is in use on this stream")
        span = tracing.begin("verify", "server", submit.traceparent)
        try:
            request = engine_request(submit, span.traceparent, self._sink)
            grammar = request.sampling.grammar
            if grammar is not None:
                request.sampling.validate(self._engine.limits.vocab_size)
                compiled = self._grammars.cached(grammar)
                if compiled is None:
                    task = asyncio.create_task(self._compile(grammar, request, span))
                    # Not left to the task: one that is cancelled before its first step runs
                    # nothing.
                    task.add_done_callback(functools.partial(self._compiled, request.tag, span))
                    self._compiling[submit.id] = task
                    return
                request = replace(request, grammar=compiled)
            self._start(request, span)
        except (InvalidRequest, Overloaded, Unavailable) as error:
            span.end({}, error=str(error))
            self.refuse(submit.id, error)

    def _start(self, request: EngineRequest, span: Span) -> None:
        self._live[request.tag] = self._engine.submit(request)
        self._spans[request.tag] = span

    async def _compile(self, grammar: Grammar, request: EngineRequest, span: Span) -> None:
        """Submits a request once its grammar is there. The wait counts for its deadline."""
        started = time.monotonic()
        left = request.timeout_seconds
        try:
            async with asyncio.timeout(left):
                compiled = await self._grammars.compile(grammar)
            if left is not None:
                left = max(0.001, left - (time.monotonic() - started))
            self._start(replace(request, grammar=compiled, timeout_seconds=left), span)
        except TimeoutError:
            self._end_unsubmitted(request.tag, span, Finish(FinishReason.DEADLINE))
        except ForedraftError as error:
            self._end_unsubmitted(request.tag, span, Finish(FinishReason.ERROR, error=error))
        except Exception:  # whatever it is, the request's sender waits for an answer
            logger.exception("a grammar could not be compiled")
            defect = ForedraftError("the grammar could not be compiled: an error of the verifier")
            self._end_unsubmitted(request.tag, span, Finish(FinishReason.ERROR, error=defect))

    def _compiled(self, tag: int, span: Span, task: asyncio.Task[None]) -> None:
        """Ends the wait for a grammar, and answers a request that was cancelled meanwhile."""
        self._compiling.pop(tag, None)
        if task.cancelled():
            self._end_unsubmitted(tag, span, Finish(FinishReason.CANCELLED))
        self._finish_if_idle()

    def _end_unsubmitted(self, tag: int, span: Span, finish: Finish) -> None:
        span.end({}, error=str(finish.error or finish.reason.value))
        self._deliver([StepOutput(tag, finish=finish)], self._engine.load())

    def refuse(self, tag: int, error: InvalidRequest | Overloaded | Unavailable) -> None:
        """Answers a request that never reached the engine."""
        output = StepOutput(tag, finish=Finish(FinishReason.ERROR, error=error))
        self._deliver([output], self._engine.load())

    def cancel(self, tag: int) -> None:
        """Cancels a live request; unknown ones have already ended."""
        if (number := self._live.get(tag)) is not None:
            self._engine.cancel(number)
        elif (task := self._compiling.get(tag)) is not None:
            task.cancel()

    def end_of_requests(self) -> None:
        """Notes that the gateway sends no more; the stream ends with its last live request."""
        self._ended = True
        self._finish_if_idle()

    def fail(self, error: Exception) -> None:
        """Ends the stream with the messages so far: further requests cannot be read."""
        self.failure = error
        self._messages.put_nowait(None)

    def close(self) -> None:
        """Cancels all live requests of a stream that is gone."""
        for task in self._compiling.values():
            task.cancel()
        for number in self._live.values():
            self._engine.cancel(number)
        self._live.clear()
        for span in self._spans.values():
            span.end({}, error="the gateway was lost")
        self._spans.clear()

    def _sink(self, outputs: list[StepOutput], load: Load) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver, outputs, load)
        except RuntimeError:
            logger.debug("the event loop is closed; dropping the outputs of a stopped stream")

    def _deliver(self, outputs: list[StepOutput], load: Load) -> None:
        for output in outputs:
            if output.finish is not None:
                self._live.pop(output.tag, None)
                _end_span(self._spans.pop(output.tag, tracing.NO_SPAN), output.finish)
        if self._messages.qsize() >= MAX_PENDING_MESSAGES:
            if not self.overflowed:
                self.overflowed = True
                self._messages.put_nowait(None)
                self.close()  # at once: the peer may never read the message that is being written
            return
        self._messages.put_nowait(response(outputs, load))
        self._finish_if_idle()

    def _finish_if_idle(self) -> None:
        if self._ended and not self._live and not self._compiling:
            self._messages.put_nowait(None)


def _end_span(span: Span, finish: Finish) -> None:
    attributes: dict[str, tracing.Value] = {
        "gen_ai.usage.input_tokens": finish.prompt_tokens,
        "gen_ai.usage.output_tokens": finish.completion_tokens,
        "gen_ai.response.finish_reasons": finish.reason.value,
        "foredraft.cached_tokens": finish.cached_tokens,
        "foredraft.verify_steps": finish.verify_steps,
        "foredraft.drafted_tokens": finish.drafted_tokens,
        "foredraft.accepted_tokens": finish.accepted_tokens,
        "foredraft.preemptions": finish.preemptions,
        "foredraft.queue_seconds": finish.queue_seconds,
    }
    span.end(attributes, error=str(finish.error or ""))
