"""uvicorn's HTTP/1.1 protocol with bounds that it lacks: size of a request's head, time for it to arrive, time for an
answer to be taken. Requests that offer an upgrade are answered as they are."""

import asyncio
import logging
import sys

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
# What an offer of another protocol consists of.
_OFFER = (b"upgrade", b"http2-settings")


def bounded_protocol(seconds: float) -> type[HttpToolsProtocol]:
    """The protocol with a time of its own for heads and for taking answers."""
    return type("Protocol", (BoundedHttpProtocol,), {"seconds": seconds})


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 400 to a head over MAX_HEAD_BYTES; drops a connection whose head is not whole after `seconds`,
    or whose client takes nothing of an answer for as long."""

    seconds = 30.0
    _head_bytes = 0
    _write_timer: asyncio.TimerHandle | None = None
    _timer: asyncio.TimerHandle | None = None
    _read = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._watch_writes(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        self._read = data
        super().data_received(data)
        self._read = b""
        if self._timer is None:  # the body comes
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")

    def _should_upgrade(self) -> bool:
        return self._get_upgrade() is not None and self.parser.get_method() != b"CONNECT"

    def _unsupported_upgrade_warning(self) -> None:
        """Says nothing: a client may do it with every request."""

    def handle_websocket_upgrade(self) -> None:
        """Reads a request anew without its offer of an upgrade, with which the parser takes no body.

        Java's HTTP client offers HTTP/2 with every first request of a connection, as curl does when asked to.
        """
        end_of_head = sys.exc_info()[1]
        assert isinstance(end_of_head, httptools.HttpParserUpgrade)
        version = self.parser.get_http_version().encode()
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name == b"connection":
                kept = [part for part in value.split(b",") if part.strip().lower() not in _OFFER]
                value = b",".join(kept)
            if name not in _OFFER and value:
                head += [name, b": ", value, b"\r\n"]
        rest = self._read[end_of_head.args[0] :]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join([*head, b"\r\n", rest]))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        if self._timer is None:
            self._start_timer()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def _count(self, size: int) -> None:
        """A head may also come whole in one large read."""
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the request's head is too large")  # the parser turns it into 400

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch_writes(self, before: int) -> None:
        self._write_timer = self.loop.call_later(self.seconds, self._check_writes, before)

    def _check_writes(self, before: int) -> None:
        """A client that has taken nothing since the last look is cut off, with what waits for it."""
        waiting = self.transport.get_write_buffer_size()
        if 0 < before <= waiting:
            logger.info("a client took nothing for %g s: dropped", self.seconds)
            self.transport.abort()
        else:
            self._watch_writes(waiting)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
