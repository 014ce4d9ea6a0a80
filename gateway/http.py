"""What the HTTP routes share: bounded bodies, validation with the client's field names, server-sent events, disconnects."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse

from foredraft.errors import ForedraftError, InvalidRequest
from gateway import errors
from gateway.errors import BodyTooLarge

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_FIELD = re.compile(r"(?!(?:str|int|float|bool|dict|list)$)[a-z][a-z0-9_]*")


class Body(BaseModel):
    """A request body: types as JSON has them, no NaN, and no field that would be silently left out."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


async def read(request: Request, model: type[M], max_bytes: int) -> M:
    """The body as a model.

    Raises:
        BodyTooLarge: Over `max_bytes`.
        InvalidRequest: Not JSON, or a field is wrong; names it.
    """
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > max_bytes:
        raise BodyTooLarge(f"the body has {length} bytes; at most {max_bytes} are taken")
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise BodyTooLarge(f"the body has more than {max_bytes} bytes")
        chunks.append(chunk)
    try:
        return model.model_validate_json(b"".join(chunks) or b"{}")
    except ValidationError as error:
        raise _invalid(error) from None


def _invalid(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    # Names of the branches of a union, such as `str` or `list[int]`, are no field of the client's.
    path = [str(part) for part in first["loc"] if isinstance(part, int) or _FIELD.fullmatch(part)]
    field = ".".join(path[:4])
    if first["type"] == "json_invalid":
        return InvalidRequest("body", f"is not valid JSON: {first['msg']}")
    if first["type"] == "extra_forbidden":
        return InvalidRequest(
            field, "is not a field of this request, or not one that can be honoured"
        )
    return InvalidRequest(field or "body", first["msg"])


def refuse(values: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raises InvalidRequest for the first field that was given but cannot be honoured."""
    for field, reason in reasons.items():
        if values.get(field) not in (None, False, [], {}):
            raise InvalidRequest(field, reason)


def error_response(error: Exception) -> JSONResponse:
    """An exception as HTTP says it."""
    http = errors.http_error(error)
    if http.status >= 500 and not isinstance(error, ForedraftError):
        logger.error("a request failed", exc_info=error)
    return JSONResponse(errors.envelope(error), http.status, errors.headers(error))


async def events(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    """Objects as server-sent events, an error as the last of them, then [DONE]."""
    try:
        yield _event(first)
        async for item in rest:
            yield _event(item)
    except Exception as error:
        if not isinstance(error, ForedraftError):
            logger.error("a stream failed", exc_info=error)
        yield _event(errors.envelope(error))
    yield DONE


def _event(item: Any) -> bytes:
    return (
        b"data: " + json.dumps(item, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


async def event_stream(items: AsyncIterator[Any]) -> StreamingResponse:
    """Streams objects. What fails before the first of them is raised, so that it gets a status of its own."""
    try:
        first = await anext(items)
    except StopAsyncIteration:
        return StreamingResponse(iter([DONE]), media_type="text/event-stream")
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events(first, items), media_type="text/event-stream", headers=headers)


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    Raises:
        ClientDisconnect: It has gone.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
