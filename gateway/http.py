"""Wrappers of the whole HTTP application, and errors as answers."""

import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.errors import ForedraftError
from foredraft.telemetry.logging import bind_request_id, new_request_id
from foredraft.telemetry.tracing import bind_traceparent
from gateway import envelopes, errors, metrics

logger = logging.getLogger(__name__)


def error_response(error: Exception, path: str) -> JSONResponse:
    """Returns the HTTP answer for an exception, in the shape that the path's API has."""
    http = errors.http_error(error)
    if http.status >= 500 and not isinstance(error, ForedraftError):
        logger.error("a request failed", exc_info=error)
    return JSONResponse(envelopes.envelope(error, path), http.status, errors.headers(error))


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


class RequestNames:
    """ASGI middleware that counts answers and gives every request an id, in logs and answer; it
    answers for defects, so that the connection stays.

    The id is the client's x-request-id, or a new one.
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

        has_begun = False

        async def named(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message)["x-request-id"] = name
                metrics.http_answers.labels(str(message["status"])).inc()
            await send(message)

        with bind_request_id(name), bind_traceparent(headers.get("traceparent", "")):
            try:
                await self._app(scope, receive, named)
            except Exception as error:
                if has_begun:
                    raise  # the server ends the connection, and the client sees what it lacks
                await error_response(error, scope["path"])(scope, receive, named)
