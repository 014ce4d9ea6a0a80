"""The pages' files, the steps of a stream and the dashboard's figures, over HTTP without a
browser.
"""

import asyncio
import http.server
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from foredraft.api.verify.v1 import verify_pb2
from foredraft.config.services import GatewayConfig
from foredraft.errors import ConfigError, Unavailable
from gateway import figures as figures_module
from gateway import pages
from gateway.decoding import Chunk, Step
from gateway.figures import Figures
from gateway.openai.replies import ChatReply, CompletionReply, Reply
from gateway.openai.schemas import ChatBody, CompletionBody


class Pool:
    loads: dict[str, verify_pb2.Load] = {}  # noqa: RUF012


class Serving:
    """The model that a gateway has heard of."""

    def __init__(self, **config: object) -> None:
        self.config = GatewayConfig(**config)
        self.info = verify_pb2.GetModelInfoResponse(model="demo", speculative_algorithm="NGRAM")
        self.pool = Pool()


def client(**config: object) -> httpx.AsyncClient:
    app = FastAPI()
    serving = Serving(**config)
    app.include_router(pages.make_router(Figures(serving, serving.config.dashboard_metrics)))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def ask(path: str, method: str = "GET", **headers: str) -> httpx.Response:
    async def send() -> httpx.Response:
        async with client() as http:
            return await http.request(method, path, headers=headers)

    return asyncio.run(send())


def test_pages_name_only_files_that_are_there() -> None:
    for page in ("/", "/dashboard"):
        answer = ask(page)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        for path in re.findall(r'(?:href|src)="(/web/[^"]+)"', answer.text):
            assert ask(path).status_code == 200
        assert "style=" not in answer.text
        assert not re.search(r"<script(?![^>]*src=)", answer.text)


def test_modules_import_only_files_that_are_there() -> None:
    assets = pages.load_assets()
    for name, asset in assets.items():
        text = asset.body.decode()
        for other in re.findall(r'from "\./([^"]+)"', text):
            assert other in assets
        urls = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not urls, f"{name} names {urls}"


