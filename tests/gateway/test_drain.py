"""Tests what becomes of requests that run when the gateway is told to stop."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from foredraft.text.tokenizer import Tokenizer
from testing import stack as stacks
from testing import tiny_tokenizers
from testing.scripted_verifier import Conversation, ScriptedVerifier, Submit, serving

TOKENIZER = Tokenizer(tiny_tokenizers.byte_level())
TOKENS = TOKENIZER.encode("The dog sleeps.", False)
USER = [{"role": "user", "content": "x"}]
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 50},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 50},
    "/v1/messages": {"messages": USER, "max_tokens": 50},
    "/v1/responses": {"input": "x", "max_output_tokens": 50},
    "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 50}},
}
STOPPING = "the gateway is stopping"


async def begins(talk: Conversation, submit: Submit) -> None:
    """Says a token, and no more."""
    await talk.say(submit.id, TOKENS[:1])


def events(url: str, path: str, has_begun: threading.Event) -> list[str]:
    """Returns the data of a stream's events; sets `has_begun` with the first of them."""
    found = []
    body = {**STREAMS[path], "stream": True}
    with httpx.stream("POST", url + path, json=body, timeout=60) as got:
        for line in got.iter_lines():
            if line.startswith("data: "):
                found.append(line.removeprefix("data: "))
                has_begun.set()
    return found


def whole(url: str) -> httpx.Response:
    return httpx.post(url + "/v1/completions", json=STREAMS["/v1/completions"], timeout=60)


def sent_in_part(url: str) -> socket.socket:
    """Returns a connection with a request whose body has not come whole."""
    where = urlsplit(url)
    found = socket.create_connection((where.hostname or "", where.port or 0), timeout=60)
    found.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    )
    return found


@pytest.fixture
def verifier(tmp_path: Path) -> Iterator[tuple[ScriptedVerifier, contextlib.ExitStack, str]]:
    """Returns a verifier that begins every answer, what ends it, and its address."""
    files = tmp_path / "model"
    tiny_tokenizers.save(tiny_tokenizers.byte_level(), files)
    found = ScriptedVerifier(files, TOKENIZER.vocab_size)
    found.script = begins
    address = f"unix:{tmp_path}/v.sock"
    with contextlib.ExitStack() as serves:
        serves.enter_context(serving(found, address))
        yield found, serves, address


def is_ready(url: str) -> bool:
    return httpx.get(url + "/health", timeout=60).status_code == 200


def test_what_runs_after_the_drain_ends_as_retryable(
    verifier: tuple[ScriptedVerifier, contextlib.ExitStack, str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    script, _, address = verifier
    with contextlib.ExitStack() as open_parts:
        url, where = open_parts.enter_context(stacks.running_gateway(address, drain_timeout=0.3))
        pool = open_parts.enter_context(ThreadPoolExecutor(8))
        stacks.eventually(lambda: is_ready(url))
        begun = {path: threading.Event() for path in STREAMS}
        streams = {path: pool.submit(events, url, path, begun[path]) for path in STREAMS}
        answer = pool.submit(whole, url)
        channel = open_parts.enter_context(grpc.insecure_channel(where))
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(text="x"))
        next(call)
        for event in begun.values():
            assert event.wait(60)
        stacks.eventually(lambda: len(script.submitted) == len(STREAMS) + 2)
        half = open_parts.enter_context(sent_in_part(url))
        process = stacks.gateway_processes[-1]
        process.terminate()
        assert half.recv(4096).startswith(b"HTTP/1.1 503 ")
        for path, stream in streams.items():
            *_, last = [data for data in stream.result(60) if data != "[DONE]"]
            assert STOPPING in last, path
            assert ("[DONE]" in stream.result()) == (path not in ("/v1/messages", "/v1/responses"))
        told = answer.result(60)
        assert told.status_code == 503
        assert STOPPING in told.text
        assert told.json()["error"]["retryable"] is True
        with pytest.raises(grpc.RpcError) as ended:
            list(call)
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        assert process.wait(30) == 0
    assert "in ASGI application" not in capfd.readouterr().err


def test_kept_connections_end_with_their_next_answer(
    verifier: tuple[ScriptedVerifier, contextlib.ExitStack, str],
) -> None:
    _, serves, address = verifier
    with (
        stacks.running_gateway(address, drain_timeout=60) as (url, _),
        ThreadPoolExecutor(1) as pool,
        httpx.Client(base_url=url, timeout=60) as kept,
    ):
        stacks.eventually(lambda: is_ready(url))
        begun = threading.Event()
        stream = pool.submit(events, url, "/generate", begun)
        assert begun.wait(60)
        assert "connection" not in kept.get("/health").headers
        process = stacks.gateway_processes[-1]
        process.terminate()
        stacks.eventually(lambda: not is_ready(url))
        told = kept.post("/v1/completions", json=STREAMS["/v1/completions"])
        assert told.status_code == 503
        # So that the next try may reach another gateway behind the same address.
        assert told.headers["connection"] == "close"
        serves.close()
        assert stream.result(60)
        assert process.wait(60) == 0


def test_grpc_clients_connect_anew_while_their_calls_go_on(
    verifier: tuple[ScriptedVerifier, contextlib.ExitStack, str],
) -> None:
    _, serves, address = verifier
    states: list[grpc.ChannelConnectivity] = []
    with (
        stacks.running_gateway(address, drain_timeout=60) as (url, where),
        grpc.insecure_channel(where) as channel,
    ):
        stacks.eventually(lambda: is_ready(url))
        channel.subscribe(states.append)
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(text="x"))
        next(call)
        ready = grpc.ChannelConnectivity.READY
        stacks.eventually(lambda: states[-1:] == [ready])
        process = stacks.gateway_processes[-1]
        process.terminate()
        # So that the next call may reach another gateway behind the same address.
        stacks.eventually(lambda: states[-1:] != [ready])
        assert call.is_active()
        serves.close()
        with pytest.raises(grpc.RpcError):
            list(call)
        assert process.wait(60) == 0


def test_nobody_waits_for_a_verifier_after_the_drain(
    verifier: tuple[ScriptedVerifier, contextlib.ExitStack, str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    script, serves, address = verifier
    with (
        stacks.running_gateway(address, drain_timeout=0.3) as (url, _),
        ThreadPoolExecutor(1) as pool,
    ):
        stacks.eventually(lambda: is_ready(url))
        answer = pool.submit(whole, url)
        stacks.eventually(lambda: script.submitted)
        serves.close()
        stacks.eventually(lambda: not is_ready(url))
        process = stacks.gateway_processes[-1]
        process.terminate()
        told = answer.result(60)
        assert told.status_code == 503
        assert "no verifier is ready" in told.text
        assert process.wait(30) == 0
    assert "in ASGI application" not in capfd.readouterr().err
