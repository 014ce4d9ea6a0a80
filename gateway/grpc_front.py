"""The public gRPC service: foredraft.api.inference.v1.InferenceService."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

import grpc

from foredraft import __version__
from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from foredraft.errors import ForedraftError, InvalidRequest
from foredraft.rpc import errors
from foredraft.rpc.sampling import read_sampling, read_speculation
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import (
    FinishReason,
    Grammar,
    GrammarKind,
)
from gateway.decoding import Chunk, Completion, OutputToken
from gateway.errors import RequestTimeout, SlowClient, UnknownModel, http_error
from gateway.field_names import naming
from gateway.grpc_tools import CallFinder, function_use, messages
from gateway.jobs import Job, JobOptions
from gateway.openai import chats
from gateway.openai.call_grammars import call_grammar
from gateway.openai.prompt_logprobs import echoed
from gateway.openai.response_format import ANY_OBJECT, read_json
from gateway.openai.tools import Convention, ToolUse, told
from gateway.security.gate import Gate
from gateway.serving import Serving, seed_or_random

SERVICE_NAME = "foredraft.api.inference.v1.InferenceService"


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Answers public gRPC calls. Deadlines and cancellation of a call reach the verifier."""

    def __init__(self, serving: Serving, gate: Gate) -> None:
        self._serving = serving
        self._gate = gate

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        try:
            with self._gate.admit(_authorization(context)), naming(_names(request)):
                use, convention = self._functions(request)
                job = await self._job(request, context.time_remaining(), use, convention)
                has_grammar = _grammar(request.sampling.grammar) is not None
                calls = use and convention and CallFinder(use, convention, job, has_grammar)
                async with (
                    contextlib.aclosing(self._serving.generator.stream(job)) as chunks,
                    _patient_writes(self._serving.config.client_timeout) as watch,
                ):
                    async for chunk in chunks:
                        if _was_aborted(chunk):
                            await context.abort(grpc.StatusCode.ABORTED, "it was aborted by name")
                        response = _response(job, chunk, self._serving.tokenizer)
                        if calls:
                            calls.rewrite(response, chunk)
                        watch.begin()
                        await context.write(response)
                        watch.end()
        except (RequestTimeout, SlowClient, UnknownModel) as error:
            await _abort(context, error)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        self._gate.identify(_authorization(context))
        info = self._serving.info
        model = inference_pb2.Model(id=info.model, context_length=info.context_length)
        return inference_pb2.ListModelsResponse(models=[model])

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GetModelInfoResponse:
        self._gate.identify(_authorization(context))
        try:
            self._serving.check_model(request.model)
        except UnknownModel as error:
            await _abort(context, error)
        info = self._serving.info
        return inference_pb2.GetModelInfoResponse(
            model=info.model,
            architecture=info.architecture,
            context_length=info.context_length,
            vocab_size=info.vocab_size,
            speculative_algorithm=info.speculative_algorithm,
            draft_model=info.draft_model,
            dtype=info.dtype,
            device=info.device,
            version=__version__,
            has_chat_template=self._serving.tokenizer.chat_template is not None,
        )

    def _functions(
        self, request: inference_pb2.GenerateRequest
    ) -> tuple[ToolUse | None, Convention | None]:
        """Returns the requested use of functions, and the model's convention for calls."""
        use = function_use(request.chat)
        convention = chats.convention_for(self._serving, use)
        # Their parts are told apart by special tokens, which texts here do not have.
        if use is not None and convention in (Convention.MISTRAL, Convention.HARMONY):
            raise InvalidRequest(
                "tools", "this model's calls do not come over gRPC: ask /v1/chat/completions"
            )
        return use, convention

    async def _job(
        self,
        request: inference_pb2.GenerateRequest,
        timeout: float | None,
        use: ToolUse | None,
        convention: Convention | None,
    ) -> Job:
        serving, given = self._serving, request.sampling
        serving.check_model(request.model)
        grammar = _grammar(given.grammar)
        if use is not None and convention is not None:
            grammar = call_grammar(use, convention, serving.tokenizer, grammar)
        prompt = await self._prompt(request, use, convention)
        sampling = read_sampling(
            given,
            seed=seed_or_random(given.seed if given.HasField("seed") else None),
            grammar=grammar,
            bad_words=serving.bad_words(given.bad_words),
        )
        options = JobOptions(
            name=request.request_id,
            stop=tuple(given.stop),
            num_choices=given.n if given.HasField("n") else 1,
            skip_special_tokens=not given.HasField("skip_special_tokens")
            or given.skip_special_tokens,
            return_provenance=request.return_provenance,
            speculation=read_speculation(request.speculation),
            priority=request.priority,
            timeout=timeout,
            functions=() if use is None else use.names,
        )
        must_fit = given.HasField("max_new_tokens")
        return serving.job(prompt, sampling, options, must_fit=must_fit)

    async def _prompt(
        self,
        request: inference_pb2.GenerateRequest,
        use: ToolUse | None,
        convention: Convention | None,
    ) -> list[int]:
        kind = request.WhichOneof("prompt")
        if kind == "text":
            return await self._serving.encode(request.text)
        if kind == "token_ids":
            return list(request.token_ids.ids)
        if kind == "chat":
            given = messages(request.chat)
            template = self._serving.tokenizer.template_for(use is not None)
            if template is not None:
                template.check_roles((message["role"] for message in given), "chat.messages")
            found, variables = told(given, use, convention)
            if request.chat.continue_final_message:
                variables["continue_final_message"] = True
            return await self._serving.encode_chat(found, **variables)
        raise InvalidRequest("prompt", "give one of text, chat, token_ids")


