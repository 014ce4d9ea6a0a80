"""Drafts on the verifier's GPU that die or stand still with rows on their way: no token differs,
and no memory is lost.
"""

import contextlib
import json
import os
import shutil
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.cli import mps, stack
from foredraft.models.registry import resolve_model_path
from foredraft.rpc.lifetime import DEVICE_LOST
from foredraft.telemetry.metrics import value
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams
from testing import engines
from testing.engines import Harness, Job, running_engine
from testing.fault_cases import BlockCount, FaultyDraft, do_fault
from testing.faulty_draft import FaultFile
from testing.stack import eventually, running_stack
from testing.triton_device import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]
AVAILABLE = "foredraft_draft_available"
FLAGS = {
    "device": "cuda",
    "dtype": "float32",
    "max_total_tokens": 16384,
    "max_running_requests": 8,
    "draft_step_timeout": 1.0,
}
DRAFT = {
    "speculative_draft_model_path": str(resolve_model_path("foredraft-demo-eagle3")),
    "require_transport": "cuda_ipc",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 6,
}


@pytest.fixture(scope="module")
def demo() -> Path:
    return resolve_model_path("foredraft-demo")


def jobs(demo: Path, count: int, num_tokens: int = 60) -> list[Job]:
    tokenizer = Tokenizer.from_dir(demo)
    prompt = tokenizer.encode("def main():\n    parser = argparse.ArgumentParser()\n")
    return [
        Job(
            [*prompt, 40 + i],
            SamplingParams(
                temperature=float(i % 2), seed=i, max_new_tokens=num_tokens, ignore_eos=True
            ),
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def expected(demo: Path) -> list[list[int]]:
    with running_engine(demo, "NONE", **FLAGS) as harness:
        return [result.tokens for result in harness.run(jobs(demo, 8))]


@pytest.fixture(scope="module")
def blocks() -> BlockCount:
    return BlockCount()


@pytest.fixture(scope="module")
def harness(
    demo: Path,
    expected: list[list[int]],
    blocks: BlockCount,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Harness]:
    """An engine for all faults: each of them must leave it unchanged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULT_FILE", str(tmp_path_factory.mktemp("fault") / "fault"))
        patch.setattr(engines, "new_draft", FaultyDraft)
        with running_engine(demo, "EAGLE3", **FLAGS, **DRAFT) as made:
            yield made


def test_hidden_states_stay_on_the_gpu(
    harness: Harness, demo: Path, expected: list[list[int]]
) -> None:
    harness.wait_for_draft()
    assert value("foredraft_draft_transport_info", transport="cuda_ipc") == 1
    results = harness.run(jobs(demo, 8))
    assert [result.tokens for result in results] == expected
    accepted = sum(result.finish.accepted_tokens for result in results if result.finish)
    assert accepted > 100
    harness.check_nothing_left()


@pytest.mark.parametrize(
    ("point", "action"),
    [
        ("mapped", "SIGKILL"),
        ("waiting", "SIGKILL"),
        ("level 1", "SIGKILL"),
        ("published", "SIGKILL"),
        ("verified", "SIGSTOP"),
        ("handed on", "SIGSTOP"),
        ("idle", "SIGSTOP"),
        ("planned", "FAULT"),
    ],
)
def test_a_draft_that_goes_wrong_at_a_point(
    point: str,
    action: str,
    harness: Harness,
    blocks: BlockCount,
    demo: Path,
    expected: list[list[int]],
) -> None:
    """`python -m benchmarks.gpu.faults` does it at every point, with and without MPS."""
    found = do_fault(harness, point, action, jobs(demo, 8), expected, blocks)
    assert found.happened
    assert found.equal
    assert found.blocks == 1
    assert found.status == (DEVICE_LOST if action == "FAULT" else None)


def test_attaching_again_and_again_leaves_nothing(
    harness: Harness, blocks: BlockCount, demo: Path
) -> None:
    draft: Any = harness.draft
    found = []
    for _ in range(4):
        draft.kill()
        eventually(lambda: not harness.engine.load().draft_available, 10)
        draft.start()
        harness.wait_for_draft()
        harness.run(jobs(demo, 4, 10))
        torch.cuda.synchronize()
        found.append((blocks.num_alive, torch.cuda.memory_allocated()))
    assert found[1:] == [(1, found[1][1])] * 3


class Served:
    """A stack with a faulty draft, and one request to it."""

    def __init__(self, made: stack.LocalStack) -> None:
        self.stack = made

    def ask(self) -> str:
        body = {"prompt": "def main():\n    parser = ", "max_tokens": 200, "temperature": 0}
        request = urllib.request.Request(
            f"{self.stack.urls['http']}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return str(json.load(response)["choices"][0]["text"])

    def has_draft(self) -> bool:
        with urllib.request.urlopen(self.stack.urls["verify_metrics"], timeout=10) as response:
            lines = response.read().decode().splitlines()
        return any(line.startswith(AVAILABLE) and line.endswith(" 1.0") for line in lines)

    def serves(self, expected: str) -> bool:
        """Whether it answers as it did, with a draft."""
        with contextlib.suppress(OSError):
            return self.ask() == expected and self.has_draft()
        return False

    def pid_of(self, name: str) -> int:
        pid = next(state.pid for state in self.stack.states() if state.name == name)
        assert pid is not None
        return pid

    @property
    def restarts(self) -> dict[str, int]:
        return {state.name: state.num_restarts for state in self.stack.states()}


@pytest.fixture
def served(
    demo: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Served]:
    command = stack._command

    def faulty(module: str, *args: Any, **wiring: Any) -> tuple[str, ...]:
        module = FaultyDraft.module if module == "draft_service" else module
        return command(module, *args, **wiring)

    monkeypatch.setattr(stack, "_command", faulty)
    monkeypatch.setenv("FAULT_FILE", str(tmp_path / "fault"))
    under_mps = getattr(request, "param", True)
    if under_mps and shutil.which(mps.CONTROL) is None:
        pytest.skip("needs NVIDIA's MPS")
    flags = {**FLAGS, **DRAFT, "speculative_algorithm": "EAGLE3", "mps": under_mps}
    with running_stack(demo, **flags) as made:
        yield Served(made)


@pytest.mark.parametrize(("point", "action"), [("planned", "FAULT"), ("level 1", "SIGKILL")])
def test_a_stack_under_mps_serves_again_by_itself(
    point: str,
    action: str,
    served: Served,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A fault on the GPU takes all clients of MPS along, and whoever finds his GPU dead says so by
    his exit status.
    """
    eventually(served.has_draft, 60)
    expected = served.ask()
    faults = FaultFile(tmp_path / "fault", served.pid_of("draft"))
    faults.arm(point, action)
    deadline = time.monotonic() + 60
    while not faults.has_happened:
        assert time.monotonic() < deadline, "the draft did not come to that point"
        with contextlib.suppress(OSError):
            assert served.ask() == expected
    happened = time.monotonic()
    eventually(lambda: served.restarts["draft"] > 0, 60)
    eventually(lambda: served.serves(expected), 120)
    print(f"{action}: serves after {time.monotonic() - happened:.1f} s, {served.restarts}")
    ends = [message for message in caplog.messages if "restarting it" in message]
    print("exit statuses:", "; ".join(ends))
    assert served.restarts["gateway"] == 0
    assert any(f"verify exited with status {DEVICE_LOST}" in message for message in ends)


@pytest.mark.parametrize("served", [False, True], ids=["alone", "mps"], indirect=True)
def test_a_stack_whose_verifier_is_killed_serves_again(served: Served) -> None:
    eventually(served.has_draft, 60)
    expected = served.ask()
    with ThreadPoolExecutor() as pool:
        # Nothing of it is streamed, so the gateway asks again, unless it takes too long.
        asked = pool.submit(served.ask)
        time.sleep(0.05)
        os.kill(served.pid_of("verify"), signal.SIGKILL)
        killed = time.monotonic()
        error = asked.exception()
    if error is None:
        assert asked.result() == expected
    else:
        assert isinstance(error, urllib.error.HTTPError)
        assert error.code == 503
    eventually(lambda: served.restarts["verify"] > 0, 60)
    eventually(lambda: served.serves(expected), 120)
    print(f"serves after {time.monotonic() - killed:.1f} s, {served.restarts}")
    assert served.restarts["gateway"] == 0
