"""POST /v1/completions and /v1/chat/completions, GET /v1/models."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from foredraft.errors import InvalidRequest
from gateway.decoding import Chunk, Completion
from gateway.generation import Job
from gateway.http import event_stream, read, unless_disconnected
from gateway.openai import replies
from gateway.openai.schemas import ChatBody, CompletionBody, GenerationBody
from gateway.serving import MAX_BATCH, Serving

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request: its jobs (one for each prompt) and how it is answered."""

    id: str
    created: int
    body: GenerationBody
    jobs: list[Job]
    reply: replies.Reply

    @property
    def num_choices(self) -> int:
        """Choices of one job."""
        return self.jobs[0].num_choices


def make_router(serving: Serving) -> APIRouter:
    """The routes over one model."""
    router = APIRouter(tags=["OpenAI"])
    limit = serving.config.max_body_bytes

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [replies.model(serving)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        serving.check_model(name)
        return replies.model(serving)

    @router.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Response:
        body = await read(request, CompletionBody, limit)
        return await _answer(serving, request, await _completion_call(serving, body))

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        body = await read(request, ChatBody, limit)
        return await _answer(serving, request, await _chat_call(serving, body))

    return router


async def _completion_call(serving: Serving, body: CompletionBody) -> Call:
    serving.check_model(body.model)
    body.check()
    prompts = body.prompts()
    if not 1 <= len(prompts) <= MAX_BATCH:
        raise InvalidRequest("prompt", f"give 1 to {MAX_BATCH} prompts, not {len(prompts)}")
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = body.sampling(max_tokens, body.logprobs)
    call_id = f"cmpl-{uuid.uuid4().hex}"
    jobs, echoes = [], []
    for i, prompt in enumerate(prompts):
        ids = await serving.encode(prompt) if isinstance(prompt, str) else prompt
        jobs.append(
            _job(serving, body, ids, sampling, f"{call_id}-{i}", body.max_tokens is not None)
        )
        if body.echo:
            echoes.append(prompt if isinstance(prompt, str) else await serving.decode(ids))
    reply = replies.CompletionReply(serving.tokenizer, echoes)
    return Call(call_id, int(time.time()), body, jobs, reply)


async def _chat_call(serving: Serving, body: ChatBody) -> Call:
    serving.check_model(body.model)
    body.check()
    messages = [message.rendered() for message in body.messages]
    try:
        ids = await serving.encode_chat(messages, **(body.chat_template_kwargs or {}))
    except TypeError as error:
        raise InvalidRequest("chat_template_kwargs", str(error)) from None
    given = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    max_tokens = max(1, serving.info.context_length - len(ids)) if given is None else given
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = body.sampling(max_tokens, logprobs)
    call_id = f"chatcmpl-{uuid.uuid4().hex}"
    job = _job(serving, body, ids, sampling, call_id, given is not None, "messages")
    return Call(call_id, int(time.time()), body, [job], replies.ChatReply(serving.tokenizer))


def _job(
    serving: Serving,
    body: GenerationBody,
    ids: list[int],
    sampling: Any,
    name: str,
    max_given: bool,
    field: str = "prompt",
) -> Job:
    return serving.job(
        ids,
        sampling,
        prompt_field=field,
        max_new_tokens_given=max_given,
        name=name,
        stop=body.stops,
        num_choices=1 if body.n is None else body.n,
        skip_special_tokens=body.skip_special_tokens is not False,
        keep_stop=bool(body.include_stop_str_in_output),
        return_provenance=bool(body.return_provenance),
        speculation=None if body.speculation is None else body.speculation.params(),
        priority=body.priority or 0,
        timeout=body.timeout,
    )


async def _answer(serving: Serving, request: Request, call: Call) -> Response:
    if call.body.stream_options is not None and not call.body.stream:
        raise InvalidRequest("stream_options", "needs stream: true")
    if call.body.stream:
        return await event_stream(_events(serving, call))
    return JSONResponse(await unless_disconnected(request, _whole(serving, call)))


async def _whole(serving: Serving, call: Call) -> dict[str, Any]:
    """All choices at once."""

    async def collect(job: Job) -> list[Chunk]:
        stream = serving.generator.stream(job, whole=True)
        async with contextlib.aclosing(stream) as chunks:
            found = [chunk async for chunk in chunks]
        return sorted(found, key=lambda chunk: chunk.index)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(collect(job)) for job in call.jobs]
    choices, ends = [], []
    for i, task in enumerate(tasks):
        for chunk in task.result():
            assert chunk.completion is not None
            ends.append(chunk.completion)
            index = i * call.num_choices + chunk.index
            choices.append(call.reply.choice(index, i, chunk, call.body))
    return {
        "id": call.id,
        "object": call.reply.whole_object,
        "created": call.created,
        "model": serving.info.model,
        "choices": choices,
        "usage": replies.usage(ends, call.num_choices),
        "seed": call.jobs[0].sampling.seed,
    }


async def _events(serving: Serving, call: Call) -> AsyncIterator[dict[str, Any]]:
    """Chunks of all choices as they come."""
    include_usage = call.body.stream_options is not None and call.body.stream_options.include_usage
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
    async with contextlib.aclosing(_merged(serving, call)) as merged:
        async for i, chunk in merged:
            index = i * call.num_choices + chunk.index
            is_first = index not in started
            started.add(index)
            for choice in call.reply.deltas(index, i, chunk, call.body, is_first):
                yield {**base, "choices": [choice]}
            if chunk.completion is not None:
                ends.append(chunk.completion)
    if include_usage:
        yield {**base, "choices": [], "usage": replies.usage(ends, call.num_choices)}


async def _merged(serving: Serving, call: Call) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Chunks of all jobs, each with its job's index."""
    if len(call.jobs) == 1:
        async with contextlib.aclosing(serving.generator.stream(call.jobs[0])) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk] | BaseException | None] = asyncio.Queue(64)

    async def pump(i: int, job: Job) -> None:
        try:
            async with contextlib.aclosing(serving.generator.stream(job)) as chunks:
                async for chunk in chunks:
                    await queue.put((i, chunk))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(i, job)) for i, job in enumerate(call.jobs)]
    try:
        remaining = len(tasks)
        while remaining:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                remaining -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
