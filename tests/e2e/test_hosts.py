"""Ranks of two hosts: two process groups that share no memory, in network namespaces of their own
where this machine allows that.
"""

import concurrent.futures
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from testing.forked import RANKS_VARIABLE
from testing.hosts import Host, other_ranks
from testing.stack import eventually, free_port, is_idle, long_answer, make_model, running_stack

NAMESPACE = f"foredraft-{os.getpid()}"
NUM_TOKENS = 50  # four ranks on gloo take two cores for 70 ms each
# A network interface's name has 15 letters, and tests may run beside each other.
LINKS = (f"fd{os.getpid()}a", f"fd{os.getpid()}b")
ADDRESSES = tuple(f"10.231.{os.getpid() % 250}.{host}" for host in (1, 2))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other_host() -> Iterator[tuple[str, list[str]]]:
    """Address of host 0, and what begins the command line of a process on host 1."""
    steps = [
        f"ip netns add {NAMESPACE}",
        f"ip link add {LINKS[0]} type veth peer name {LINKS[1]} netns {NAMESPACE}",
        f"ip addr add {ADDRESSES[0]}/24 dev {LINKS[0]}",
        f"ip link set {LINKS[0]} up",
        f"ip -n {NAMESPACE} addr add {ADDRESSES[1]}/24 dev {LINKS[1]}",
        f"ip -n {NAMESPACE} link set {LINKS[1]} up",
        f"ip -n {NAMESPACE} link set lo up",
    ]
    try:
        for step in steps:
            subprocess.run(step.split(), check=True, capture_output=True)
        inside = f"ip netns exec {NAMESPACE} unshare -m sh -c"
        mounts = "mount -t tmpfs none /dev/shm && mount -t tmpfs none /run"
        subprocess.run([*inside.split(), mounts], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        yield "127.0.0.1", []
    else:
        yield ADDRESSES[0], [*inside.split(), f'{mounts} && exec "$@"', "host1"]
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(["ip", "netns", "del", NAMESPACE], check=False, capture_output=True)


def test_two_hosts_answer_and_a_lost_rank_is_named(
    model: Path, other_host: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RANKS_VARIABLE, "1")  # ten processes would import torch, each for seconds
    address, before = other_host
    where = f"{address}:{free_port()}"
    with running_stack(model, speculative_algorithm="NONE") as stack:
        expected = long_answer(stack.urls["http"], NUM_TOKENS)
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
    with Host(given, before, is_forked=True) as host, running_stack(model, lines, **flags) as stack:
        url = stack.urls["http"]
        assert long_answer(url, NUM_TOKENS) == expected
        first, second = other_ranks(lines)
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
                asked = pool.submit(long_answer, url, NUM_TOKENS)
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
