"""The load's HTTP client against a server that writes its bytes by hand."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvloop

from foredraft.bench import peers
from foredraft.bench.http_client import ConnectionBroken, HttpClient
from foredraft.errors import ConfigError

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Piece = bytes | int | None
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class RawServer:
    """Answers each request with the next list of pieces, sent one by one; None closes the
    connection, and a number waits until the client has read so many.

    Attributes:
        requests: Heads and bodies that came.
        num_connections: That were made.
        num_closed: That the client closed.
        num_read: Pieces that the test's client has read.
    """

    def __init__(self, *answers: list[Piece]) -> None:
        self._answers = list(answers)
        self.requests: list[bytes] = []
        self.num_connections = self.num_closed = self.num_read = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
                self.requests.append(head + await reader.readexactly(int(length or 0)))
                for piece in self._answers.pop(0):
                    if piece is None:
                        writer.close()
                        return
                    if isinstance(piece, int):
                        while self.num_read < piece:
                            await asyncio.sleep(0.001)
                        continue
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.02)
        self.num_closed += 1
        writer.close()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[HttpClient]:
        """A client of it."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/prefix/")
        try:
            yield client
        finally:
            client.close()
            server.close()


def with_server(*answers: list[Piece]) -> Callable[[Any], None]:
    """Runs a coroutine of (server, client) on the loop that the command uses."""

    def decorate(test: Callable[[RawServer, HttpClient], Awaitable[None]]) -> Callable[[], None]:
        async def run() -> None:
            server = RawServer(*answers)
            async with server.running() as client, asyncio.timeout(120):
                await test(server, client)

        return lambda: uvloop.run(run())

    return decorate


@with_server([PLAIN], [PLAIN], [PLAIN])
async def test_a_connection_is_used_again(server: RawServer, client: HttpClient) -> None:
    assert (await client.get("/a")).body == b"ok"
    assert (await client.post("/b", b"{}")).body == b"ok"
    assert (await client.get("/c")).body == b"ok"
    assert server.num_connections == 1
    assert server.requests[1].startswith(b"POST /prefix/b HTTP/1.1\r\nHost: 127.0.0.1:")
    assert server.requests[1].endswith(b"\r\n\r\n{}")


@with_server([CHUNKED + b"3\r\nabc\r\n", 1, b"2\r\nd", 2, b"e\r\n0\r\n\r\n"], [PLAIN])
async def test_a_stream_is_handed_on_read_by_read(server: RawServer, client: HttpClient) -> None:
    reads: list[tuple[float, bytes]] = []

    def on_body(now: float, data: bytes) -> None:
        reads.append((now, data))
        server.num_read = len(reads)

    response = await client.post("/", b"{}", on_body)
    assert response.status == 200
    assert [data for _, data in reads] == [b"abc", b"d", b"e"]
    times = [now for now, _ in reads]
    assert times == sorted(times)
    # Nothing is left of it that would spoil the next.
    assert (await client.get("/")).body == b"ok"
    assert server.num_connections == 1


@with_server([b"HTTP/1.1 500 No\r\nContent-Length: 3\r\n\r\nbad"])
async def test_the_body_of_an_error_is_no_stream(server: RawServer, client: HttpClient) -> None:
    reads: list[bytes] = []
    response = await client.post("/", b"{}", lambda now, data: reads.append(data))
    assert (response.status, response.body, reads) == (500, b"bad", [])


@with_server(
    [b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"],
    [b"HTTP/1.1 200 OK\r\n\r\nuntil ", b"the end", None],
    [PLAIN],
)
async def test_connections_that_close_are_not_kept(server: RawServer, client: HttpClient) -> None:
    assert (await client.get("/")).body == b"ok"
    assert (await client.get("/")).body == b"until the end"
    assert (await client.get("/")).body == b"ok"
    assert server.num_connections == 3
    assert server.num_closed == 1


@with_server([PLAIN, None], [PLAIN])
async def test_an_idle_connection_that_was_closed_is_replaced(
    server: RawServer, client: HttpClient
) -> None:
    assert (await client.get("/")).body == b"ok"
    assert (await client.get("/")).body == b"ok"
    assert server.num_connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", None],
        [CHUNKED + b"3\r\nabc\r\n", None],
        [b"not http at all\r\n\r\n"],
        [None],
    ],
    ids=["too short", "no last chunk", "nonsense", "nothing"],
)
def test_a_broken_response_is_told(answer: list[bytes | None]) -> None:
    @with_server(answer)
    async def ask(server: RawServer, client: HttpClient) -> None:
        with pytest.raises(ConnectionBroken):
            await client.get("/")

    ask()


@with_server([CHUNKED + b"3\r\nabc\r\n", b"3\r\ndef\r\n", b"0\r\n\r\n"], [PLAIN])
async def test_who_hangs_up_closes_the_connection(server: RawServer, client: HttpClient) -> None:
    class Enough(Exception):
        pass

    def hang_up(now: float, data: bytes) -> None:
        raise Enough

    with pytest.raises(Enough):
        await client.post("/", b"{}", hang_up)
    assert (await client.get("/")).body == b"ok"
    assert server.num_connections == 2


@with_server([CHUNKED], [PLAIN])
async def test_a_cancelled_request_closes_the_connection(
    server: RawServer, client: HttpClient
) -> None:
    asking = asyncio.create_task(client.get("/"))
    while not server.requests:
        await asyncio.sleep(0.001)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await client.get("/")).body == b"ok"
    assert server.num_connections == 2


def test_no_server_and_no_url() -> None:
    with pytest.raises(ConnectionBroken, match="cannot connect"):
        uvloop.run(HttpClient("http://127.0.0.1:1").get("/"))
    for url in ("127.0.0.1:80", "ftp://host", "http://"):
        with pytest.raises(ConfigError, match="--base-url"):
            HttpClient(url)


METRICS = b"""# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 200.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 75.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 30.0
"""
PAGE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s"


@with_server(
    [PAGE % (len(METRICS), METRICS)], [PLAIN], [b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"]
)
async def test_accept_length_from_vllms_counters(server: RawServer, client: HttpClient) -> None:
    told = await peers.spoken_of(client)
    assert told is not None
    assert (told.verify_steps, told.emitted_tokens) == (50, 125)
    assert (told.drafted_tokens, told.accepted_tokens) == (200, 75)
    assert await peers.spoken_of(client) is None
    assert await peers.spoken_of(client) is None
