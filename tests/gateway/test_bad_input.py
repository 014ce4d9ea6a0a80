"""Kinds of bad input, each with its status and the field that the answer names. Never 500, never a hang."""

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.stack import eventually

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
USER = [{"role": "user", "content": "Hi"}]
DEEP = "[" * 100_000 + "]" * 100_000


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 2, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": USER, "max_tokens": 2, **fields}


def native(**sampling: Any) -> dict[str, Any]:
    return {"text": "x", "sampling_params": {"max_new_tokens": 2, **sampling}}


# (path, body as an object or as raw bytes, status, field named)
TABLE: list[tuple[str, Any, int, str | None]] = [
    # Not JSON, or not an object.
    (COMPLETIONS, b"", 400, "prompt"),
    (COMPLETIONS, b"{", 400, "body"),
    (COMPLETIONS, b"[]", 400, "body"),
    (COMPLETIONS, b"null", 400, "body"),
    (COMPLETIONS, b"\xff\xfe{}", 400, "body"),
    (COMPLETIONS, b'{"prompt": "\xff"}', 400, "body"),
    (COMPLETIONS, b'{"prompt": "\\ud800"}', 400, "body"),
    (COMPLETIONS, b'{"prompt": "x", "max_tokens": 1e999}', 400, "max_tokens"),
    (COMPLETIONS, b'{"prompt": "x", "temperature": NaN}', 400, "temperature"),
    (COMPLETIONS, b'{"prompt": "x", "temperature": Infinity}', 400, "temperature"),
    (COMPLETIONS, b'{"prompt": "x", "temperature": -1e400}', 400, "temperature"),
    (COMPLETIONS, b'{"prompt": ' + DEEP.encode()[:90_000] + b"}", 400, "body"),
    (
        COMPLETIONS,
        b'{"prompt": "x", "metadata": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}}",
        400,
        "body",
    ),
    (COMPLETIONS, b'{"prompt": "' + b"x" * 300_000 + b'"}', 413, None),
    (COMPLETIONS, b'{"prompt": "x"} trailing', 400, "body"),
    # Types.
    (COMPLETIONS, completion(prompt=None), 400, "prompt"),
    (COMPLETIONS, completion(prompt=5), 400, "prompt"),
    (COMPLETIONS, completion(prompt={}), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[1.5]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=["a", 1]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[[1], "a"]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[True]), 400, "prompt"),
    (COMPLETIONS, completion(max_tokens="5"), 400, "max_tokens"),
    (COMPLETIONS, completion(max_tokens=1.5), 400, "max_tokens"),
    (COMPLETIONS, completion(max_tokens=True), 400, "max_tokens"),
    (COMPLETIONS, completion(stream="yes"), 400, "stream"),
    (COMPLETIONS, completion(stop=5), 400, "stop"),
    (COMPLETIONS, completion(stop=[1]), 400, "stop"),
    (COMPLETIONS, completion(logit_bias=[1]), 400, "logit_bias"),
    (COMPLETIONS, completion(seed="a"), 400, "seed"),
    (COMPLETIONS, completion(speculation={"enabled": 1}), 400, "speculation.enabled"),
    (COMPLETIONS, completion(model=5), 400, "model"),
    # Ranges.
    (COMPLETIONS, completion(prompt=[]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[[]]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[-1]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[600]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[10**30]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[5] * 600), 400, "prompt"),
    (COMPLETIONS, completion(prompt="word " * 30_000), 400, "prompt"),
    (COMPLETIONS, completion(prompt=["x"] * 300), 400, "prompt"),
    (COMPLETIONS, completion(prompt=["x"] * 100, n=3), 400, "prompt"),
    (COMPLETIONS, completion(max_tokens=0), 400, "max_tokens"),
    (COMPLETIONS, completion(max_tokens=-1), 400, "max_tokens"),
    (COMPLETIONS, completion(max_tokens=10**12), 400, "max_tokens"),
    (COMPLETIONS, completion(min_tokens=5), 400, "min_tokens"),
    (COMPLETIONS, completion(temperature=-0.1), 400, "temperature"),
    (COMPLETIONS, completion(temperature=101), 400, "temperature"),
    (COMPLETIONS, completion(top_p=0), 400, "top_p"),
    (COMPLETIONS, completion(top_p=1.1), 400, "top_p"),
    (COMPLETIONS, completion(top_k=-2), 400, "top_k"),
    (COMPLETIONS, completion(top_k=2**40), 400, "top_k"),
    (COMPLETIONS, completion(min_p=2), 400, "min_p"),
    (COMPLETIONS, completion(repetition_penalty=0), 400, "repetition_penalty"),
    (COMPLETIONS, completion(frequency_penalty=3), 400, "frequency_penalty"),
    (COMPLETIONS, completion(presence_penalty=-3), 400, "presence_penalty"),
    (COMPLETIONS, completion(n=0), 400, "n"),
    (COMPLETIONS, completion(n=65), 400, "n"),
    (COMPLETIONS, completion(n=2**70), 400, "n"),
    (COMPLETIONS, completion(seed=2**64), 400, "seed"),
    (COMPLETIONS, completion(priority=2**40), 400, "priority"),
    (COMPLETIONS, completion(timeout=0), 400, "timeout"),
    (COMPLETIONS, completion(logprobs=21), 400, "logprobs"),
    (COMPLETIONS, completion(logprobs=-1), 400, "logprobs"),
    (COMPLETIONS, completion(logit_bias={"x": 1}), 400, "logit_bias"),
    (COMPLETIONS, completion(logit_bias={"600": 1}), 400, "logit_bias"),
    (COMPLETIONS, completion(logit_bias={"5": 101}), 400, "logit_bias"),
    (COMPLETIONS, completion(logit_bias={"\u0665": 1}), 400, "logit_bias"),
    (COMPLETIONS, completion(stop=""), 400, "stop"),
    (COMPLETIONS, completion(stop=["a"] * 33), 400, "stop"),
    (COMPLETIONS, completion(stop="a" * 2000), 400, "stop"),
    (COMPLETIONS, completion(stop_token_ids=[600]), 400, "stop_token_ids"),
    (COMPLETIONS, completion(stop_token_ids=[-1]), 400, "stop_token_ids"),
    (COMPLETIONS, completion(speculation={"num_steps": 0}), 400, "speculation.num_steps"),
    (COMPLETIONS, completion(request_id="x" * 1000), 400, "request_id"),
    (COMPLETIONS, completion(request_id="a\nINFO b"), 400, "request_id"),
    (COMPLETIONS, b'{"prompt": "x", "max_tokens": ' + b"9" * 320 + b"}", 400, "max_tokens"),
    (COMPLETIONS, b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", 400, "body"),
    # Fields that cannot be honoured, or that nobody knows.
    (COMPLETIONS, completion(best_of=3), 400, "best_of"),
    (COMPLETIONS, completion(suffix="after"), 400, "suffix"),
    (COMPLETIONS, completion(echo=True, logprobs=1), 400, "echo"),
    (COMPLETIONS, completion(stream_options={}), 400, "stream_options"),
    (COMPLETIONS, completion(temprature=1), 400, "temprature"),
    (COMPLETIONS, completion(guided_json={}), 400, "guided_json"),
    (COMPLETIONS, completion(model="other"), 404, "model"),
    # Chats.
    (CHAT, {}, 400, "messages"),
    (CHAT, chat(messages=[]), 400, "messages"),
    (CHAT, chat(messages="Hi"), 400, "messages"),
    (CHAT, chat(messages=[{"content": "Hi"}]), 400, "messages.0.role"),
    (CHAT, chat(messages=[{"role": "user", "content": 5}]), 400, "messages.0.content"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        400,
        "messages.0.content",
    ),
    (CHAT, chat(messages=USER * 20_000), 413, None),
    (CHAT, chat(messages=USER * 2000), 400, "messages"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools"),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice"),
    (CHAT, chat(response_format={"type": "json_object"}), 400, "response_format"),
    (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {}}),
        400,
        "response_format",
    ),
    (CHAT, chat(modalities=["audio"]), 400, "modalities"),
    (CHAT, chat(prediction={"type": "content"}), 400, "prediction"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    (CHAT, chat(max_completion_tokens=3), 400, "max_tokens"),
    (CHAT, {"messages": USER, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    (CHAT, chat(chat_template_kwargs={"messages": 1}), 400, "chat_template_kwargs"),
    (CHAT, chat(chat_template_kwargs={"self": 1}), 400, "chat_template_kwargs"),
    (CHAT, chat(chat_template_kwargs={"function": 1, "args": 2}), 200, None),
    # Native.
    (GENERATE, {}, 400, "text"),
    (GENERATE, {"text": "x", "input_ids": [1]}, 400, "text"),
    (GENERATE, {"text": []}, 400, "text"),
    (GENERATE, {"text": ""}, 200, None),  # BOS is a prompt
    (GENERATE, {"input_ids": []}, 400, "input_ids"),
    (GENERATE, {"input_ids": [600]}, 400, "input_ids"),
    (GENERATE, {"input_ids": [[1], [5] * 600]}, 400, "input_ids"),
    (GENERATE, {"text": "word " * 30_000}, 400, "text"),
    (GENERATE, native(temperature=-1), 400, "sampling_params.temperature"),
    (GENERATE, native(max_new_tokens=0), 400, "sampling_params.max_new_tokens"),
    (GENERATE, native(sampling_seed=2**70), 400, "sampling_params.sampling_seed"),
    (GENERATE, native(regex="a+"), 400, "sampling_params.regex"),
    (GENERATE, native(unknown=1), 400, "sampling_params.unknown"),
    (GENERATE, {"text": "x", "sampling_params": [{}, {}]}, 400, "sampling_params"),
    (GENERATE, {"text": ["x", "y"], "rid": ["a"]}, 400, "rid"),
    (GENERATE, {"text": ["x", "y"], "rid": ["a", "a"]}, 400, "rid"),
    (
        GENERATE,
        {"text": "x", "return_logprob": True, "logprob_start_len": 0},
        400,
        "logprob_start_len",
    ),
    (
        GENERATE,
        {"text": "x", "return_logprob": True, "top_logprobs_num": 99},
        400,
        "top_logprobs_num",
    ),
    (GENERATE, {"text": "x", "image_data": "x"}, 400, "image_data"),
    (GENERATE, {"text": "x", "lora_path": "x"}, 400, "lora_path"),
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": "x" * 150_000}, 400, "prompt"),
    ("/tokenize", {"prompt": []}, 400, "prompt"),
    ("/tokenize", {"prompt": ["x"] * 300}, 400, "prompt"),
    ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
    ("/detokenize", {"tokens": [2**70]}, 400, "tokens"),
    ("/detokenize", {"tokens": [[5]] * 300}, 400, "tokens"),
    ("/detokenize", {"tokens": [5], "model": "other"}, 404, "model"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/detokenize", {"tokens": [[1], 2]}, 400, "tokens.0"),
    ("/abort_request", {}, 400, "rid"),
    # Routes.
    ("/v1/nothing", {}, 404, None),
    ("/health", {}, 405, None),
]


def name_of(row: tuple[str, Any, int, str | None]) -> str:
    path, body, _, field = row
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else json.dumps(body)
    return f"{path} {field} {text[:60]}"


@pytest.mark.parametrize(("path", "body", "status", "field"), TABLE, ids=map(name_of, TABLE))
def test_bad_input(
    http: httpx.Client, path: str, body: Any, status: int, field: str | None
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    if status != 200:
        error = answer.json()["error"]
        assert error["param"] == field, error
        assert 5 < len(error["message"]) < 400


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left(http: httpx.Client) -> Iterator[None]:
    yield
    loads = lambda: http.get("/get_server_info").json()["verifiers"].values()  # noqa: E731
    eventually(lambda: all(load["running"] + load["waiting"] == 0 for load in loads()))
    assert http.post(COMPLETIONS, json=completion()).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: " + b"a" * 200_000 + b"\r\n\r\n",
    ],
)
def test_bad_http(http: httpx.Client, raw: bytes) -> None:
    where = urlsplit(str(http.base_url))
    with socket.create_connection((where.hostname, where.port), timeout=20) as connection:
        answer = b""
        # What the server did not want to read resets the connection, while it is still being sent or later.
        with contextlib.suppress(OSError):
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while chunk := connection.recv(65536):
                answer += chunk
    assert not answer.startswith((b"HTTP/1.1 2", b"HTTP/1.1 5"))


def test_a_chunked_body_is_bounded_too(http: httpx.Client) -> None:
    def body() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"x" * 10_000

    answer = http.post(COMPLETIONS, content=body())
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
