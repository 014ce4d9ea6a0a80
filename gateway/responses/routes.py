"""POST /v1/responses and /v1/responses/input_tokens; GET and DELETE of stored responses."""

import contextlib
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from foredraft.errors import InvalidRequest
from gateway.bodies import read
from gateway.decoding import Completion
from gateway.errors import UnknownPrevious, UnknownResponse
from gateway.event_streams import event_stream, unless_disconnected
from gateway.field_names import naming_by
from gateway.openai import chats
from gateway.openai.chats import Chat
from gateway.openai.parts import PartReader
from gateway.openai.schemas import Message
from gateway.openapi import reads
from gateway.responses.answers import Answer
from gateway.responses.events import Events
from gateway.responses.input_items import input_items, page
from gateway.responses.items import Conversation
from gateway.responses.schemas import CountBody, Item, ResponsesBody
from gateway.responses.store import ResponseStore, Turn, conversation
from gateway.security.limits import current_caller
from gateway.serving import Serving


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks, with the turns before it.

    Attributes:
        owner: Name of the caller that may read the response later.
        before: Turn that the request continues, or None.
        items: Input as items.
        messages: The whole conversation as messages of chat completions.
    """

    owner: str
    before: Turn | None
    items: list[dict[str, Any]]
    messages: list[Message]


@dataclass(frozen=True, slots=True)
class Call:
    """One request for an answer.

    Attributes:
        asked: What the request asks.
        chat: Conversation to answer.
        answer: Renders the response.
        events: Renders the response's events.
    """

    asked: Asked
    chat: Chat
    answer: Answer
    events: Events


def make_router(serving: Serving) -> APIRouter:
    """Creates the routes."""
    router = APIRouter(tags=["OpenAI"])
    config = serving.config
    store = ResponseStore(config.response_store_mb * 2**20, config.response_lifetime)

    @router.post("/v1/responses", response_model=None, openapi_extra=reads(ResponsesBody))
    async def create_response(request: Request) -> Response:
        """Answers a text or items; keeps the answer unless `store` is false."""
        body = await read(request, ResponsesBody, serving.bounds)
        call = await _call(serving, store, body)
        with naming_by(body.field):
            if body.stream:
                events = _events(serving, store, call)
                options = {"failure": call.events.failed, "done": b"", "field": body.field}
                return await event_stream(request, events, **options)
            return JSONResponse(await unless_disconnected(request, _whole(serving, store, call)))

    @router.post("/v1/responses/input_tokens", response_model=None, openapi_extra=reads(CountBody))
    async def count_input_tokens(request: Request) -> Response:
        """The number of tokens of such an input."""
        body = await read(request, CountBody, serving.bounds)
        asked = _asked(serving, store, body)
        with naming_by(body.field):
            prompt = await chats.render(serving, body.chat(asked.messages))
        count = {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}
        return JSONResponse(count)

    @router.get("/v1/responses/{name}", response_model=None)
    async def response(request: Request, name: str) -> Response:
        """A kept response of the same key."""
        if request.query_params.get("stream", "false") != "false":
            raise InvalidRequest("stream", "a kept response is given whole")
        found = store.get(current_caller().name, name)
        if found is None:
            raise UnknownResponse("response_id", f"there is no response {name[:80]!r}")
        return Response(found, media_type="application/json")

    @router.get("/v1/responses/{name}/input_items")
    async def response_input_items(
        name: str,
        limit: int = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        """The items that a kept response answers."""
        turn = store.turn(current_caller().name, name)
        if turn is None:
            raise UnknownResponse("response_id", f"there is no response {name[:80]!r}")
        return page(input_items(turn), limit, order, after)

    @router.delete("/v1/responses/{name}")
    async def delete_response(name: str) -> dict[str, Any]:
        """Forgets a kept response."""
        if not store.delete(current_caller().name, name):
            raise UnknownResponse("response_id", f"there is no response {name[:80]!r}")
        return {"id": name, "object": "response", "deleted": True}

    return router


def _asked(serving: Serving, store: ResponseStore, body: CountBody) -> Asked:
    serving.check_model(body.model)
    body.check()
    owner = current_caller().name
    before = None
    talk = Conversation()
    if body.previous_response_id is not None:
        before = store.turn(owner, body.previous_response_id)
        if before is None:
            raise UnknownPrevious(
                "previous_response_id",
                f"there is no response {body.previous_response_id[:80]!r}: it was not stored, is"
                " too old, or is another key's; send the whole conversation as input",
            )
        for turn in conversation(before):
            talk.add([Item.model_validate(item) for item in turn], "previous_response_id")
    given = body.input
    items = [Item(role="user", content=given)] if isinstance(given, str) else given
    talk.add(items, "input")
    if body.instructions is not None:
        talk.instruct(body.instructions)
    messages = [Message.model_validate(message) for message in talk.messages]
    dumped = [item.model_dump(exclude_unset=True) for item in items]
    return Asked(owner, before, dumped, messages)


async def _call(serving: Serving, store: ResponseStore, body: ResponsesBody) -> Call:
    asked = _asked(serving, store, body)
    name = f"resp_{secrets.token_hex(24)}"
    converted = body.chat(asked.messages)
    with naming_by(body.field):
        chat = await chats.prepare(serving, converted, body.request_id or name)
    is_stored = store.is_on and body.store is not False
    answer = Answer(name, serving.info.model, body, chat.job.sampling.seed, is_stored)
    reader = PartReader(chat.parser(), body.wants_logprobs)
    events = Events(answer, reader, serving.tokenizer)
    return Call(asked, chat, answer, events)


async def _whole(serving: Serving, store: ResponseStore, call: Call) -> dict[str, Any]:
    ((chunk,),) = await serving.generator.complete([call.chat.job])
    for _ in call.events.read(chunk):
        pass
    assert chunk.completion is not None
    return _keep(store, call, chunk.completion)


async def _events(
    serving: Serving, store: ResponseStore, call: Call
) -> AsyncGenerator[bytes, None]:
    """Yields the events, the first of them once there is a token.

    So an error before that has its own HTTP status.
    """
    events = call.events
    is_first = True
    async with contextlib.aclosing(serving.generator.stream(call.chat.job)) as chunks:
        async for chunk in chunks:
            if is_first:
                for event in events.started():
                    yield event
                is_first = False
            for event in events.read(chunk):
                yield event
            if chunk.completion is not None:
                yield events.ended(_keep(store, call, chunk.completion))


def _keep(store: ResponseStore, call: Call, end: Completion) -> dict[str, Any]:
    """Returns the whole response, and stores it unless the request forbids that."""
    response = call.answer.ended(end, call.events.num_reasoning_tokens)
    if call.answer.is_stored:
        asked = call.asked
        items = [*asked.items, *call.answer.items]
        store.put(
            asked.owner, call.answer.id, response, items, asked.before, num_inputs=len(asked.items)
        )
    return response
