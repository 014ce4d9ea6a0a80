"""Ranks of two hosts on CPUs: their text is one rank's, and a lost rank is named."""

import concurrent.futures
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from testing import hosts
from testing.hosts import Host
from testing.stack import eventually, free_port, is_idle, long_answer, make_model, running_stack


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other_host() -> Iterator[tuple[str, list[str]]]:
    with hosts.other_host() as found:
        yield found


def other_ranks(lines: list[str]) -> list[int]:
    """Processes on host 1, by what rank 0 has logged last."""
    [*_, joined] = [line for line in lines if "ranks have joined" in line]
    return [int(pid) for pid in re.findall(r"pid (\d+) on ", joined)]


def test_two_hosts_answer_and_a_lost_rank_is_named(
    model: Path, other_host: tuple[str, list[str]]
) -> None:
    address, before = other_host
    where = f"{address}:{free_port()}"
    with running_stack(model, speculative_algorithm="NONE") as stack:
        expected = long_answer(stack.urls["http"])
    flags = {
        "tensor_parallel_size": 4,
        "nnodes": 2,
        "dist_init_addr": where,
        "speculative_algorithm": "NONE",
    }
    given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    given += ["--node-rank=1", f"--model-path={model}", "--device=cpu", "--num-threads=1"]
    given += ["--port=0", "--grpc-port=0"]
    lines: list[str] = []
    with Host(before, *given) as host, running_stack(model, lines, **flags) as stack:
        url = stack.urls["http"]
        assert long_answer(url) == expected
        first, second = other_ranks(lines)
        assert b"verify_service.rank" in Path(f"/proc/{first}/cmdline").read_bytes()
        own = b"foredraft-ranks"
        assert own not in Path(f"/proc/{first}/maps").read_bytes()
        for pid, number, told in (
            (second, signal.SIGKILL, "has closed its connection"),
            (None, signal.SIGSTOP, "has shown no sign of life for 8 s"),
        ):
            pid = pid or other_ranks(lines)[1]
            [verifier] = [state.pid for state in stack.states() if state.name == "verify"]
            with (
                httpx.Client(base_url=url, timeout=60) as http,
                concurrent.futures.ThreadPoolExecutor(1) as pool,
            ):
                asked = pool.submit(long_answer, url)
                eventually(lambda: not is_idle(http) or asked.done())  # noqa: B023
                os.kill(pid, number)
                eventually(lambda: not Path(f"/proc/{verifier}").exists())  # noqa: B023
                assert asked.result() == expected
            named = rf"rank 3 of 4 \(pid {pid} on [\d.]+\) {told}.*: ending this verifier"
            assert any(re.search(named, line) for line in lines)
        pids = other_ranks(lines)
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert host.process.returncode == 0
    assert not [line for line in [*lines, *host.lines] if "Traceback" in line]
