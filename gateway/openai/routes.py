"""POST /v1/completions and /v1/chat/completions, GET /v1/models."""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from foredraft.errors import InvalidRequest
from gateway.bodies import read
from gateway.decoding import Completion
from gateway.event_streams import event_stream, unless_disconnected
from gateway.field_names import naming_by
from gateway.job_checks import check_batch
from gateway.jobs import Job
from gateway.openai import chats, replies
from gateway.openai.plain_events import PlainEvents
from gateway.openai.schemas import ChatBody, CompletionBody, GenerationBody
from gateway.openapi import reads
from gateway.serving import Serving

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request: its jobs (one for each prompt) and the renderer of its answer."""

    id: str
    created: int
    jobs: list[Job]
    reply: replies.Reply

    @property
    def body(self) -> GenerationBody:
        """The request's body."""
        return self.reply.body

    @property
    def num_choices(self) -> int:
        """Number of choices of one job."""
        return self.jobs[0].num_choices

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(len(job.prompt) for job in self.jobs)


def make_router(serving: Serving) -> APIRouter:
    """Creates the routes."""
    router = APIRouter(tags=["OpenAI"])
    bounds = serving.bounds

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [replies.model(serving)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model, by its name."""
        serving.check_model(name)
        return replies.model(serving)

    @router.post("/v1/completions", response_model=None, openapi_extra=reads(CompletionBody))
    async def completions(request: Request) -> Response:
        """Goes on with a prompt, or with each of several."""
        body = await read(request, CompletionBody, bounds)
        with naming_by(body.field):
            return await _answer(serving, request, await _completion_call(serving, body))

    @router.post("/v1/chat/completions", response_model=None, openapi_extra=reads(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation."""
        body = await read(request, ChatBody, bounds)
        with naming_by(body.field):
            return await _answer(serving, request, await _chat_call(serving, body))

    return router


async def _completion_call(serving: Serving, body: CompletionBody) -> Call:
    serving.check_model(body.model)
    body.check()
    prompts = body.prompts()
    check_batch("prompt", len(prompts), 1 if body.n is None else body.n)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    words = serving.bad_words(body.bad_words)
    sampling = body.sampling(max_tokens, body.logprobs, body.grammar(), words)
    call_id = body.request_id or f"cmpl-{uuid.uuid4().hex}"
    jobs, echoes = [], []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            ids = await serving.encode(prompt, body.add_special_tokens is not False)
        else:
            ids = prompt
        options = body.options(f"{call_id}-{i}" if i else call_id, call_id)
        must_fit = body.max_tokens is not None
        jobs.append(
            serving.job(
                body.truncated(ids), sampling, options, must_fit=must_fit, may_be_empty=True
            )
        )
        if body.echo:
            echoes.append(prompt if isinstance(prompt, str) else await serving.decode(ids))
    reply = replies.CompletionReply(serving.tokenizer, body, echoes, [job.prompt for job in jobs])
    return Call(call_id, int(time.time()), jobs, reply)


async def _chat_call(serving: Serving, body: ChatBody) -> Call:
    call_id = body.request_id or f"chatcmpl-{uuid.uuid4().hex}"
    chat = await chats.prepare(serving, body, call_id, may_be_empty=True)
    reply = replies.ChatReply(serving.tokenizer, body, chat.use, chat.form, chat.job.prompt)
    return Call(call_id, int(time.time()), [chat.job], reply)


async def _answer(serving: Serving, request: Request, call: Call) -> Response:
    if call.body.stream_options is not None and not call.body.stream:
        raise InvalidRequest("stream_options", "needs stream: true")
    if call.body.stream and call.body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs", "comes with whole answers alone: leave stream out")
    if call.body.stream:
        return await event_stream(request, _events(serving, call), field=call.body.field)
    return JSONResponse(await unless_disconnected(request, _whole(serving, call)))


async def _whole(serving: Serving, call: Call) -> dict[str, Any]:
    """Returns the answer with all choices at once."""
    choices, ends = [], []
    for i, chunks in enumerate(await serving.generator.complete(call.jobs)):
        for chunk in chunks:
            assert chunk.completion is not None
            ends.append(chunk.completion)
            index = i * call.num_choices + chunk.index
            choices.append(call.reply.choice(index, i, chunk))
    beside = {} if (of := call.reply.prompt_logprobs) is None else {"prompt_logprobs": of}
    return {
        **beside,
        "id": call.id,
        "object": call.reply.whole_object,
        "created": call.created,
        "model": serving.info.model,
        "choices": choices,
        "usage": replies.usage(ends, call.num_choices, call.reply.num_reasoning_tokens()),
        "seed": call.jobs[0].sampling.seed,
    }


async def _events(serving: Serving, call: Call) -> AsyncGenerator[dict[str, Any] | bytes, None]:
    """Yields chunks of all choices as they come, plain ones already encoded."""
    options = call.body.stream_options
    include_usage = options is not None and options.include_usage
    continuous = options is not None and bool(options.continuous_usage_stats)
    base = {
        "id": call.id,
        "object": call.reply.chunk_object,
        "created": call.created,
        "model": serving.info.model,
    }
    if include_usage:
        base["usage"] = None
    ends: list[Completion] = []
    started: set[int] = set()
    num_tokens = 0
    num_choices = call.num_choices
    events = PlainEvents(call.reply, base)
    async with contextlib.aclosing(serving.generator.stream_all(call.jobs)) as merged:
        async for i, chunk in merged:
            index = i * num_choices + chunk.index
            is_first = index not in started
            started.add(index)
            num_tokens += len(chunk.tokens)
            if continuous:
                base["usage"] = replies.usage_so_far(call.num_prompt_tokens, num_tokens)
            plain = None if is_first else events.render(index, chunk)
            if plain is not None:
                yield plain
                continue
            for choice in call.reply.deltas(index, i, chunk, is_first):
                yield {**base, "choices": [choice]}
            if chunk.completion is not None:
                ends.append(chunk.completion)
    if include_usage:
        yield {
            **base,
            "choices": [],
            "usage": replies.usage(ends, call.num_choices, call.reply.num_reasoning_tokens()),
        }
