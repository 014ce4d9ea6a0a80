"""uvicorn's HTTP/1.1 protocol with bounds that it lacks: size of a request's head, and time for it to arrive."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024


def bounded_protocol(seconds: float) -> type[HttpToolsProtocol]:
    """The protocol with a time of its own for heads."""
    return type("Protocol", (BoundedHttpProtocol,), {"head_seconds": seconds})


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 400 to a head over MAX_HEAD_BYTES; drops a connection whose head is not whole after `head_seconds`."""

    head_seconds = 30.0
    _head_bytes = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._timer is None:  # the body comes
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")

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
        self._timer = self.loop.call_later(self.head_seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
