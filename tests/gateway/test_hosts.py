"""Names that requests call the server by: of pages that give their own name this machine's address,
none is answered.
"""

import asyncio
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from foredraft.cli.stack import LocalStack
from foredraft.config.services import GatewayConfig
from gateway.security.gate import Gate
from gateway.security.hosts import is_local
from gateway.security.http import GateMiddleware
from testing import stack as stacks

OWN = ["localhost", "LOCALHOST:30000", "app.localhost:1", "localhost."]
ADDRESSES = ["127.0.0.1", "127.0.0.1:30000", "127.1.2.3", "[::1]:30000", "10.0.0.7:80", "[fe80::1]"]
NAMES = ["rebound.example", "rebound.example:30000", "localhost.evil.example", "127.0.0.1.nip.io"]
NO_ADDRESSES = ["a:b:c", "[x]", "256.0.0.1", "é", "127.0.0.1@evil.example"]


@pytest.mark.parametrize("host", OWN + ADDRESSES)
def test_a_server_of_this_machine_is_called_by_its_own_names(http: httpx.Client, host: str) -> None:
    assert http.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/v1/models", "/metrics", "/dashboard/figures", "/nothing"])
def test_and_by_no_other(http: httpx.Client, path: str) -> None:
    for host in NAMES + NO_ADDRESSES:
        answer = http.get(path, headers={"host": host.encode()})
        assert answer.status_code == 403, host
        error = answer.json()["error"]
        assert (error["code"], error["retryable"]) == ("host_not_allowed", False)
        assert "--allowed-host" in error["message"]


def test_no_work_is_done_under_another_name(http: httpx.Client) -> None:
    body = {"prompt": "ab", "max_tokens": 1}
    for host, status in (("rebound.example", 403), ("localhost", 200)):
        assert http.post("/v1/completions", json=body, headers={"host": host}).status_code == status


@pytest.mark.parametrize("allowed", ["https://chat.example", "*"])
def test_pages_of_named_origins_may_use_the_server(allowed: str) -> None:
    with stacks.running_gateway("127.0.0.1:1", allowed_origin=allowed) as (url, _):
        for origin in ("https://chat.example", "https://evil.example"):
            welcome = allowed in (origin, "*")
            page = {"origin": origin, "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
            asks = {
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,content-type",
            }
            preflight = httpx.options(f"{url}/v1/completions", headers=page | asks, timeout=60)
            assert (preflight.status_code == 200) == welcome
            answer = httpx.post(f"{url}/v1/completions", headers=page, content=b"{", timeout=60)
            # Even a refusal can be read by a page that is welcome.
            assert answer.status_code == (400 if welcome else 403)
            found = answer.headers.get("access-control-allow-origin")
            assert found == (allowed if welcome else None)


def test_health_is_told_under_every_name(http: httpx.Client) -> None:
    assert http.get("/health", headers={"host": "probe.example"}).status_code == 200


def test_a_client_that_names_no_host_is_no_browser(stack: LocalStack) -> None:
    address = urlsplit(stack.urls["http"])
    connection = HTTPConnection(address.hostname or "", address.port)
    connection._http_vsn, connection._http_vsn_str = 10, "HTTP/1.0"
    connection.putrequest("GET", "/v1/models", skip_host=True)
    connection.endheaders()
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize(
    ("settings", "taken", "refused"),
    [
        ({"host": "0.0.0.0"}, NAMES, []),
        ({"host": "127.0.0.1", "api_key": "secret"}, NAMES, []),
        ({"allowed_host": ("*",)}, NAMES, []),
        ({"allowed_host": ("Rebound.example",)}, NAMES[:2] + OWN + ADDRESSES, NAMES[2:]),
        (
            {"host": "0.0.0.0", "allowed_host": ("*.a.example", "b.example")},
            ["x.a.example", "y.x.a.example:1", "b.example", *ADDRESSES],
            ["a.example", "xa.example", "x.b.example", "evil.example"],
        ),
        ({"host": "::1"}, OWN, NAMES),
        ({"host": "localhost"}, OWN, NAMES),
    ],
    ids=["for all", "with keys", "any", "a name", "names under one", "IPv6", "localhost"],
)
def test_names_that_are_given(
    settings: dict[str, Any], taken: list[str], refused: list[str]
) -> None:
    config = GatewayConfig(**settings)

    async def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse("an answer")

    app = Starlette(routes=[Route("/v1/models", answer)])
    app.add_middleware(GateMiddleware, gate=Gate(config), config=config)

    async def statuses(hosts: list[str]) -> list[int]:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app),
            base_url="http://127.0.0.1",
            headers={"authorization": "Bearer secret"},
        ) as client:
            return [
                (await client.get("/v1/models", headers={"host": host})).status_code
                for host in hosts
            ]

    assert asyncio.run(statuses(taken)) == [200] * len(taken)
    assert asyncio.run(statuses(refused)) == [403] * len(refused)


def test_what_only_this_machine_reaches() -> None:
    assert all(map(is_local, ["127.0.0.1", "127.9.9.9", "::1", "localhost"]))
    assert not any(map(is_local, ["0.0.0.0", "::", "10.1.2.3", "example.org"]))
