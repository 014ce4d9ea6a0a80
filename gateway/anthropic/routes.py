"""POST /v1/messages and /v1/messages/count_tokens."""

import contextlib
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from gateway.anthropic.answers import Answer
from gateway.anthropic.conversation import Conversation
from gateway.anthropic.schemas import CountBody, MessagesBody
from gateway.bodies import read
from gateway.event_streams import event_stream, unless_disconnected
from gateway.field_names import naming_by
from gateway.jobs import Job
from gateway.openai import chats
from gateway.openai.parts import PartReader
from gateway.openai.schemas import Message
from gateway.openapi import reads
from gateway.serving import Serving


def make_router(serving: Serving) -> APIRouter:
    """Creates the routes."""
    router = APIRouter(tags=["Anthropic"])
    bounds = serving.bounds

    @router.post("/v1/messages", response_model=None, openapi_extra=reads(MessagesBody))
    async def messages(request: Request) -> Response:
        """Answers a conversation in Anthropic's form."""
        body = await read(request, MessagesBody, bounds)
        job, answer = await _prepare(serving, body)
        with naming_by(body.field):
            if body.stream:
                events = _events(serving, job, answer)
                options = {"failure": answer.failed, "done": b"", "field": body.field}
                return await event_stream(request, events, **options)
            return JSONResponse(await unless_disconnected(request, _whole(serving, job, answer)))

    @router.post("/v1/messages/count_tokens", response_model=None, openapi_extra=reads(CountBody))
    async def count_tokens(request: Request) -> Response:
        """The number of tokens of such a conversation."""
        body = await read(request, CountBody, bounds)
        body.check(bool(serving.config.reasoning_parser))
        chat = body.chat(_messages(body))
        with naming_by(body.field):
            prompt = await chats.render(serving, chat)
        return JSONResponse({"input_tokens": len(prompt.ids)})

    return router


async def _prepare(serving: Serving, body: MessagesBody) -> tuple[Job, Answer]:
    serving.check_model(body.model)
    body.check(bool(serving.config.reasoning_parser))
    # The field is required, so many ask for more than a model's context holds: what fits is
    # generated.
    most = serving.config.max_output_tokens or serving.info.context_length
    max_tokens = min(body.max_tokens, most)
    converted = body.chat(
        _messages(body),
        max_completion_tokens=max_tokens,
        stop=body.stop_sequences,
    )
    with naming_by(body.field):
        name = body.request_id or f"msg-{uuid.uuid4().hex}"
        chat = await chats.prepare(serving, converted, name, is_cut_to_context=True)
    reader = PartReader(chat.parser())
    job = chat.job
    answer = Answer(serving.info.model, reader, len(job.prompt), max_tokens, job.sampling.seed)
    return job, answer


def _messages(body: CountBody) -> list[Message]:
    talk = Conversation()
    if body.system:
        talk.instruct(body.system)
    talk.add(body.messages)
    return [Message.model_validate(message) for message in talk.messages]


async def _whole(serving: Serving, job: Job, answer: Answer) -> dict[str, Any]:
    ((chunk,),) = await serving.generator.complete([job])
    return answer.whole(chunk)


async def _events(serving: Serving, job: Job, answer: Answer) -> AsyncGenerator[bytes, None]:
    """Yields the events, the first of them once there is a token.

    So an error before that has its own HTTP status.
    """
    is_first = True
    async with contextlib.aclosing(serving.generator.stream(job)) as chunks:
        async for chunk in chunks:
            if is_first:
                yield answer.started()
                is_first = False
            for event in answer.read(chunk):
                yield event
