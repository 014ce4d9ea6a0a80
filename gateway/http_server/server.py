"""uvicorn's server, accepting connections itself: each gets a place before anything is read."""

import asyncio
import contextlib
import errno
import functools
import logging
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn

from foredraft.errors import Unavailable
from gateway.http_server.answers import error_answer
from gateway.http_server.connections import Connections, Seat
from gateway.http_server.protocol import BoundedHttpProtocol

logger = logging.getLogger(__name__)

# Length of the kernel's queue of connections not accepted yet.
BACKLOG = 2048
# Most connections accepted before other work gets its turn.
ACCEPTS_AT_A_TIME = 16
# Seconds without accepting after the system had no descriptors left.
PAUSE_SECONDS = 0.05
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class HttpServer(uvicorn.Server):
    """Serves an application on one listening socket.

    Args:
        config: uvicorn's configuration.
        connections: Keeps the places of connections.
        seconds: Seconds that a client may take; see BoundedHttpProtocol.
        tls: Returns the context for a new connection; None without TLS.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        connections: Connections,
        seconds: float,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        super().__init__(config)
        self._connections = connections
        self._seconds = seconds
        self._tls = tls
        self._handshakes: set[asyncio.Task[object]] = set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens on the sockets."""
        await self.lifespan.startup()
        for listener in sockets or ():
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self._listen(listener)
        self.servers = []
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting; gives running requests a moment to end."""
        for listener in sockets or ():
            asyncio.get_running_loop().remove_reader(listener)
        for task in self._handshakes:
            task.cancel()
        await super().shutdown(sockets)

    def end_connections(self) -> None:
        """Makes every answer that begins from here on the last one of its connection.

        A client that keeps its connection would stay with a server that refuses it.
        """
        close = (b"connection", b"close")
        # uvicorn makes the second of the first, once a second.
        self.config.encoded_headers.append(close)
        self.server_state.default_headers = [*self.server_state.default_headers, close]

    def _listen(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accepts waiting connections."""
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTS_AT_A_TIME):
            try:
                connection, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTORS:
                    raise
                logger.warning("cannot take a connection in: %s", error.strerror)
                self._connections.make_room()
                loop.remove_reader(listener)
                loop.call_later(PAUSE_SECONDS, self._listen, listener)
                return
            connection.setblocking(False)
            try:
                seat = self._connections.admit(address[0], functools.partial(_cut, connection))
            except Unavailable as refusal:
                self._turn_away(connection, refusal)
                continue
            task = loop.create_task(self._take(connection, seat))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _take(self, connection: socket.socket, seat: Seat) -> None:
        """Starts the protocol, with TLS if configured, on an accepted socket."""
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            return BoundedHttpProtocol(
                connections=self._connections,
                seat=seat,
                seconds=self._seconds,
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                _loop=loop,
            )

        times: dict[str, float] = {}
        context = None if self._tls is None else self._tls()
        if context is not None:
            times = {"ssl_handshake_timeout": self._seconds, "ssl_shutdown_timeout": self._seconds}
        try:
            await loop.connect_accepted_socket(protocol, connection, ssl=context, **times)
        except (OSError, ssl.SSLError) as error:
            logger.debug("a connection was not made: %s", error)
            self._connections.leave(seat)
        except asyncio.CancelledError:
            self._connections.leave(seat)
            raise

    def _turn_away(self, connection: socket.socket, refusal: Unavailable) -> None:
        """Answers that there is no place, unless TLS is used, and closes."""
        with connection, contextlib.suppress(OSError):
            if self._tls is None:
                connection.send(error_answer(refusal))
                connection.shutdown(socket.SHUT_WR)


def _cut(connection: socket.socket) -> None:
    """Shuts down a socket that has no protocol yet, which ends its handshake."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
