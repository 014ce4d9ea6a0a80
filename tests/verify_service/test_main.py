"""Ends of a verifier's process that cannot start, or whose engine cannot serve any more."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foredraft.rpc.lifetime import DEVICE_LOST
from testing.checkpoints import make_checkpoint
from testing.drafts import ROOT
from testing.endless_loading import signalled_while_it_loads
from verify_service import __main__ as main


class Ended(Exception):
    """The process would have."""


def watch(engine: Any, device: str, seconds: float) -> bool:
    """Whether it was told to stop in that time."""

    async def run() -> bool:
        stop = asyncio.Event()
        watching = asyncio.create_task(main._watch(engine, stop, torch.device(device)))
        done, _ = await asyncio.wait([watching], timeout=seconds)
        watching.cancel()
        for task in done:
            task.result()
        return stop.is_set()

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(status: int) -> None:
        assert status == DEVICE_LOST
        raise Ended

    monkeypatch.setattr(main, "STUCK_SECONDS", 0.3)
    monkeypatch.setattr(main.lifetime, "end_at_once", end)


def test_a_gpu_that_ends_no_step_ends_the_process() -> None:
    with pytest.raises(Ended):
        watch(SimpleNamespace(failure=None, is_idle=False, ended_at=0.0), "cuda", 60)


@pytest.mark.parametrize(("is_idle", "device"), [(True, "cuda"), (False, "cpu")])
def test_nothing_to_do_and_a_slow_cpu_do_not(is_idle: bool, device: str) -> None:
    assert not watch(SimpleNamespace(failure=None, is_idle=is_idle, ended_at=0.0), device, 0.8)


def test_an_engine_that_failed_stops_the_service() -> None:
    engine = SimpleNamespace(failure=RuntimeError("a bug"), is_idle=False, ended_at=0.0)
    assert watch(engine, "cuda", 60)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (2, "cannot start: --max-total-tokens must be at least one page"),
        (10**13, "cannot start: no memory is left for the KV cache: --max-total-tokens 1000000"),
    ],
)
def test_one_that_cannot_start_says_why_and_nothing_else(
    tmp_path: Path, tokens: int, said: str
) -> None:
    target, socket = make_checkpoint(tmp_path / "target"), tmp_path / "verify.sock"
    flags = ["--model-path", str(target), "--listen", f"unix:{socket}", "--device", "cpu"]
    command = [sys.executable, "-m", "verify_service", *flags, f"--max-total-tokens={tokens}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    assert said in (result.stdout + result.stderr).splitlines()[-1]
    assert not socket.exists()


def test_one_that_fails_to_start_ends_with_the_error(tmp_path: Path) -> None:
    target, socket = make_checkpoint(tmp_path / "target"), tmp_path / "verify.sock"
    program = (
        "import sys, verify_service.__main__ as main\n"
        "def fail(*_): raise RuntimeError('a defect')\n"
        "main._build = fail\n"
        "sys.exit(main.main())"
    )
    flags = ["--model-path", str(target), "--listen", f"unix:{socket}", "--device", "cpu"]
    command = [sys.executable, "-c", program, *flags]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    assert (result.stdout + result.stderr).splitlines()[-1] == "RuntimeError: a defect"


def test_one_that_is_interrupted_while_it_loads_ends_at_once(tmp_path: Path) -> None:
    socket = tmp_path / "verify.sock"
    status, last_line = signalled_while_it_loads("verify_service", "_build", socket, signal.SIGINT)
    assert status == 128 + signal.SIGINT
    assert last_line.endswith("SIGINT: stopping")
    assert not socket.exists()


@pytest.mark.parametrize("flag", ["--draft", "--listen"])
def test_an_address_that_is_none_is_told_with_its_flag(flag: str) -> None:
    command = [sys.executable, "-m", "verify_service", f"{flag}=http://127.0.0.1:1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert f"cannot start: {flag}: address 'http://127.0.0.1:1': host:port is taken" in ended.stderr


@pytest.mark.parametrize("command", ["verify_service", "foredraft.cli.main serve"])
def test_memory_of_a_gpu_is_not_required_of_a_cpu(command: str) -> None:
    flags = ["--device=cpu", "--require-transport=cuda_ipc"]
    arguments = [sys.executable, "-m", *command.split(), *flags]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert ended.returncode in (1, 2)
    assert "--require-transport cuda_ipc: the target runs on a CPU" in ended.stderr
