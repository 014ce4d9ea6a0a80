"""The HTTP server of a metrics page: one thread for each of few, short connections."""

import logging
import socket
import threading
from collections import deque
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

MOST_CONNECTIONS = 16
SILENT_SECONDS = 10.0  # after which a connection is closed

logger = logging.getLogger(__name__)


class PageServer(ThreadingMixIn, WSGIServer):
    """Serves a metrics page; above a limit of connections it closes the oldest.

    So a client that holds connections keeps no scrape out.

    Args:
        host: Name or address to listen on.
        port: Port to listen on; 0 takes a free one.

    Raises:
        OSError: The address cannot be bound.
    """

    daemon_threads = True
    request_queue_size = 128  # a client beyond it tries again after a second

    def __init__(self, host: str, port: int) -> None:
        self._open: deque[socket.socket] = deque()
        self._lock = threading.Lock()
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handles the connection in a thread of its own; see socketserver."""
        with self._lock:
            if len(self._open) == MOST_CONNECTIONS:
                _end(self._open.popleft())
            self._open.append(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Ends the connection; see socketserver."""
        with self._lock:
            if request in self._open:
                self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors of connections: a client that left is no error of this process."""
        logger.debug("a metrics request from %s broke off", client_address, exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = SILENT_SECONDS

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: scrapes are not worth a line."""


def _end(connection: socket.socket) -> None:
    """Wakes the thread that waits for a connection; that thread closes it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        logger.debug("a metrics connection was gone already")
