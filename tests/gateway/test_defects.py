"""An error that nobody foresaw: answered once, and the connection stays open."""

import threading
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from gateway.http import RequestNames
from testing.stack import eventually


async def fails(request: Request) -> Response:
    raise RuntimeError("a secret")


async def fails_late(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        yield b"x"
        raise RuntimeError("a secret")

    return StreamingResponse(parts())


async def works(request: Request) -> Response:
    return PlainTextResponse("fine")


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    routes = [Route("/fails", fails), Route("/late", fails_late), Route("/works", works)]
    app = Starlette(routes=routes)
    app.add_middleware(RequestNames)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    eventually(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        yield client
    server.should_exit = True
    thread.join()


def test_a_defect_is_answered_and_the_connection_stays(http: httpx.Client) -> None:
    failed, worked = (
        http.get(path, headers={"x-request-id": "mine"}) for path in ("/fails", "/works")
    )
    assert failed.status_code == 500
    assert failed.headers["x-request-id"] == "mine"
    assert failed.json()["error"]["code"] == "internal_error"
    assert "secret" not in failed.text
    assert worked.text == "fine"
    ends = [
        one.extensions["network_stream"].get_extra_info("client_addr") for one in (failed, worked)
    ]
    assert ends[0] == ends[1]


def test_a_stream_that_has_begun_is_broken_off(http: httpx.Client) -> None:
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
        http.get("/late")
