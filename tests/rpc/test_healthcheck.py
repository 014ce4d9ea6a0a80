"""The program that a container asks for a service's health."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from foredraft.rpc import healthcheck
from foredraft.rpc.server import RpcServer

PATIENCE = "--timeout=60"


@contextmanager
def _serving(listen: str, serving: bool) -> Iterator[str]:
    """A server in a thread of its own; gives its address."""
    started, addresses = threading.Event(), []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        server = RpcServer(listen)
        addresses.append(str(await server.start()))
        await server.set_serving(serving)
        started.set()
        await stop.wait()
        await server.stop(0)

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert started.wait(60)
    try:
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def test_a_serving_server_is_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    with _serving("127.0.0.1:0", serving=True) as address:
        assert healthcheck.main([address, PATIENCE]) == 0
        assert healthcheck.main([address, PATIENCE, "--service", "no.such.Service"]) == 1
    assert capsys.readouterr().out.split() == ["SERVING", "SERVICE_UNKNOWN"]


def test_a_server_that_starts_or_is_gone_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"unix:{tmp_path}/s.sock"
    with _serving(address, serving=False):
        assert healthcheck.main([address, PATIENCE]) == 1
    assert healthcheck.main([address, "--timeout", "0.5"]) == 1
    assert capsys.readouterr().out.split() == ["NOT_SERVING", "UNREACHABLE"]


def test_a_wrong_address_is_an_error_of_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        healthcheck.main(["nowhere"])
    assert exit_info.value.code == 2
    assert "neither host:port nor unix:/path" in capsys.readouterr().err