@pytest.mark.parametrize("path", ["/", "/dashboard", "/web/base.css", "/web/playground.js"])
def test_files_come_with_strict_headers_and_are_checked_again(path: str) -> None:
    answer = ask(path)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "*" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = ask(path, **{"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    head = ask(path, "HEAD")
    assert head.status_code == 200
    assert head.headers["etag"] == answer.headers["etag"]


@pytest.mark.parametrize(
    "path", ["/web/", "/web/none.js", "/web/..%2fapp.py", "/web/%2e%2e/app.py", "/web/__init__.py"]
)
def test_nothing_else_is_served(path: str) -> None:
    assert ask(path).status_code == 404


# ---- steps of a stream


class Tokenizer:
    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_steps_tell_what_was_drafted_only_when_asked(kind: str) -> None:
    tree = verify_pb2.VerifiedTree(
        tokens=[97, 98, 99], parents=[-1, 0, -1], accepted=[0, 1], draft="NGRAM"
    )
    chunk = Chunk(0, steps=[Step(3, tree), Step(1, None)])
    for asked in (True, False):
        reply: Reply
        if kind == "chat":
            reply = ChatReply(Tokenizer(), ChatBody(messages=[], return_provenance=asked))
        else:
            body = CompletionBody(prompt="", return_provenance=asked)
            reply = CompletionReply(Tokenizer(), body, [], [[]])
        delta = reply.deltas(0, 0, chunk, True)[-1]  # behind the role of a chat
        assert ("steps" in delta) == ("provenance" in delta) == asked
        if asked:
            nodes = [("a", -1), ("b", 0), ("c", -1)]
            drafted = [{"id": ord(text), "text": text, "parent": p} for text, p in nodes]
            assert delta["steps"] == [
                {"tokens": 3, "draft": "NGRAM", "drafted": drafted, "accepted": [0, 1]},
                {"tokens": 1, "draft": None, "drafted": [], "accepted": []},
            ]


# ---- figures


@pytest.fixture
def metrics_page() -> Iterator[
    Callable[[Callable[[http.server.BaseHTTPRequestHandler], None]], str]
]:
    """Starts a server with the given handler of GET; returns its host:port."""
    servers = []

    def start(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer(self)

            def log_message(self, *arguments: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def send(handler: Any, body: bytes, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


def gather(*addresses: str) -> dict[str, Any]:
    return asyncio.run(Figures(Serving(), addresses).get())


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process leave figures in the registry, which a gateway would add up
    too.
    """
    monkeypatch.setattr(figures_module, "REGISTRY", CollectorRegistry())


def test_pages_are_added_up_and_only_known_metrics_leave(
    metrics_page: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(figures_module, "SCRAPE_SECONDS", 60.0)
    page = (
        b"# TYPE foredraft_emitted_tokens"
        b' counter\nforedraft_emitted_tokens_total{algorithm="NGRAM"} 5\n# TYPE'
        b" foredraft_accepted_tokens_per_position"
        b' counter\nforedraft_accepted_tokens_per_position_total{algorithm="NGRAM",position="1"}'
        b" 2\nsecret_things 7\nforedraft_kv_pages NaN\n"
    )
    asked = []

    def answer(handler: Any) -> None:
        asked.append(handler.path)
        send(handler, page)

    found = gather(metrics_page(answer), metrics_page(answer))
    assert asked == ["/metrics", "/metrics"]
    assert found["pages"] == {"configured": 2, "answering": 2}
    assert found["metrics"]["emitted_tokens_total"] == 10
    assert found["metrics"]["accepted_tokens_per_position_total"] == {"1": 4}
    assert "kv_pages" not in found["metrics"]
    assert "secret" not in json.dumps(found)
    assert "127.0.0.1" not in json.dumps(found)


def test_what_is_no_metrics_page_is_left_out(metrics_page: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(figures_module, "SCRAPE_SECONDS", 0.2)
    release = threading.Event()

    def drip(handler: Any) -> None:
        send(handler, b"")
        while not release.wait(0.05):
            handler.wfile.write(b"#")

    target = metrics_page(lambda handler: send(handler, b"foredraft_emitted_tokens_total 1\n"))
    answers = [
        lambda handler: send(handler, b"<html>no</html>"),
        lambda handler: send(handler, b"", 302, location=f"http://{target}/metrics"),
        lambda handler: send(handler, b"foredraft_drafts_total 1\n" * 50_000),
        lambda handler: send(handler, b"\xff\xfe"),
        lambda handler: send(handler, b"", 500),
        lambda handler: release.wait(5),
        drip,
    ]
    found = gather(*(metrics_page(answer) for answer in answers), "127.0.0.1:1")
    release.set()
    assert found["pages"] == {"configured": 8, "answering": 0}
    assert "emitted_tokens_total" not in found["metrics"]


def test_many_viewers_cost_one_scrape(metrics_page: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(figures_module, "CACHE_SECONDS", 60.0)
    asked = []

    def answer(handler: Any) -> None:
        asked.append(handler.path)
        send(handler, b"foredraft_verifies_total 1\n")

    address = metrics_page(answer)

    async def view() -> list[httpx.Response]:
        async with client(dashboard_metrics=(address,)) as viewers:
            return await asyncio.gather(*(viewers.get("/dashboard/figures") for _ in range(50)))

    answers = asyncio.run(view())
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["time"] for answer in answers}) == 1
    assert len(asked) == 1


def test_history_is_kept_without_viewers_and_in_rows_of_one_spacing(
    metrics_page: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(figures_module, "HISTORY_SECONDS", 0.05)
    monkeypatch.setattr(figures_module, "CACHE_SECONDS", 0.01)
    emitted = iter(range(1, 1000))

    def answer(handler: Any) -> None:
        send(
            handler, b"foredraft_emitted_tokens_total %d\nforedraft_queue_depth 3\n" % next(emitted)
        )

    monkeypatch.setattr(figures_module, "SCRAPE_SECONDS", 60.0)
    figures = Figures(Serving(), [metrics_page(answer)])

    async def look() -> dict[str, Any]:
        following = asyncio.create_task(figures.follow())
        while len((await figures.history())["rows"]) < 4:
            await asyncio.sleep(0.005)  # and asks more often than rows are kept
        following.cancel()
        return await figures.history()

    found = asyncio.run(look())
    columns = found["columns"]
    rows = [dict(zip(columns, row, strict=True)) for row in found["rows"]]
    assert [row["emitted"] for row in rows] == sorted({row["emitted"] for row in rows})
    times = [row["time"] for row in rows]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert min(gaps) >= 0.045
    assert found["now"] >= times[-1]
    assert rows[-1]["waiting"] == 3
    assert rows[-1]["tokens"] is None  # no page has it
    assert found["oldest"]["emitted_tokens_total"] == rows[0]["emitted"] == 1


def test_a_gateway_without_a_verifier_keeps_no_history() -> None:
    class Nothing(Serving):
        info = property(lambda self: (_ for _ in ()).throw(Unavailable("none yet")))

        def __init__(self) -> None:
            self.config, self.pool = GatewayConfig(), Pool()

    figures = Figures(Nothing(), [])

    async def look() -> None:
        following = asyncio.create_task(figures.follow())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await figures.history()
        assert not following.done()
        following.cancel()

    asyncio.run(look())


@pytest.mark.parametrize(
    "address",
    [
        "",
        "localhost",
        "http://host:1/",
        "host:1/path",
        "user@host:1",
        "host:99999",
        "host:1?x",
        "::1",
    ],
)
def test_addresses_are_host_and_port(address: str) -> None:
    with pytest.raises(ConfigError, match="dashboard-metrics"):
        Figures(Serving(), [address])
