"""uvicorn's HTTP/1.1 protocol with bounds on what a client may send and how long it may take.

Times are bounded for sending requests, for taking answers and for closing. Requests that offer an
upgrade are answered without it.
"""

import asyncio
import logging
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from foredraft.errors import Unavailable
from gateway.http_server.answers import error_answer, refusal
from gateway.http_server.connections import Connections, Seat

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 256
# Requests that a client may send before it has read the answer to an earlier one.
MAX_PIPELINED = 16
# A client that takes less of an answer does not read it.
LEAST_BYTES_PER_SECOND = 128
# Seconds that a client answered before it had sent everything may go on, so that it reads the
# answer.
LINGER_SECONDS = 5.0
# Headers of an offer of another protocol.
_OFFER = (b"upgrade", b"http2-settings")
_EVICTED = error_answer(
    Unavailable("the server needs the connection for others; try again in a second")
)


class BoundedHttpProtocol(HttpToolsProtocol):
    """The protocol of one connection.

    - A head that is too large gets 431 (414 for its first line), one with two Host lines or, in
      HTTP/1.1, none gets 400.
    - A head that is not whole after `seconds` closes the connection, as does a client that takes
      nothing for as long.
    - After an answer to a request that has not come whole, the connection ends: what still comes is
      thrown away.
    - While the server waits for the client, the connection may have to give way to another.

    Args:
        connections: Keeps the places of connections.
        seat: Place of this connection.
        seconds: Seconds in which a head must arrive, and between checks of what the client has
            taken.
        uvicorn: Arguments of the parent class.
    """

    def __init__(
        self, *, connections: Connections, seat: Seat, seconds: float, **uvicorn: Any
    ) -> None:
        super().__init__(**uvicorn)
        self._connections = connections
        self._seat = seat
        self._seconds = seconds
        self._wire: asyncio.Transport = None  # type: ignore[assignment]
        self._timer: asyncio.TimerHandle | None = None  # runs while a head is awaited
        self._write_timer: asyncio.TimerHandle | None = None
        self._arrived_bytes = 0  # bytes of a head, in all reads but the one that it begins in
        self._parsed_bytes = 0  # bytes of a head that the parser has found
        self._begins_now = False
        self._read = b""
        self._refusal: tuple[HTTPStatus, str] | None = None
        self._may_stay = True  # open after the answer to the newest request
        self._ignores_input = False  # nothing more is read
        self.is_ending = False  # the connection is to be closed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._wire = transport
        super().connection_made(_Wire(transport, self))  # type: ignore[arg-type]
        self._seat.evict = self._evict
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_ending = True
        self._stop_timer()
        self._stop_write_timer()
        self._connections.leave(self._seat)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            return
        self._unset_keepalive_if_required()
        self._read = data
        self._begins_now = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self._should_upgrade():
                self._read_without_offer(offer.args[0])
        except httptools.HttpParserError:
            status, why = self._refusal or (HTTPStatus.BAD_REQUEST, "the request is not HTTP/1.1")
            self._refuse(status, why)
        self._read = b""
        if self._ignores_input:
            return
        if self._timer is None and self._is_idle:  # blank lines keep nothing open
            self._start_timer()
        if self._timer is not None and not self._begins_now:
            self._arrived_bytes += len(data)
            if self._arrived_bytes > MAX_HEAD_BYTES:
                self._refuse(
                    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request's head is too large"
                )

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._arrived_bytes = self._parsed_bytes = 0
        self._begins_now = True
        if self._timer is None:
            self._start_timer()

    def on_url(self, url: bytes) -> None:
        self._parsed_bytes += len(url)
        if self._parsed_bytes > MAX_HEAD_BYTES:
            self._fail(HTTPStatus.REQUEST_URI_TOO_LONG, "the request's target is too long")
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._parsed_bytes += len(name) + len(value) + len(b": \r\n")
        if self._parsed_bytes > MAX_HEAD_BYTES:
            self._fail(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request's head is too large"
            )
        if self._timer is None:
            return  # behind a body, where nothing that counts may stand
        if len(self.headers) == MAX_HEADERS:
            self._fail(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"the request's head has more than {MAX_HEADERS} lines",
            )
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1:
            self._fail(HTTPStatus.BAD_REQUEST, "the request has more than one Host")
        if not num_hosts and self.parser.get_http_version() == "1.1":
            self._fail(HTTPStatus.BAD_REQUEST, "the request has no Host, as HTTP/1.1 demands")
        if len(self.pipeline) == MAX_PIPELINED:
            self._fail(HTTPStatus.TOO_MANY_REQUESTS, "read the answers before asking for more")
        self._parsed_bytes = 0
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is not None and cycle.scope is self.scope:
            # An answer that begins before the request is whole is the connection's last.
            self._may_stay = cycle.keep_alive
            cycle.keep_alive = False
            if self.parser.get_http_version() == "1.0":
                _answer_without_chunks(cycle)
            self._seat_follows()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        cycle = self.cycle
        if cycle is not None and cycle.scope is self.scope:
            if not cycle.response_started:
                cycle.keep_alive = self._may_stay
            self._seat_follows()

    def on_response_complete(self) -> None:
        if self._ignores_input and not (self.pipeline and not self.pipeline[-1][0].more_body):
            self.end()
        super().on_response_complete()
        self._seat_follows()

    def shutdown(self) -> None:
        self._may_stay = False
        super().shutdown()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    # Offers of another protocol.

    def _should_upgrade(self) -> bool:
        return self._get_upgrade() is not None and self.parser.get_method() != b"CONNECT"

    def _read_without_offer(self, end_of_head: int) -> None:
        """Parses a request again without its offer of an upgrade, with which the parser takes no
        body.

        Java's HTTP client offers HTTP/2 with every first request of a connection, as curl does when
        asked to.
        """
        version = self.parser.get_http_version().encode()
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name == b"connection":
                kept = [part for part in value.split(b",") if part.strip().lower() not in _OFFER]
                value = b",".join(kept)
            if name not in _OFFER and value:
                head += [name, b": ", value, b"\r\n"]
        rest = self._read[end_of_head:]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join([*head, b"\r\n", rest]))

    # Refusing, giving way, ending.

    @property
    def _is_idle(self) -> bool:
        """Whether every request was answered."""
        return self.cycle is None or self.cycle.response_complete

    def _seat_follows(self) -> None:
        """Updates whether the server waits for the client.

        While a request waits in the pipeline, another one runs.
        """
        if not self.pipeline and (self._is_idle or self.cycle.more_body):
            self._seat.wait()
        else:
            self._seat.work()

    def _fail(self, status: HTTPStatus, why: str) -> None:
        self._refusal = (status, why)
        raise ValueError(why)  # the parser makes its own error of it

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        """Answers an invalid request, and closes the connection.

        Answers to requests before it come first.
        """
        self._ignores_input = True
        self._stop_timer()
        cycle = self.cycle
        if not self._is_idle and (self.pipeline or cycle.response_started or not cycle.more_body):
            cycle.keep_alive = False
            return
        logger.debug("refused: %s", why)
        self._answer(refusal(status, why))
        self.end(lingers=True)

    def _answer(self, answer: bytes) -> None:
        """Sends an answer of the server's own, the connection's last."""
        if not self._is_idle:
            # The application hears that the client has gone, and what it says is not sent.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._wire.write(answer)

    def _evict(self) -> None:
        """Gives way to another connection."""
        if self.is_ending or self._wire.get_write_buffer_size():
            self._wire.abort()
            return
        if self._parsed_bytes or not self._is_idle:  # a part of a request has come
            self._answer(_EVICTED)
        self._close()

    def end(self, lingers: bool = False) -> None:
        """Closes the connection; if the client still sends, a little later.

        Unread bytes would have the kernel reset the connection, and the client lose the answer.
        """
        if self.is_ending:
            return
        if not (lingers or (self.cycle is not None and self.cycle.more_body)):
            self._close()
            return
        self._ignores_input = self.is_ending = True
        self._stop_timer()
        self._watch_writes()
        self._seat.wait()
        self.flow.resume_reading()
        if self._wire.can_write_eof():
            self._wire.write_eof()
        self._timer = self.loop.call_later(min(LINGER_SECONDS, self._seconds), self._close)

    def _close(self) -> None:
        self._ignores_input = self.is_ending = True
        self._stop_timer()
        self._watch_writes()
        self._wire.close()

    def _start_timer(self) -> None:
        self._arrived_bytes = 0
        self._timer = self.loop.call_later(self._seconds, self._close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # How answers are taken.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes()

    def resume_writing(self) -> None:
        if not self.is_ending:
            self._stop_write_timer()
        super().resume_writing()

    def _watch_writes(self) -> None:
        if self._write_timer is None:
            self._look_later(self._wire.get_write_buffer_size())

    def _look_later(self, before: int) -> None:
        self._write_timer = self.loop.call_later(self._seconds, self._check_writes, before)

    def _check_writes(self, before: int) -> None:
        """Cuts off a client that has taken next to nothing since the last check."""
        waiting = self._wire.get_write_buffer_size()
        if waiting and waiting > before - self._seconds * LEAST_BYTES_PER_SECOND:
            logger.info("a client took nothing for %g s: dropped", self._seconds)
            self._wire.abort()
        else:
            self._look_later(waiting)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _answer_without_chunks(cycle: RequestResponseCycle) -> None:
    """Has an answer of unknown length end with its connection, as HTTP/1.0 knows no chunks."""
    send = cycle.send
    has_length = True

    async def send_plain(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]


class _Wire:
    """A transport for uvicorn that leaves closing to the protocol."""

    def __init__(self, transport: asyncio.Transport, protocol: BoundedHttpProtocol) -> None:
        self._protocol = protocol
        self.get_extra_info = transport.get_extra_info
        self.write = transport.write
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading

    def is_closing(self) -> bool:
        """Whether nothing more is to be sent."""
        return self._protocol.is_ending

    def close(self) -> None:
        """Ends the connection once what was written is taken."""
        self._protocol.end()
