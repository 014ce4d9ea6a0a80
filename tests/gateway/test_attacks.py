"""Clients that want the server to fail: they get an answer and lose their connection, and others
are served.
"""

import contextlib
import re
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from foredraft.cli.stack import LocalStack
from foredraft.cli.supervisor import Service, Supervisor
from foredraft.rpc.channel import check_health
from testing import stack as stacks
from testing.stack import eventually, free_port, metric

FILES = 256
BODY = 2000
SHORT = {"prompt": "ab", "max_tokens": 4, "temperature": 0}
HALF_SENT = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
def many_sockets() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def impatient(stack: LocalStack) -> Iterator[str]:
    """Returns the URL of a gateway that waits one second for its clients."""
    verifier = next(service.health for service in stack.services if service.name == "verify")
    with stacks.running_gateway(verifier, client_timeout=1.0, max_body_bytes=BODY) as (url, _):
        eventually(lambda: httpx.get(url + "/health", timeout=60).status_code == 200)
        yield url


def connect(url: str) -> socket.socket:
    where = urlsplit(url)
    return socket.create_connection((where.hostname, where.port), timeout=30)


def read_all(connection: socket.socket) -> bytes:
    """Reads until the server closes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            found += piece
    return found


def exchange(url: str, *pieces: bytes) -> bytes:
    with connect(url) as connection:
        for piece in pieces:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(piece)
        return read_all(connection)


def statuses(answers: bytes) -> list[int]:
    """Returns the status codes of all answers, in order."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) [A-Z]", answers)]


