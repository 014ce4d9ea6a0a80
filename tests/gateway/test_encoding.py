"""Prompts that would stop a tokenizer or a template: they are ended, and others do not notice."""

import asyncio
import concurrent.futures
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foredraft.cli.stack import LocalStack
from foredraft.errors import CheckpointError, InvalidRequest, Unavailable
from foredraft.text.tokenizer import Tokenizer
from gateway.encoding.pool import EncodingPool
from testing import stack as stacks
from testing.chaos.processes import is_alive
from testing.stack import eventually

TEMPLATE = """\
{%- set said = messages[0].content -%}
{%- if said == "slow" -%}
{%- for i in range(90000) -%}{%- for j in range(90000) -%}{%- endfor -%}{%- endfor -%}
{%- elif said == "big" -%}
{%- set ns = namespace(found=[1]) -%}
{%- for i in range(60) -%}{%- set ns.found = ns.found + ns.found -%}{%- endfor -%}
{%- endif -%}
{{ said }}"""
SLOTS = {"num_processes": 2, "timeout": 60.0, "memory_mb": 256}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "hostile.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def web(stack: LocalStack, template: Path) -> Iterator[httpx.Client]:
    verifier = next(service.health for service in stack.services if service.name == "verify")
    flags = {"chat_template": template, "tokenizer_timeout": 3, "tokenizer_memory_mb": 256}
    with (
        stacks.running_gateway(verifier, **flags) as (url, _),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        eventually(lambda: client.get("/health").status_code == 200)
        yield client


def ask(web: httpx.Client, said: str) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": said}], "max_tokens": 2, "temperature": 0}
    return web.post("/v1/chat/completions", json=body)


def kills(web: httpx.Client, why: str) -> float:
    line = f'foredraft_gateway_encoding_kills_total{{why="{why}"}} '
    rows = web.get("/metrics").text.splitlines()
    return sum(float(row.removeprefix(line)) for row in rows if row.startswith(line))


def test_slow_prompts_do_not_stop_others(web: httpx.Client) -> None:
    before = kills(web, "time")
    expected = ask(web, "hello").json()["choices"][0]["message"]["content"]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        hostile = [threads.submit(ask, web, "slow") for _ in range(4)]
        good = 0
        while not all(future.done() for future in hostile):
            answer = ask(web, "hello")
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] == expected
            good += 1
        for future in hostile:
            error = future.result().json()["error"]
            assert future.result().status_code == 400
            assert error["param"] == "messages"
            assert "takes more than the 3 s" in error["message"]
    assert good >= 2, "they ran side by side"
    assert kills(web, "time") == before + 4
    print(f"{good} good requests while 4 hostile ones were ended")


def test_big_prompts_are_ended(web: httpx.Client) -> None:
    answer = ask(web, "big")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
    assert ask(web, "hello").status_code == 200


def run(tokenizer: Path, template: Path | None, work: Any) -> Any:
    async def main() -> Any:
        pool = EncodingPool(str(tokenizer), str(template or ""), **SLOTS)
        await pool.start()
        try:
            return await work(pool)
        finally:
            await pool.close()

    return asyncio.run(main())


def test_the_same_as_in_process(model: Path) -> None:
    tokenizer = Tokenizer.from_dir(model)
    texts = ["", "The dog", "你好 🙂", "a" * 10_000, "\x00\n\t", "<s></s>"]

    async def work(pool: EncodingPool) -> None:
        for text in texts:
            for special in (True, False):
                tokens = await pool.encode(text, special, "prompt")
                assert tokens == tokenizer.encode(text, special)
                assert await pool.decode(tokens, special, "tokens") == tokenizer.decode(
                    tokens, special
                )
        messages = [{"role": "user", "content": "Hi"}]
        for variables in ({}, {"add_generation_prompt": False}):
            found = await pool.encode_chat(messages, variables, "messages")
            assert found == tokenizer.encode_chat(messages, **variables)
        # A job whose client has gone leaves nothing behind.
        gone = asyncio.create_task(pool.encode("b" * 100_000, True, "prompt"))
        await asyncio.sleep(0)
        gone.cancel()
        assert await pool.encode("The dog", True, "prompt") == tokenizer.encode("The dog")

    run(model, None, work)


def test_killed_processes_come_back(model: Path, template: Path) -> None:
    async def work(pool: EncodingPool) -> None:
        expected = await pool.encode("The dog", True, "prompt")
        for _ in range(3):
            for process in list(pool._idle._queue):  # type: ignore[attr-defined]
                if process is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
            assert await pool.encode("The dog", True, "prompt") == expected
        # So does the one that they are forked from.
        assert pool._loader is not None
        pool._loader.kill()
        pool._loader.wait()
        for _ in range(4):
            assert await pool.encode("The dog", True, "prompt") == expected
        with pytest.raises(InvalidRequest, match="takes too much memory"):
            await pool.encode_chat([{"role": "user", "content": "big"}], {}, "messages")
        assert await pool.encode("The dog", True, "prompt") == expected

    run(model, template, work)


def test_a_tokenizer_that_does_not_load(tmp_path: Path) -> None:
    async def work(pool: EncodingPool) -> None:
        raise AssertionError

    with pytest.raises(CheckpointError):
        run(tmp_path, None, work)


def test_a_tokenizer_that_loads_too_slowly_is_no_fault_of_a_request(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(pool: EncodingPool) -> None:
        expected = await pool.encode("The dog", True, "prompt")
        for process in list(pool._idle._queue):  # type: ignore[attr-defined]
            os.kill(process.pid, signal.SIGKILL)
        assert pool._loader is not None
        pool._loader.kill()
        pool._loader.wait()
        with monkeypatch.context() as patch:
            patch.setattr("gateway.encoding.pool.LOAD_SECONDS", 0.01)
            with pytest.raises(Unavailable, match=r"did not load within 0\.01 s"):
                await pool.encode("The dog", True, "prompt")
        assert await pool.encode("The dog", True, "prompt") == expected

    run(model, None, work)


def test_no_process_is_left(model: Path) -> None:
    pids: list[int] = []

    async def work(pool: EncodingPool) -> None:
        assert pool._loader is not None
        pids.append(pool._loader.pid)
        pids.extend(process.pid for process in pool._idle._queue)  # type: ignore[attr-defined]

    run(model, None, work)

    assert len(pids) == 3
    eventually(lambda: not any(map(is_alive, pids)))


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(texts=st.lists(st.text(max_size=200), min_size=1, max_size=20))
def test_any_text(model: Path, texts: list[str]) -> None:
    tokenizer = Tokenizer.from_dir(model)

    async def work(pool: EncodingPool) -> None:
        found = await asyncio.gather(*(pool.encode(text, True, "prompt") for text in texts))
        assert list(found) == [tokenizer.encode(text) for text in texts]

    run(model, None, work)
