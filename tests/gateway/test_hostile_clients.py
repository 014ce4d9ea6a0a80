"""Clients that are slow, that stop reading, or that send nothing but bad requests: they are cut
off, and others do not notice.
"""

import concurrent.futures
import contextlib
import json
import resource
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from foredraft.cli.stack import LocalStack
from testing import stack as stacks
from testing.stack import eventually, is_idle, metric
from tests.gateway.bad_input import ROWS

SHORT = {"prompt": "ab", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def impatient(stack: LocalStack) -> Iterator[tuple[httpx.Client, str]]:
    """Starts a gateway that waits one second for its clients; also returns its gRPC address."""
    verifier = next(service.health for service in stack.services if service.name == "verify")
    with (
        stacks.running_gateway(verifier, client_timeout=1.0) as (url, grpc_address),
        # No connection that the gateway may close just as it is used again.
        httpx.Client(
            base_url=url, timeout=60, limits=httpx.Limits(max_keepalive_connections=0)
        ) as client,
    ):
        eventually(lambda: client.get("/health").status_code == 200)
        yield client, grpc_address


def connect(web: httpx.Client, **options: int) -> socket.socket:
    where = urlsplit(str(web.base_url))
    made = socket.socket()
    for name, value in options.items():
        made.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    made.settimeout(30)
    made.connect((where.hostname, where.port))
    return made


def nothing_runs(web: httpx.Client) -> bool:
    page = web.get("/metrics").text
    waiting = sum(
        metric(page, f"foredraft_gateway_{what}_requests") for what in ("running", "queued")
    )
    return waiting == 0 and is_idle(web)


def test_heads_that_never_end(impatient: tuple[httpx.Client, str]) -> None:
    web, _ = impatient
    stop = threading.Event()

    def drip() -> bytes:
        with connect(web) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n")
            with contextlib.suppress(OSError):
                while not stop.wait(0.2):
                    connection.sendall(b"a: b\r\n")
            with contextlib.suppress(OSError):
                return connection.recv(100)
        return b""

    with concurrent.futures.ThreadPoolExecutor(20) as threads:
        slow = [threads.submit(drip) for _ in range(20)]
        for _ in range(5):
            assert web.post("/v1/completions", json=SHORT).status_code == 200
        # The server ends them by itself.
        done, _ = concurrent.futures.wait(slow, timeout=60)
        stop.set()
        assert len(done) == 20
        assert all(future.result() == b"" for future in slow)


def test_a_body_that_never_ends(impatient: tuple[httpx.Client, str]) -> None:
    web, _ = impatient
    with connect(web) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{"
        )
        answer = b""
        while b"slow_client" not in answer:
            piece = connection.recv(65536)
            assert piece, answer
            answer += piece
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_stream_that_is_not_read(impatient: tuple[httpx.Client, str]) -> None:
    web, _ = impatient
    sampling = {"max_new_tokens": 480, "ignore_eos": True, "n": 4}
    # Each event repeats everything, with 20 alternatives of every token.
    body = {"text": "ab", "sampling_params": sampling, "stream": True}
    body |= {"return_logprob": True, "top_logprobs_num": 20}
    raw = json.dumps(body).encode()
    with connect(web, SO_RCVBUF=4096) as connection:
        head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        assert connection.recv(12) == b"HTTP/1.1 200"
        eventually(lambda: nothing_runs(web))
        # What had been sent is there still; then the connection ends before the answer does.
        last = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(1 << 20):
                last = piece
        assert b"[DONE]" not in last
    assert web.post("/v1/completions", json=SHORT).status_code == 200


def test_a_call_that_is_not_read(impatient: tuple[httpx.Client, str]) -> None:
    web, address = impatient
    asked = inference_pb2.GenerateRequest(
        text="ab",
        sampling=inference_pb2.SamplingParams(
            max_new_tokens=480, ignore_eos=True, n=32, logprobs=20
        ),
    )
    # Without probes for a larger window, the client takes 64 KiB unread.
    options = [("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(address, options) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(asked, timeout=120)
        next(call)
        eventually(lambda: nothing_runs(web), 90)
        with pytest.raises(grpc.RpcError) as slow:
            for _ in call:
                pass
    assert slow.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    assert "nothing was taken" in slow.value.details()  # type: ignore[attr-defined]


def test_a_flood_of_bad_requests(http: httpx.Client, stack: LocalStack) -> None:
    prompts = [f"{word} ab ab" for word in ("the", "a", "dog", "sun")]
    rows = [row for row in ROWS if row.status != 200]
    stop = threading.Event()
    wrong: list[str] = []
    sent = [0]

    def text(prompt: str) -> tuple[str, float]:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": True}
        started, found = time.monotonic(), ""
        with (
            httpx.Client(base_url=stack.urls["http"], timeout=60) as web,
            web.stream("POST", "/v1/completions", json=body) as got,
        ):
            lines = [line for line in got.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        for line in lines[:-1]:
            found += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        return found, time.monotonic() - started

    def flood(first: int) -> None:
        with httpx.Client(base_url=stack.urls["http"], timeout=60) as web:
            while not stop.is_set():
                row = rows[(first + sent[0]) % len(rows)]
                answer = web.post(row.path, content=row.content)
                sent[0] += 1
                if answer.status_code != row.status:
                    wrong.append(f"{row.title}: {answer.status_code}")

    def run(threads: concurrent.futures.ThreadPoolExecutor) -> list[tuple[str, float]]:
        return list(threads.map(text, prompts * 5))

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        expected = {prompt: text(prompt)[0] for prompt in prompts}
        quiet = run(threads)
        bad = [threads.submit(flood, i * 30) for i in range(4)]
        loud = run(threads)
        stop.set()
        for future in bad:
            future.result(60)
    for found in (quiet, loud):
        assert [answer for answer, _ in found] == [expected[prompt] for prompt in prompts * 5]
    assert not wrong
    assert sent[0] > 20
    eventually(lambda: nothing_runs(http))
    seconds = [statistics.median(seconds for _, seconds in found) for found in (quiet, loud)]
    print(
        f"median of a good request: {seconds[0] * 1000:.0f} ms alone, {seconds[1] * 1000:.0f} ms"
        f" beside {sent[0]} bad ones (clients and server share this machine's cores)"
    )


def test_more_connections_than_a_shell_allows_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as opened:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        try:
            http, _ = opened.enter_context(stacks.running_gateway("127.0.0.1:1", is_forked=False))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        where = urlsplit(http)
        for _ in range(300):
            connection = socket.create_connection((where.hostname, where.port), timeout=20)
            opened.enter_context(contextlib.closing(connection))
        assert httpx.get(http + "/metrics", timeout=20).status_code == 200
