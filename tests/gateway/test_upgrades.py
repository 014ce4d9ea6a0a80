"""Requests that offer another protocol, as Java's HTTP client does with HTTP/2, are answered as if
they did not.
"""

import json
import socket
from http.client import HTTPConnection, HTTPResponse
from urllib.parse import urlsplit

import httpx
import pytest

H2C = {
    "Connection": "Upgrade, HTTP2-Settings",
    "Upgrade": "h2c",
    "HTTP2-Settings": "AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA",
}
WEBSOCKET = {
    "Connection": "keep-alive, Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version": "13",
}
BODY = {"prompt": "The quick brown fox", "max_tokens": 3, "temperature": 0, "seed": 1}


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET, H2C | {"Expect": "100-continue"}])
@pytest.mark.parametrize("padding", [0, 150_000])
def test_the_body_is_read(http: httpx.Client, offer: dict[str, str], padding: int) -> None:
    body = json.dumps({**BODY, "user": "x" * padding}).encode()
    expected = http.post("/v1/completions", content=body).json()["choices"][0]["text"]
    where = urlsplit(str(http.base_url))
    assert where.hostname is not None
    connection = HTTPConnection(where.hostname, where.port, timeout=20)
    for path in ("/v1/completions", "/v1/completions", "/v1/models"):
        if path == "/v1/models":
            connection.request("GET", path, headers=offer)
        else:
            connection.request("POST", path, body, offer)  # head and body are sent apart
        answer = connection.getresponse()
        found = json.loads(answer.read())
        assert answer.status == 200, found
        assert answer.getheader("upgrade") is None
        assert path == "/v1/models" or found["choices"][0]["text"] == expected
    connection.close()


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ("POST /tokenize HTTP/1.1|Connection: Upgrade, close|Upgrade: h2c", 200),
        ("POST /tokenize HTTP/1.0|Connection: upgrade|Upgrade: TLS/1.0", 200),
        ("POST /tokenize HTTP/1.1|Upgrade: h2c", 200),
        ("POST /nothing HTTP/1.1|Connection: Upgrade|Upgrade: h2c", 404),
        ("CONNECT x:1 HTTP/1.1|Connection: Upgrade|Upgrade: h2c", 400),
    ],
)
def test_all_at_once(http: httpx.Client, lines: str, status: int) -> None:
    body = b'{"prompt": "a b"}'
    head = f"{lines}|Host: localhost|Content-Length: {len(body)}||".replace("|", "\r\n")
    where = urlsplit(str(http.base_url))
    with socket.create_connection((where.hostname, where.port), timeout=20) as connection:
        connection.sendall(head.encode() + body)
        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.status == status
        if status == 200:
            assert json.loads(answer.read())["count"] == len(
                http.post("/tokenize", content=body).json()["tokens"]
            )
