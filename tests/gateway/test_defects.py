"""An error that nobody foresaw: answered once, and the connection stays open."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from gateway.http import RequestNames


async def fails(request: Request) -> Response:
    raise RuntimeError("a secret")


async def fails_late(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        yield b"x"
        raise RuntimeError("a secret")

    return StreamingResponse(parts())


async def works(request: Request) -> Response:
    return PlainTextResponse("fine")


def get(*paths: str) -> list[httpx.Response]:
    """Asks one application for several paths; what it raises ends this."""
    routes = [Route("/fails", fails), Route("/late", fails_late), Route("/works", works)]
    app = Starlette(routes=routes)
    app.add_middleware(RequestNames)

    async def ask() -> list[httpx.Response]:
        # What an application raises ends its server's connection without a word.
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return [await client.get(path, headers={"x-request-id": "mine"}) for path in paths]

    return asyncio.run(ask())


def test_a_defect_is_answered() -> None:
    failed, worked = get("/fails", "/works")
    assert failed.status_code == 500
    assert failed.headers["x-request-id"] == "mine"
    assert failed.json()["error"]["code"] == "internal_error"
    assert "secret" not in failed.text
    assert worked.text == "fine"


def test_a_stream_that_has_begun_is_broken_off() -> None:
    with pytest.raises(RuntimeError, match="a secret"):
        get("/late")