class _WriteWatch:
    """Ends a call whose client has not taken a message after too long.

    A timeout for each write would add a tenth to a chunk's time. One timer checks instead how long
    the present write has taken.
    """

    def __init__(self, timeout: asyncio.Timeout, seconds: float) -> None:
        self._timeout = timeout
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._began = math.inf
        self._timer = self._loop.call_later(seconds, self._look)

    def begin(self) -> None:
        """Notes that a write begins."""
        self._began = self._loop.time()

    def end(self) -> None:
        """Notes that the write is done."""
        self._began = math.inf

    def stop(self) -> None:
        """Cancels the timer."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        left = min(self._began, now) + self._seconds - now
        if left <= 0:
            self._timeout.reschedule(now)
        else:
            self._timer = self._loop.call_later(left, self._look)


@contextlib.asynccontextmanager
async def _patient_writes(seconds: float) -> AsyncIterator[_WriteWatch]:
    """Watches writes in the block; raises SlowClient if one takes longer than `seconds`."""
    try:
        async with asyncio.timeout(None) as timeout:
            watch = _WriteWatch(timeout, seconds)
            try:
                yield watch
            finally:
                watch.stop()
    except TimeoutError:
        if not timeout.expired():
            raise
        raise SlowClient(f"nothing was taken for {seconds:g} s") from None


async def _abort(context: grpc.aio.ServicerContext, error: ForedraftError) -> None:
    """Aborts a call with the gRPC status that `gateway.errors` has for the error."""
    said = http_error(error)
    number = grpc.StatusCode[said.grpc].value[0]
    await errors.abort(context, errors.to_status(error, (said.code or "").upper(), number))


def _grammar(given: inference_pb2.Grammar) -> Grammar | None:
    kind = given.WhichOneof("kind")
    if kind == "json_object":
        return ANY_OBJECT if given.json_object else None
    if kind in ("json_schema", "structural_tag"):
        read_json(getattr(given, kind), "grammar")
    return None if kind is None else Grammar(GrammarKind(kind), getattr(given, kind))


def _authorization(context: grpc.aio.ServicerContext) -> str:
    found = dict(context.invocation_metadata() or ()).get("authorization", "")
    return found if isinstance(found, str) else ""


def _names(request: inference_pb2.GenerateRequest) -> dict[str, str]:
    """Maps internal field names to paths in the message."""
    fields = inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    return {
        **{name: f"sampling.{name}" for name in fields},
        "prompt": request.WhichOneof("prompt") or "prompt",
        "messages": "chat.messages",
        "continue_final_message": "chat.continue_final_message",
        "tools": "chat.functions",
        "tool_choice": "chat.function_name",
        **({} if request.sampling.HasField("grammar") else {"grammar": "chat.functions"}),
    }


def _was_aborted(chunk: Chunk) -> bool:
    return chunk.completion is not None and chunk.completion.reason is FinishReason.CANCELLED


def _response(job: Job, chunk: Chunk, tokenizer: Tokenizer) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse(
        request_id=job.name,
        index=chunk.index,
        text=chunk.text,
        tokens=[_token(job, token) for token in chunk.tokens],
    )
    if chunk.prompt_logprobs:
        said = echoed(
            job.prompt, job.sampling.prompt_logprobs_from, chunk.prompt_logprobs, tokenizer
        )
        response.prompt_tokens.extend(_token(job, token) for token in said)
    if chunk.completion is not None:
        response.completion.CopyFrom(_completion(chunk.completion))
    return response


def _token(job: Job, token: OutputToken) -> inference_pb2.Token:
    message = inference_pb2.Token(id=token.id, text=token.text)
    if job.return_provenance and token.drafted is not None:
        message.provenance = (
            inference_pb2.PROVENANCE_DRAFT if token.drafted else inference_pb2.PROVENANCE_TARGET
        )
    if token.logprob is not None:
        message.logprob = token.logprob.logprob
        for other, logprob in zip(
            token.logprob.top_tokens, token.logprob.top_logprobs, strict=True
        ):
            message.alternatives.add(id=other, logprob=logprob)
    return message


def _completion(completion: Completion) -> inference_pb2.Completion:
    account = completion.account
    return inference_pb2.Completion(
        finish_reason=inference_pb2.FINISH_REASON_STOP
        if completion.reason is FinishReason.STOP
        else inference_pb2.FINISH_REASON_LENGTH,
        stop_text=completion.stop_text or "",
        stop_token=completion.stop_token,
        prompt_tokens=account.prompt_tokens,
        completion_tokens=completion.completion_tokens,
        cached_tokens=account.cached_tokens,
        seed=completion.seed,
        speculation=inference_pb2.SpeculationStats(
            verify_steps=account.verify_steps,
            drafted_tokens=account.drafted_tokens,
            accepted_tokens=account.accepted_tokens,
            accept_length=completion.accept_length,
            accept_rate=completion.accept_rate,
            lossy=account.lossy,
        ),
    )
