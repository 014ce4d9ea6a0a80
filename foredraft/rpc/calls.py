"""What every call of a gRPC server gets: a request id, a trace, and its exceptions as statuses."""

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from foredraft.errors import ForedraftError, InvalidRequest
from foredraft.rpc import errors
from foredraft.telemetry.logging import bind_request_id, new_request_id
from foredraft.telemetry.tracing import bind_traceparent

logger = logging.getLogger(__name__)


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Turns exceptions of asynchronous handlers into statuses and gives every call a request id.

    The id is the client's `x-request-id` metadata or a new one. Its `traceparent` is the parent of
    the call's spans.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        metadata = dict(handler_call_details.invocation_metadata or ())
        given = metadata.get("x-request-id", "")
        name = given if isinstance(given, str) and 0 < len(given) <= 128 else new_request_id()
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behaviour = getattr(handler, kind)
            if behaviour is None:
                continue
            wrapped = _wrap(behaviour, method, name, str(metadata.get("traceparent", "")))
            return getattr(grpc, f"{kind}_rpc_method_handler")(
                wrapped,
                _decoder(handler.request_deserializer)
                if kind.startswith("unary")
                else handler.request_deserializer,
                handler.response_serializer,
            )
        return handler


@dataclass(frozen=True, slots=True)
class _Undecodable:
    """Stands for a message that cannot be decoded."""

    why: str


def _decoder(decode: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """Wraps a decoder so that malformed bytes give `_Undecodable`. gRPC itself would answer with an
    internal error, and log it.
    """

    def decoded(message: bytes) -> Any:
        try:
            return message if decode is None else decode(message)
        except DecodeError as error:
            return _Undecodable(str(error))

    return decoded


def _checked(request: Any) -> Any:
    """Returns a request that could be decoded.

    Raises:
        InvalidRequest: The request's bytes are no message of this call.
    """
    if isinstance(request, _Undecodable):
        raise _undecodable(request.why)
    return request


def _undecodable(why: str) -> InvalidRequest:
    return InvalidRequest("request", f"is no message of this call: {why}")


def _wrap(behaviour: Any, method: str, request_id: str, traceparent: str) -> Any:
    if inspect.isasyncgenfunction(behaviour):

        async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            with bind_request_id(request_id), bind_traceparent(traceparent):
                try:
                    async with aclosing(behaviour(_checked(request), context)) as responses:
                        async for response in responses:
                            yield response
                except Exception as error:
                    await _fail(context, error, method, request_id)

        return stream
    if inspect.iscoroutinefunction(behaviour):

        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            with bind_request_id(request_id), bind_traceparent(traceparent):
                try:
                    return await behaviour(_checked(request), context)
                except Exception as error:
                    await _fail(context, error, method, request_id)

        return call
    return behaviour


async def _fail(
    context: grpc.aio.ServicerContext, error: Exception, method: str, request_id: str
) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, DecodeError):  # of a message in a client's stream
        error = _undecodable(str(error))
    if isinstance(error, ForedraftError):
        logger.debug("%s: %s", method, error)
        await errors.abort(context, errors.to_status(error))
    logger.error("%s failed", method, exc_info=error)
    await errors.abort(context, errors.internal_status(request_id))
