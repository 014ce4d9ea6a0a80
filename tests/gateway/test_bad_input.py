"""Kinds of bad input, each with its status and the field that the answer names.

Never 500, never a hang.
"""

import contextlib
import gzip
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from pydantic import ValidationError

from gateway.anthropic import schemas as anthropic  # noqa: F401 - its bodies are looked through
from gateway.bodies import Body
from gateway.native import schemas as native  # noqa: F401
from gateway.openai import schemas as openai  # noqa: F401
from gateway.responses import schemas as responses  # noqa: F401
from testing.stack import eventually
from tests.gateway.bad_input import COMPLETIONS, ROWS, Bad, completion


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.path} {row.param} {row.title[:60]}")
def test_bad_input(http: httpx.Client, row: Bad) -> None:
    headers = {"content-type": "application/json"}
    answer = http.post(row.path, content=row.content, headers=headers)
    assert answer.status_code == row.status, answer.text
    if row.status != 200:
        error = answer.json()["error"]
        assert error["param"] == row.param, error
        assert error["message"] == row.message
        assert 5 < len(error["message"]) < 400


def test_a_compressed_body_is_refused_as_one(http: httpx.Client) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = http.post(COMPLETIONS, content=gzip.compress(b'{"prompt": "x"}'), headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "body: is encoded by 'gzip'; only plain bodies are taken"
    )


def _all_bodies(base: type[Body] = Body) -> Iterator[type[Body]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _all_bodies(kind)


@pytest.mark.parametrize("item", [b"{}", b"1", b'""', b"[1.5]", b"[[]]", b"true"])
def test_of_many_wrong_items_few_are_noted(item: bytes) -> None:
    """Each that is noted takes kilobytes, and a body of megabytes has millions."""
    for kind in _all_bodies():
        required = [name for name, field in kind.model_fields.items() if field.is_required()]
        for name, field in kind.model_fields.items():
            body = b'{"%s":[%s]}' % (
                (field.alias or name).encode(),
                b",".join([item] * 2000),
            )
            assert _num_errors(kind, body) < 12 + len(required), (kind, name)


def _num_errors(kind: type[Body], body: bytes) -> int:
    try:
        kind.model_validate_json(body)
    except ValidationError as error:
        return error.error_count()
    return 0


def test_the_table_is_long_enough() -> None:
    assert sum(row.status != 200 for row in ROWS) >= 60
    assert len({(row.path, row.content) for row in ROWS}) == len(ROWS)


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
        # What the server did not want to read resets the connection, while it is still being sent
        # or later.
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
