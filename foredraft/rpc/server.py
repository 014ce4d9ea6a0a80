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
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from foredraft.errors import ConfigError
from foredraft.rpc import address
from foredraft.rpc.address import Address
from foredraft.rpc.calls import CallInterceptor
from foredraft.rpc.channel import INT_MAX, MAX_MESSAGE_BYTES, options
from foredraft.rpc.lifetime import stop_event
from foredraft.rpc.listening import bind
from foredraft.rpc.tls import Identity

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
            ("grpc.server_handshake_timeout_ms", min(round(self.seconds * 1000), INT_MAX)),
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
        return grpc.aio.server(interceptors=[CallInterceptor()], options=self._options)

    async def _open(self, where: Address) -> Address:
        for add_to_server, servicer in self._added:
            add_to_server(servicer, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        _add_reflection(self.server, [*self._names, health.SERVICE_NAME])
        bound = bind(self.server, where, self._identity)
        if self._socket is not None:
            bind(self.server, self._socket, None)
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
            except (ConfigError, OSError) as error:
                # The old listener may take a moment to let go, or descriptors be short.
                logger.warning("%s; trying again", error)
                await asyncio.sleep(_WATCH_SECONDS)


async def serve(
    server: RpcServer,
    *,
    drain_timeout: float = 30.0,
    drain: Callable[[], Awaitable[None]] | None = None,
    stop: asyncio.Event | None = None,
    leaves: bool = False,
) -> None:
    """Serves until SIGTERM or SIGINT, then drains and stops.

    Args:
        server: A started one.
        drain_timeout: Seconds for `drain`.
        drain: Called once health says NOT_SERVING; returns when what runs has ended.
        stop: Set to stop, instead of by the signals.
        leaves: Whether clients are sent to another server behind the same address while `drain`
            runs; calls that run go on.
    """
    event = stop or stop_event()
    await event.wait()
    await server.set_serving(False)
    stopping = asyncio.create_task(server.stop(drain_timeout)) if leaves else None
    if drain is not None:
        try:
            async with asyncio.timeout(drain_timeout):
                await drain()
        except TimeoutError:
            logger.warning("still busy after %g s of draining: stopping anyway", drain_timeout)
    await (server.stop() if stopping is None else stopping)


async def wait_briefly(is_open: asyncio.Event) -> None:
    """Waits a moment for a service to be open, so that who asks again and again learns it at
    once.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LOADING_SECONDS):
            await is_open.wait()


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