def test_a_flood_where_descriptors_are_few(
    stack: LocalStack, many_sockets: None, tmp_path: Path
) -> None:
    verifier = next(service.health for service in stack.services if service.name == "verify")
    http, grpc, probe = free_port(), free_port(), f"unix:{tmp_path}/gateway.sock"
    flags = f"--port={http} --grpc-port={grpc} --grpc-socket={probe} --verifier={verifier}"
    command = f"ulimit -n {FILES} && exec {sys.executable} -m gateway {flags}"
    service = Service(
        name="gateway", command=("sh", "-c", command), health=probe, hang_checks=3, max_deaths=0
    )
    url = f"http://127.0.0.1:{http}"
    lines: list[str] = []
    with (
        Supervisor([service], on_line=lambda _, line: lines.append(line)) as supervisor,
        contextlib.ExitStack() as opened,
    ):
        supervisor.wait_healthy(60)
        assert any(f"{FILES} files" in line for line in lines)

        def flood(port: int, number: int, sent: bytes) -> list[socket.socket]:
            made = []
            for _ in range(number):
                connection = socket.create_connection(("127.0.0.1", port), timeout=30)
                opened.enter_context(contextlib.closing(connection))
                with contextlib.suppress(OSError):
                    connection.sendall(sent)
                made.append(connection)
            return made

        half_sent = flood(http, 300, HALF_SENT)
        for _ in range(3):
            assert httpx.get(url + "/health", timeout=30).status_code == 200
        flood(http, 300, b"")
        flood(grpc, 300, b"")
        flood(http, 100, HALF_SENT)
        for _ in range(3):
            answer = httpx.post(url + "/v1/completions", json=SHORT, timeout=60)
            assert answer.status_code == 200
            assert check_health(probe) == "SERVING"
        page = httpx.get(url + "/metrics", timeout=30).text
        assert metric(page, "foredraft_gateway_evicted_connections_total") > 300
        assert metric(page, "foredraft_gateway_connections") < FILES
        # Who had to give way was told so.
        assert [503] in (statuses(read_all(connection)) for connection in half_sent[:200])
        [state] = supervisor.states()
        assert state.healthy
        assert state.num_restarts == 0


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ([b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 70_000 + b"\r\n\r\n"], 431),
        ([b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ", *[b"y" * 1000] * 400], 431),
        ([b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 300 + b"\r\n"], 431),
        ([b"GET /health HTTP/1.1\r\nhost: localhost\r\n", *[b"a: b\r\n" * 100] * 300], 431),
        ([b"GET /" + b"y" * 70_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"], 414),
        ([b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n"], 400),
        ([b"GET /health HTTP/1.1\r\nhost: a\r\nHost: b\r\n\r\n"], 400),
        ([b"GET /health HTTP/1.1\r\n\r\n"], 400),
        ([b"GET /health HTTP/1.0\r\n\r\n"], 200),
        ([b"\x16\x03\x01\x02\x00\x01\x00"], 400),
        ([b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n"], 400),
        ([HALF_SENT[:-5] + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n"], 400),
        ([b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nx"], 404),
        ([HALF_SENT], 408),
        ([HALF_SENT.replace(b"content-length: 1000", b"transfer-encoding: chunked")], 400),
    ],
)
def test_what_is_no_request(impatient: str, pieces: list[bytes], status: int) -> None:
    answer = exchange(impatient, *pieces)
    assert statuses(answer) == [status], answer[:200]
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert len(body) == int(
        dict(line.split(b": ") for line in head.split(b"\r\n")[1:])[b"content-length"]
    )


def drip(connection: socket.socket, piece: bytes) -> bytes:
    """Sends a piece again and again until the server ends the connection; what it said."""
    connection.settimeout(0.1)
    found = b""
    for _ in range(300):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(piece)
        try:
            got = connection.recv(65536)
        except TimeoutError:
            continue
        except ConnectionResetError:
            return found
        if not got:
            return found
        found += got
    raise AssertionError("the connection stays open")


@pytest.mark.parametrize(
    ("begin", "piece", "answer"),
    [
        (b"", b"\r\n", []),
        (HEALTH, b"\r\n", [200]),
        (HEALTH + b"GET /", b"x", [200]),
        (b"GET /health HTTP/1.0\r\n", b"a: b\r\n", []),
        (HALF_SENT, b" ", [408]),
        (HALF_SENT.replace(b"/v1/completions", b"/nothing"), b" ", [404]),
        (
            b"POST /generate HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n",
            b"1\r\n \r\n",
            [408],
        ),
        (
            b"POST /generate HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1;",
            b"a",
            [408],
        ),
        (
            b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
            b"a: b\r\n",
            [404],
        ),
    ],
)
def test_what_drips(impatient: str, begin: bytes, piece: bytes, answer: list[int]) -> None:
    with connect(impatient) as connection:
        connection.sendall(begin)
        found = drip(connection, piece)
    assert statuses(found) == answer, found[:200]


def test_what_comes_behind_an_early_answer(impatient: str) -> None:
    # Its body would have 1000 bytes: what comes is none of it, but no request either.
    answer = exchange(impatient, HALF_SENT.replace(b"/v1/completions", b"/nothing") + HEALTH * 3)
    assert statuses(answer) == [404]
    # One that is whole is answered in its turn.
    answer = exchange(impatient, HEALTH * 3 + HALF_SENT + b"x" * 2000 + HEALTH)
    assert statuses(answer) == [200, 200, 200, 400]


def test_many_requests_at_once(impatient: str) -> None:
    answer = exchange(impatient, HEALTH * 5000)
    assert 1 <= len(statuses(answer)) <= 32


def test_answers_come_before_a_refusal(impatient: str) -> None:
    answer = exchange(impatient, HEALTH * 2 + b"NONSENSE\r\n\r\n")
    assert statuses(answer) == [200, 200]


@pytest.mark.parametrize("sent", [b"", b"GET /hea", HALF_SENT, HEALTH])
def test_half_closed(impatient: str, sent: bytes) -> None:
    with connect(impatient) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        read_all(connection)  # it ends


def open_connections(url: str) -> float:
    return metric(httpx.get(url + "/metrics", timeout=60).text, "foredraft_gateway_connections")


@pytest.mark.parametrize("path", [b"/openapi.json", b"/web/api.js"])
def test_answers_that_nobody_reads(impatient: str, path: bytes) -> None:
    ask = b"GET %s HTTP/1.1\r\nhost: localhost\r\n\r\n" % path
    eventually(lambda: open_connections(impatient) == 1)
    with contextlib.ExitStack() as opened:
        for _ in range(10):
            connection = socket.socket()
            opened.enter_context(contextlib.closing(connection))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            where = urlsplit(impatient)
            connection.connect((where.hostname, where.port))
            connection.settimeout(0.2)
            with contextlib.suppress(TimeoutError, ConnectionError):
                while True:
                    connection.sendall(ask)
        eventually(lambda: open_connections(impatient) == 1)


def test_bodies_that_are_too_many_together(impatient: str) -> None:
    half = HALF_SENT.replace(b"1000", b"%d" % BODY) + b"x" * (BODY - 100)

    def crowd() -> list[list[int]]:
        with contextlib.ExitStack() as opened:
            made = [opened.enter_context(connect(impatient)) for _ in range(40)]
            for connection in made:
                connection.sendall(half)
            return [statuses(read_all(connection)) for connection in made]

    # Where the machine stood still, the first may have taken too long before the last came.
    attempts = (crowd() for _ in range(5))
    found = next((found for found in attempts if found[0] != [408]), [])
    # The first give way to the last, whose time is over then.
    assert found.count([503]) >= 40 - 34
    assert found[0] == [503]
    assert found[-1] == [408]


def test_trailers_are_no_headers(impatient: str) -> None:
    body = b"e\r\n" + b'{"prompt":"a"}' + b"\r\n0\r\nx-request-id: trailer\r\n\r\n"
    head = (
        b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding:"
        b" chunked\r\n\r\n"
    )
    answer = exchange(impatient, head + body)
    assert statuses(answer) == [200]
    assert b"x-request-id: trailer" not in answer


def test_large_bodies_are_refused_readably(http: httpx.Client) -> None:
    # The client has megabytes to send yet when the answer comes.
    answer = http.post("/v1/completions", content=b"x" * 20_000_000)
    assert answer.status_code == 413
    assert answer.headers["connection"] == "close"
    assert http.post("/v1/completions", content=b"{").headers.get("connection") is None
