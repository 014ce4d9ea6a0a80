"""The gRPC server of every service: health, reflection, errors as statuses, drain on SIGTERM.

Usage, on one event loop::

    server = RpcServer(config.listen)
    server.add(add_DraftServiceServicer_to_server, servicer, "foredraft.api.draft.v1.DraftService")
    await server.start()          # health says NOT_SERVING
    ...                           # load what is needed
    await server.set_serving()
    await serve(server, drain_timeout=30)
"""

import asyncio
import contextlib
import inspect
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from foredraft.errors import ConfigError, ForedraftError, InvalidRequest
from foredraft.rpc import address, errors
from foredraft.rpc.address import Address
from foredraft.rpc.channel import MAX_MESSAGE_BYTES, options
from foredraft.rpc.lifetime import stop_event
from foredraft.rpc.tls import Identity
from foredraft.telemetry.logging import bind_request_id, new_request_id
from foredraft.telemetry.tracing import bind_traceparent

logger = logging.getLogger(__name__)

REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
_SERVER_OPTIONS = [
    # A port that another process holds is an error, not a port shared with it.
    ("grpc.so_reuseport", 0),
    # Clients send keepalives every 20 s; fewer seconds between them count as abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]
# Maximum time without calls of a public port's connection; clients reconnect by themselves.
_IDLE_SECONDS = 300
# How long calls may go on after the drain, before they are cancelled.
_STOP_SECONDS = 1.0
# How long a call waits for a service that loads what it needs; less than clients wait.
_LOADING_SECONDS = 1.5
# How often it is looked whether gRPC still listens.
_WATCH_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Strangers:
    """Limits for clients of a public port, which the service does not know.

    Attributes:
        connections: Maximum number of connections of a port.
        streams: Maximum number of concurrent calls of one connection.
        seconds: Time in which a connection must start HTTP/2.
    """

    connections: int
    streams: int
    seconds: float

    def options(self) -> list[tuple[str, int]]:
        """Returns the limits as gRPC options."""
        return [
            ("grpc.max_allowed_incoming_connections", self.connections),
            ("grpc.max_concurrent_streams", self.streams),
            ("grpc.server_handshake_timeout_ms", round(self.seconds * 1000)),
            ("grpc.max_connection_idle_ms", _IDLE_SECONDS * 1000),
        ]


class RpcServer:
    """A grpc.aio server with health, reflection and Foredraft's errors.

    Made inside the running event loop.

    Args:
        listen: `host:port` (port 0: a free one) or `unix:/path`, whose socket gets mode 0600.
        max_message_bytes: Larger messages are refused with RESOURCE_EXHAUSTED.
        identity: Certificate for TLS; not used for Unix sockets.
        socket: A Unix socket to listen on besides; empty for none.
        strangers: Limits for a port that anybody may connect to.
    """

    def __init__(
        self,
        listen: str | Address,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        identity: Identity | None = None,
        socket: str = "",
        strangers: Strangers | None = None,
    ) -> None:
        self._listen = listen if isinstance(listen, Address) else address.parse(listen)
        self._identity = identity
        self._socket = address.parse(socket) if socket else None
        bounds = strangers.options() if strangers is not None else []
        self._options = [*options(max_message_bytes), *_SERVER_OPTIONS, *bounds]
        self.server = self._make()
        self._health = health.aio.HealthServicer()
        self._added: list[tuple[Callable[[Any, Any], None], Any]] = []
        self._names: list[str] = []
        self._crashed: list[grpc.aio.Server] = []
        self._watch: asyncio.Task[None] | None = None
        self.address = self._listen

    def add(self, add_to_server: Callable[[Any, Any], None], servicer: Any, name: str) -> None:
        """Adds a service by its generated `add_*Servicer_to_server` and its full name."""
        self._added.append((add_to_server, servicer))
        self._names.append(name)

    async def start(self) -> Address:
        """Listens, with health NOT_SERVING. Returns the address with the bound port.

        Raises:
            ConfigError: The address cannot be had.
        """
        await self.set_serving(False)
        self.address = await self._open(self._listen)
        self._watch = asyncio.create_task(self._keep_open(), name=f"listening on {self.address}")
        logger.info("listening on %s", self.address)
        return self.address

    async def set_serving(self, serving: bool = True) -> None:
        """Sets the health of the server and of all its services."""
        for name in ("", *self._names):
            await self.set_health(name, serving)

    async def set_health(self, name: str, serving: bool) -> None:
        """Sets the health of one name.

        "" is the whole server; names need not be services, such as "draft".
        """
        status = health_pb2.HealthCheckResponse
        await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace: float = _STOP_SECONDS) -> None:
        """Stops the server.

        Health becomes NOT_SERVING for good, new calls are refused, running calls are cancelled
        after `grace` seconds, and the address is freed.
        """
        await self._health.enter_graceful_shutdown()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await asyncio.gather(*(server.stop(grace) for server in (*self._crashed, self.server)))
        for where in (self.address, self._socket):
            if where is not None and where.is_unix:
                Path(where.path).unlink(missing_ok=True)

    def _make(self) -> grpc.aio.Server:
        return grpc.aio.server(interceptors=[ErrorInterceptor()], options=self._options)

    async def _open(self, where: Address) -> Address:
        for add_to_server, servicer in self._added:
            add_to_server(servicer, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        _add_reflection(self.server, [*self._names, health.SERVICE_NAME])
        bound = _bind(self.server, where, self._identity)
        if self._socket is not None:
            _bind(self.server, self._socket, None)
        await self.server.start()
        return bound

    async def _keep_open(self) -> None:
        """Listens again where gRPC stops by itself; running calls continue. grpcio 1.84 and 1.85
        stop after one request whose path is not UTF-8.
        """
        while True:
            try:
                if not await self.server.wait_for_termination(_WATCH_SECONDS):
                    return
            except Exception as error:
                logger.error("gRPC stopped listening on %s: %s", self.address, error)
                self._crashed.append(self.server)
                await self._reopen()

    async def _reopen(self) -> None:
        while True:
            self.server = self._make()
            try:
                await self._open(self.address)
                return
            except ConfigError as error:
                # The old listener may take a moment to let go.
                logger.warning("%s; trying again", error)
                await asyncio.sleep(_WATCH_SECONDS)


async def serve(
    server: RpcServer,
    *,
    drain_timeout: float = 30.0,
    drain: Callable[[], Awaitable[None]] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then drains and stops.

    Args:
        server: A started one.
        drain_timeout: Seconds for `drain`.
        drain: Called once health says NOT_SERVING; returns when what runs has ended.
        stop: Set to stop, instead of by the signals.
    """
    event = stop or stop_event()
    await event.wait()
    await server.set_serving(False)
    if drain is not None:
        try:
            async with asyncio.timeout(drain_timeout):
                await drain()
        except TimeoutError:
            logger.warning("still busy after %g s of draining: stopping anyway", drain_timeout)
    await server.stop()


async def wait_briefly(is_open: asyncio.Event) -> None:
    """Waits a moment for a service to be open, so that who asks again and again learns it at
    once.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LOADING_SECONDS):
            await is_open.wait()


class ErrorInterceptor(grpc.aio.ServerInterceptor):
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


def _add_reflection(server: grpc.aio.Server, names: Sequence[str]) -> None:
    """Adds reflection by v1, which new clients use, and by v1alpha, whose messages have the same
    bytes.
    """
    servicer = reflection.aio.ReflectionServicer([*names, REFLECTION_V1, reflection.SERVICE_NAME])
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (REFLECTION_V1, reflection.SERVICE_NAME):
        generic = grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
        server.add_generic_rpc_handlers((generic,))


def _bind(server: grpc.aio.Server, where: Address, identity: Identity | None) -> Address:
    if where.is_unix:
        _prepare_socket(Path(where.path))
    # The socket is born with mode 0600; changing it afterwards would leave a moment in between.
    old_mask = os.umask(0o177)
    try:
        if identity is None or where.is_unix:
            port = server.add_insecure_port(where.target)
        else:
            port = server.add_secure_port(where.target, identity.server_credentials())
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {where}: the address is in use or not ours") from error
    finally:
        os.umask(old_mask)
    return where if where.is_unix else Address(host=where.host, port=port)


def _prepare_socket(path: Path) -> None:
    """Makes the directory (mode 0700) and removes the socket of a dead server."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"cannot listen on unix:{path}: it exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        # Or a server that stands still, with many waiting, would hold this up.
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass  # it has just gone
        except BlockingIOError:
            raise ConfigError(
                f"cannot listen on unix:{path}: a server there takes none in"
            ) from None
        except OSError as error:  # not ours to take away
            raise ConfigError(f"cannot listen on unix:{path}: {error}") from error
        else:
            raise ConfigError(f"cannot listen on unix:{path}: a server listens there already")
