"""What the HTTP routes share: bounded bodies, validation with the client's field names, server-sent events, disconnects."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.errors import ForedraftError, InvalidRequest, Unavailable
from foredraft.telemetry.logging import bind_request_id, new_request_id
from foredraft.telemetry.tracing import bind_traceparent
from gateway import envelopes, errors
from gateway.errors import BodyTooLarge, SlowClient
from gateway.validation import invalid_request

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Pydantic notes every error that it finds, and some kilobytes for each: of millions of wrong items, the first is enough.
Items = Annotated[list[T], Field(fail_fast=True)]
MAX_OBJECTS = 65_536
Objects = Annotated[list[T], Field(fail_fast=True, max_length=MAX_OBJECTS)]
BODIES_AT_A_TIME = 32  # of the largest size; smaller ones are more
MAX_MEMBERS = 16_384  # of one object: its unknown names and wrong values are all noted, too

DONE = b"data: [DONE]\n\n"
_SEND = "foredraft.send"


class Body(BaseModel):
    """A request body: types as JSON has them, no NaN, and no field that would be silently left out.

    Attributes:
        remedies: What to send instead of fields that are not known here, by their names.
    """

    remedies: ClassVar[Mapping[str, str]] = {}
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


B = TypeVar("B", bound=Body)


class Bounds:
    """What the server puts up with.

    Args:
        body_bytes: Largest body.
        seconds: For a body to arrive.
    """

    def __init__(self, body_bytes: int, seconds: float) -> None:
        self.body_bytes = body_bytes
        self.seconds = seconds
        self.all_bytes = BODIES_AT_A_TIME * body_bytes  # of bodies that are arriving, together
        self._arriving: dict[Arrival, None] = {}  # oldest first
        self._sum = 0

    @contextlib.contextmanager
    def arriving(self, timeout: asyncio.Timeout) -> Iterator["Arrival"]:
        """A body, from its first byte to its last, which `timeout` can end."""
        arrival = Arrival(timeout)
        self._arriving[arrival] = None
        try:
            yield arrival
        finally:
            del self._arriving[arrival]
            self._sum -= arrival.num_bytes

    def add(self, arrival: "Arrival", num_bytes: int) -> None:
        """More of a body is there. Where all are too much, the one that began first is given up."""
        arrival.num_bytes += num_bytes
        self._sum += num_bytes
        if self._sum > self.all_bytes:
            first = next((each for each in self._arriving if not each.is_given_up), None)
            if first is not None:
                first.give_up()


class Arrival:
    """A body that is arriving."""

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self.num_bytes = 0
        self.is_given_up = False
        self._timeout = timeout

    def give_up(self) -> None:
        """Ends it now."""
        self.is_given_up = True
        if not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())


async def read(request: Request, model: type[B], bounds: Bounds) -> B:
    """The body as a model.

    Raises:
        BodyTooLarge: Over `bounds.body_bytes`.
        SlowClient: It did not arrive in time.
        Unavailable: Too many bodies arrive at a time.
        InvalidRequest: Not JSON, or a field is wrong; names it.
    """
    max_bytes = bounds.body_bytes
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise InvalidRequest(
            "body", f"is encoded by {encoding[:40]!r}; only plain bodies are taken"
        )
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > max_bytes:
        raise BodyTooLarge(f"the body has {length} bytes; at most {max_bytes} are taken")
    chunks: list[bytes] = []
    arrival = None
    try:
        async with asyncio.timeout(bounds.seconds) as timeout:
            with bounds.arriving(timeout) as arrival:
                async for chunk in request.stream():
                    bounds.add(arrival, len(chunk))
                    if arrival.num_bytes > max_bytes:
                        raise BodyTooLarge(f"the body has more than {max_bytes} bytes")
                    chunks.append(chunk)
    except TimeoutError:
        if arrival is not None and arrival.is_given_up:
            raise Unavailable(
                "the bodies of other requests need the room; try again in a second"
            ) from None
        raise SlowClient(f"the body did not arrive within {bounds.seconds:g} s") from None
    body = b"".join(chunks) or b"{}"
    _check_members(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise invalid_request(error, body, model, model.remedies) from None


def _check_members(body: bytes) -> None:
    """Raises InvalidRequest where an object has more than MAX_MEMBERS members."""
    if body.count(b":") <= MAX_MEMBERS:
        return
    try:
        parts = [from_json(body)]
    except ValueError:
        return  # validation says what is wrong with it
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if len(part) > MAX_MEMBERS:
                raise InvalidRequest(
                    "body", f"has an object of {len(part)} members; at most {MAX_MEMBERS} are taken"
                )
            part = part.values()
        parts.extend(each for each in part if isinstance(each, dict | list))


def refuse(values: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raises InvalidRequest for the first field that was given but cannot be honoured."""
    for field, reason in reasons.items():
        if values.get(field) not in (None, False, [], {}):
            raise InvalidRequest(field, reason)


def error_response(error: Exception, path: str) -> JSONResponse:
    """An exception as the route at a path says it."""
    http = errors.http_error(error)
    if http.status >= 500 and not isinstance(error, ForedraftError):
        logger.error("a request failed", exc_info=error)
    return JSONResponse(envelopes.envelope(error, path), http.status, errors.headers(error))


class DirectSend:
    """ASGI around an application, which lets its event streams pass the middlewares by."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_SEND] = send
        await self._app(scope, receive, send)


class HeadAsGet:
    """ASGI around an application: HEAD is GET whose body the server leaves out, which load balancers ask for."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            # The server looks at the scope that it made when it leaves the body out.
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class EventStream(Response):
    """Objects as server-sent events, an error as the last of them, then [DONE].

    A client that goes away, or is cut off because it takes nothing, closes `items` at once.

    Args:
        first: The first object.
        rest: The others.
        failure: What an error reads as.
        done: The last event; empty for none.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: Any,
        rest: AsyncGenerator[Any, None],
        failure: Callable[[Exception], Any] = errors.envelope,
        done: bytes = DONE,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._failure = failure
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        # What wraps `send` looks at the start of an answer alone.
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
    """An object as a server-sent event; one that is encoded already stays as it is."""
    return item if isinstance(item, bytes) else f"data: {_encode(item)}\n\n".encode()


async def event_stream(
    request: Request, items: AsyncGenerator[Any, None], **options: Any
) -> EventStream:
    """Streams objects. What fails before the first of them is raised, so that it gets a status of its own.

    Args:
        request: Who asks.
        items: The objects.
        **options: Those of EventStream.
    """

    async def first() -> Any:
        return await anext(items)

    try:
        return EventStream(await unless_disconnected(request, first()), items, **options)
    except BaseException:
        await items.aclose()
        raise


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    Raises:
        ClientDisconnect: It has gone.
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


@contextlib.contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Errors raised inside name fields as the client wrote them: `names` maps ours to theirs."""
    with naming_by(lambda field: names.get(field, field)):
        yield


@contextlib.contextmanager
def naming_by(name: Callable[[str], str]) -> Iterator[None]:
    """Errors raised inside name fields as the client wrote them: `name` turns ours into theirs."""
    try:
        yield
    except InvalidRequest as error:
        theirs = name(error.field)
        if theirs == error.field:
            raise
        raise type(error)(theirs, error.message) from error


class RequestNames:
    """ASGI middleware: every request has a name, the client's x-request-id or a new one, in logs and in the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if 0 < len(given) <= 128 and given.isprintable() else new_request_id()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        with bind_request_id(name), bind_traceparent(headers.get("traceparent", "")):
            await self._app(scope, receive, named)
