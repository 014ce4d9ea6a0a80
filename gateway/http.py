"""Shared parts of the HTTP routes.

These are bounded bodies, validation with the client's field names, server-sent events and
disconnects.
"""

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
from gateway import envelopes, errors, metrics
from gateway.errors import BodyTooLarge, SlowClient
from gateway.validation import invalid_request, without_idle_fields

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Pydantic records every error, with some kilobytes for each: the first of millions of wrong items
# is enough.
Items = Annotated[list[T], Field(fail_fast=True)]
MAX_OBJECTS = 65_536
Objects = Annotated[list[T], Field(fail_fast=True, max_length=MAX_OBJECTS)]
BODIES_AT_A_TIME = 32  # number of largest bodies that may arrive at once
MAX_MEMBERS = 16_384  # of one object: pydantic records every unknown name and wrong value

DONE = b"data: [DONE]\n\n"
_SEND = "foredraft.send"


class Body(BaseModel):
    """A request body: types as JSON has them, no NaN, and no field that would be silently left out.

    Attributes:
        remedies: What to send instead of fields that are not known here, by their names.
    """

    remedies: ClassVar[Mapping[str, str]] = {}
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Renamed:
    """A body whose fields have other names in the gateway."""

    def names(self) -> dict[str, str]:
        """Maps internal field names to this body's."""
        raise NotImplementedError

    def field(self, name: str) -> str:
        """Returns this body's name of an internal field."""
        return self.names().get(name, name)


B = TypeVar("B", bound=Body)


class Bounds:
    """Limits the size and the arrival time of request bodies, each and together.

    Args:
        body_bytes: Bytes of the largest body.
        seconds: Seconds in which a body must arrive.
    """

    def __init__(self, body_bytes: int, seconds: float) -> None:
        self.body_bytes = body_bytes
        self.seconds = seconds
        self.all_bytes = BODIES_AT_A_TIME * body_bytes  # sum of the bodies that are arriving
        self._arriving: dict[Arrival, None] = {}  # oldest first
        self._sum = 0
        self._refusal = ""  # of every body, once the server stops

    @contextlib.contextmanager
    def arriving(self, timeout: asyncio.Timeout) -> Iterator["Arrival"]:
        """Registers a body while it arrives; `timeout` can end its arrival."""
        arrival = Arrival(timeout)
        self._arriving[arrival] = None
        if self._refusal:
            arrival.give_up(self._refusal)
        try:
            yield arrival
        finally:
            del self._arriving[arrival]
            self._sum -= arrival.num_bytes

    def add(self, arrival: "Arrival", num_bytes: int) -> None:
        """Counts bytes of a body; if all bodies together exceed the limit, gives up the oldest."""
        arrival.num_bytes += num_bytes
        self._sum += num_bytes
        if self._sum > self.all_bytes:
            first = next((each for each in self._arriving if not each.refusal), None)
            if first is not None:
                first.give_up("the bodies of other requests need the room; try again in a second")

    def refuse_all(self, refusal: str) -> None:
        """Gives up the bodies that are arriving, and those that come later, as unavailable."""
        self._refusal = refusal
        for arrival in self._arriving:
            arrival.give_up(refusal)


class Arrival:
    """State of a body that is arriving.

    Attributes:
        num_bytes: Number of bytes that have come.
        refusal: Why the arrival was given up; empty while it goes on.
    """

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self.num_bytes = 0
        self.refusal = ""
        self._timeout = timeout

    def give_up(self, refusal: str) -> None:
        """Ends the arrival now."""
        self.refusal = refusal
        if not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())


async def read(request: Request, model: type[B], bounds: Bounds) -> B:
    """Reads a request's body and validates it as a model.

    Raises:
        BodyTooLarge: The body exceeds `bounds.body_bytes`.
        SlowClient: The body did not arrive in time.
        Unavailable: Too many bodies arrive at a time.
        InvalidRequest: The body is not JSON, or a field is wrong; the error names the field.
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
        if arrival is not None and arrival.refusal:
            raise Unavailable(arrival.refusal) from None
        raise SlowClient(f"the body did not arrive within {bounds.seconds:g} s") from None
    body = b"".join(chunks) or b"{}"
    _check_members(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        wrong = error
    if (asking := without_idle_fields(wrong, body)) is not None:
        try:
            return model.model_validate_json(asking)
        except ValidationError as error:
            wrong, body = error, asking
    raise invalid_request(wrong, body, model, model.remedies)


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
        if values.get(field) not in (None, False, [], {}, ""):
            raise InvalidRequest(field, reason)


def error_response(error: Exception, path: str) -> JSONResponse:
    """Returns the HTTP answer for an exception, in the shape that the path's API has."""
    http = errors.http_error(error)
    if http.status >= 500 and not isinstance(error, ForedraftError):
        logger.error("a request failed", exc_info=error)
    return JSONResponse(envelopes.envelope(error, path), http.status, errors.headers(error))


class DirectSend:
    """ASGI wrapper that lets event streams bypass the middlewares."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_SEND] = send
        await self._app(scope, receive, send)


class HeadAsGet:
    """ASGI wrapper that answers HEAD, which load balancers send, like GET.

    The server leaves the body out.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            # The server looks at the scope that it made when it leaves the body out.
            scope = {**scope, "method": "GET"}
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
    return item if isinstance(item, bytes) else f"data: {_encode(item)}\n\n".encode()


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


@contextlib.contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Renames fields in errors raised in the block; `names` maps internal to client names."""
    with naming_by(lambda field: names.get(field, field)):
        yield


@contextlib.contextmanager
def naming_by(name: Callable[[str], str]) -> Iterator[None]:
    """Renames fields in errors raised in the block; `name` converts internal to client names."""
    try:
        yield
    except InvalidRequest as error:
        theirs = name(error.field)
        if theirs == error.field:
            raise
        raise type(error)(theirs, error.message) from error


class RequestNames:
    """ASGI middleware that counts answers and gives every request an id, in logs and answer.

    It is the client's x-request-id, or a new one.
    """

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
                metrics.http_answers.labels(str(message["status"])).inc()
            await send(message)

        with bind_request_id(name), bind_traceparent(headers.get("traceparent", "")):
            await self._app(scope, receive, named)
