"""Answers as server-sent events, and what happens when a client goes away."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.errors import ForedraftError
from gateway import errors
from gateway.field_names import naming_by

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_SEND = "foredraft.send"


class DirectSend:
    """ASGI wrapper that lets event streams bypass the middlewares."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_SEND] = send
        await self._app(scope, receive, send)


class EventStream(Response):
    """Sends objects as server-sent events, an error as the last of them, then [DONE].

    A client that goes away, or is cut off because it takes nothing, closes `items` at once.

    Args:
        first: The first object.
        rest: The objects after the first.
        failure: Converts an error to the object sent for it.
        done: Bytes of the last event; empty for none.
        field: Converts a field's internal name in errors to the client's.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: Any,
        rest: AsyncGenerator[Any, None],
        failure: Callable[[Exception], Any] = errors.envelope,
        done: bytes = DONE,
        field: Callable[[str], str] = str,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._failure = failure
        self._done = done
        self._field = field

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        # Wrappers of `send` look only at the start of an answer.
        sender = asyncio.ensure_future(self._send(scope.get(_SEND, send)))
        gone = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({sender, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sender, gone):
                task.cancel()
            await asyncio.gather(sender, gone, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._rest) as rest:
            try:
                with naming_by(self._field):
                    await send(_body(encode_event(self._first)))
                    async for item in rest:
                        await send(_body(encode_event(item)))
            except Exception as error:
                if not isinstance(error, ForedraftError):
                    logger.error("a stream failed", exc_info=error)
                await send(_body(encode_event(self._failure(error))))
        await send(_body(self._done))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _body(event: bytes) -> Message:
    return {"type": "http.response.body", "body": event, "more_body": True}


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def encode_event(item: Any) -> bytes:
    """Encodes an object as a server-sent event; bytes are returned unchanged."""
    return item if isinstance(item, bytes) else f"data: {one_line(_encode(item))}\n\n".encode()


def one_line(text: str) -> str:
    """Escapes what ends a line for some clients, but not for JSON, in a text of JSON.

    Those that look for lines in text, and not in bytes, as httpx does, would cut an event there.
    """
    if text.isascii():
        return text
    text = text.replace("\x85", "\\u0085")
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


async def event_stream(
    request: Request, items: AsyncGenerator[Any, None], **options: Any
) -> EventStream:
    """Streams objects as server-sent events.

    An error before the first object is raised, so that the answer has the error's status.

    Args:
        request: The client's request.
        items: Objects to send.
        **options: Further arguments of EventStream.
    """

    async def first() -> Any:
        return await anext(items)

    try:
        return EventStream(await unless_disconnected(request, first()), items, **options)
    except BaseException:
        await items.aclose()
        raise


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Returns the result of `work`, which is cancelled when the client disconnects.

    Raises:
        ClientDisconnect: The client has disconnected.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
