"""A small HTTP/1.1 client for load, which notes the time of each read and is cheap enough to
share a machine with the server.
"""

import asyncio
import json
import ssl
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import httptools

from foredraft.errors import ConfigError

OnBody = Callable[[float, bytes], None]


class ConnectionBroken(Exception):
    """Raised when the connection could not be made, or ended before the response did."""


@dataclass(slots=True)
class Response:
    """A response's status, headers (lower case) and body; the body of a streamed one stays
    empty.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        """Returns the body as JSON. Raises ValueError."""
        return json.loads(self.body)


class HttpClient:
    """Keeps connections open and uses each for one request at a time.

    Args:
        base_url: http:// or https:// with host and port; a path in front of all routes is kept.
        headers: Sent with every request.

    Raises:
        ConfigError: The URL is none.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        try:
            url = urllib.parse.urlsplit(base_url)
            port = url.port
        except ValueError as error:
            raise ConfigError(f"--base-url {base_url}: {error}") from None
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"--base-url {base_url}: not http://host:port")
        self._host = url.hostname
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        self._prefix = url.path.rstrip("/")
        lines = {"Host": url.netloc.rpartition("@")[2], "Accept-Encoding": "identity"}
        lines |= headers or {}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Response:
        """Sends a GET request. Raises ConnectionBroken."""
        return await self._request(f"GET {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\n", b"")

    async def post(self, path: str, body: bytes, on_body: OnBody | None = None) -> Response:
        """Sends JSON.

        Args:
            on_body: Called with (time by `time.perf_counter`, bytes) for each read of the body of a
                200; what it raises ends the request and is raised here. Without it the body is in
                the response.

        Raises:
            ConnectionBroken: See there.
        """
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return await self._request(head, body, on_body)

    def close(self) -> None:
        """Closes idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _request(self, head: str, body: bytes, on_body: OnBody | None = None) -> Response:
        data = head.encode() + body
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_open:
                continue
            try:
                return await self._exchange(connection, data, on_body)
            except ConnectionBroken:
                # The server may close an idle connection just when it is used again.
                if connection.has_begun:
                    raise
        return await self._exchange(await self._connect(), data, on_body)

    async def _exchange(
        self, connection: "_Connection", data: bytes, on_body: OnBody | None
    ) -> Response:
        try:
            response = await connection.exchange(data, on_body)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)
        else:
            connection.close()
        return response

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                _Connection, self._host, self._port, ssl=self._tls
            )
        except OSError as error:
            raise ConnectionBroken(f"cannot connect: {error.strerror or error}") from None
        return connection


class _Connection(asyncio.Protocol):
    """A connection, which makes one exchange after another."""

    def __init__(self) -> None:
        self.is_open = False
        self.has_begun = False  # whether anything of the current response has come
        self._done: asyncio.Future[Response] | None = None
        self._parts: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports derive from nothing of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._fail(ConnectionBroken(str(error or "closed by the server")))

    async def exchange(self, data: bytes, on_body: OnBody | None) -> Response:
        """Sends a request and returns when its response is complete."""
        self._done = asyncio.get_running_loop().create_future()
        self._on_body, self._response = on_body, Response()
        self.has_begun = False
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(data)
        return await self._done

    def close(self) -> None:
        """Closes the connection; an exchange in progress is cut off, as by a client that leaves."""
        self.is_open = False
        self._done = None
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._done is None or self._done.done():
            self.close()
            return
        self.has_begun = True
        self._parts = []
        try:
            self._parser.feed_data(data)
            # `_parts` holds what this read brought; an answer of several pieces that came together
            # is one arrival.
            if self._parts:
                body = b"".join(self._parts)
                if self._on_body is not None and self._response.status == 200:
                    self._on_body(now, body)
                else:
                    self._response.body += body
        except httptools.HttpParserError as error:
            self._fail(ConnectionBroken(f"not HTTP: {error}"))
        except Exception as error:
            self._fail(error)
        else:
            if self._is_complete and not self._done.done():
                self.is_open = self.is_open and self._stays_open
                self._done.set_result(self._response)

    def eof_received(self) -> bool:
        # A body without a length ends with its connection.
        if self._done is not None and self.has_begun and not self._has_length:
            self.is_open = False
            self._done.set_result(self._response)
        return False

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        self._is_complete = self._has_length = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._response.status = self._parser.get_status_code()
        headers = self._response.headers
        self._has_length = "content-length" in headers or "transfer-encoding" in headers

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = True
        self._stays_open = self._parser.should_keep_alive()

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
