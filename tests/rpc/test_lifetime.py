"""Ends of a service's process: by signals, with its parent, or with its GPU."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foredraft.rpc.lifetime import DEVICE_LOST, PARENT_VARIABLE, child_environment

ROOT = Path(__file__).parents[2]

SERVICE = """
import asyncio, os, sys
from foredraft.rpc.lifetime import run, stop_event
async def main():
    event = stop_event()
    print("parent" if "FOREDRAFT_SUPERVISOR_PID" in os.environ else "alone", flush=True)
    await event.wait()
    print("stopping", flush=True)
    if len(sys.argv) > 1:
        await asyncio.sleep(3600)
    return 5
sys.exit(run(main))
"""


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE, *arguments],
        cwd=ROOT,
        env=child_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_sigterm_lets_a_service_end_by_itself() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with running() as process:
            assert process.stdout
            # What it starts itself must not look for a supervisor.
            assert process.stdout.readline() == "alone\n"
            process.send_signal(number)
            assert process.wait(30) == 5


def test_a_second_signal_ends_it_at_once() -> None:
    with running("hang") as process:
        assert process.stdout
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM


def test_the_environment_names_this_process() -> None:
    added = {"GRPC_ENABLE_FORK_SUPPORT": "0", PARENT_VARIABLE: str(os.getpid())}
    assert child_environment({"A": "b"}) == {"A": "b", **added}
    chosen = {"GRPC_ENABLE_FORK_SUPPORT": "1"}  # by whoever started this process
    assert child_environment(chosen) == {**added, **chosen}


def test_a_lost_gpu_ends_a_service_at_once() -> None:
    program = """
import atexit, sys, time
from foredraft.rpc import lifetime
atexit.register(time.sleep, 3600)  # as memory on such a GPU may be given back
async def main():
    lifetime.end_at_once(lifetime.DEVICE_LOST)
sys.exit(lifetime.run(main))
"""
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60)
    assert ran.returncode == DEVICE_LOST
