"""Answers to HTTP/1.0, which knows no chunks: a stream ends with its connection."""

import json
import socket
from urllib.parse import urlsplit

import httpx
import pytest

BODY = {"prompt": "The quick brown fox", "max_tokens": 8, "temperature": 0}


def exchange(http: httpx.Client, request: bytes) -> tuple[bytes, bytes]:
    """Sends a request; returns head and body of all that comes until the connection ends."""
    where = urlsplit(str(http.base_url))
    with socket.create_connection((where.hostname, where.port), timeout=20) as connection:
        connection.sendall(request)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.lower(), body


def post(fields: dict[str, object]) -> bytes:
    body = json.dumps(BODY | fields).encode()
    return b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def test_a_stream_comes_as_it_is(http: httpx.Client) -> None:
    head, body = exchange(http, post({"stream": True}))
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    whole = http.post("/v1/completions", json=BODY).json()
    assert text == whole["choices"][0]["text"]


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
@pytest.mark.parametrize("path", [b"/v1/models", b"/metrics", b"/docs"])
def test_what_has_a_length_keeps_it(http: httpx.Client, method: bytes, path: bytes) -> None:
    head, body = exchange(http, method + b" " + path + b" HTTP/1.0\r\n\r\n")
    length = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])[b"content-length"]
    assert len(body) == (0 if method == b"HEAD" else int(length))
