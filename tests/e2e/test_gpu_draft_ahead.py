"""Drafting ahead on a GPU: some chains are there before they are asked for, and no token differs,
alone and in growing batches, and when the draft dies while it prepares.
"""

import re
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from foredraft.models.registry import resolve_model_path
from testing.drafts import DraftProcess, card_variables
from testing.engines import Harness, Job, running_engine
from testing.family_texts import draft_flags, plain_jobs
from testing.stack import free_port
from testing.triton_device import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]
FLAGS = {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_total_tokens": 16384,
    "max_running_requests": 16,
    "draft_step_timeout": 5.0,
}
KILL_SECONDS = 0.1


@pytest.fixture(scope="module")
def demo() -> Path:
    return resolve_model_path("foredraft-demo")


def texts(harness: Harness, work: Sequence[Job]) -> list[list[int]]:
    return [one.tokens for one in harness.run(work)]


def growing(demo: Path) -> list[Job]:
    """Returns jobs whose first one or two are a batch too; greedy and sampled ones by turns."""
    return plain_jobs(demo, 96, spread=8)


def long(demo: Path) -> list[Job]:
    """Returns two jobs that take longer than KILL_SECONDS."""
    return plain_jobs(demo, 1600)[:2]


@pytest.fixture(scope="module")
def expected(demo: Path) -> dict[str, list[list[int]]]:
    with running_engine(demo, "NONE", **FLAGS) as harness:
        return {"growing": texts(harness, growing(demo)), "long": texts(harness, long(demo))}


@pytest.fixture(scope="module", params=["the target's card", "a card of its own"])
def drafting(
    demo: Path, expected: dict[str, list[list[int]]], request: pytest.FixtureRequest
) -> Iterator[tuple[Harness, int]]:
    # The engine of the expected texts has closed: two in one process would be in each other's way.
    port = free_port()
    flags = {**FLAGS, **draft_flags("STANDALONE", (3, 1, 4)), "speculative_draft_ahead": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftProcess, "module", "testing.mostly_ahead")
        if request.param == "a card of its own":
            if torch.cuda.device_count() < 2:
                pytest.skip("needs two NVIDIA GPUs")
            patch.setattr(DraftProcess, "variables", card_variables(1))
        with running_engine(demo, "STANDALONE", **flags, metrics_port=port) as harness:
            yield harness, port


def outcomes(port: int) -> dict[str, float]:
    """Returns how many prepared steps were hits and misses; none of either before the first."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        text = page.read().decode()
    found = re.findall(r'^foredraft_drafter_ahead_steps_total\{outcome="(\w+)"\} (\S+)', text, re.M)
    return {"hit": 0.0, "miss": 0.0} | {name: float(value) for name, value in found}


def test_no_token_differs(
    drafting: tuple[Harness, int], demo: Path, expected: dict[str, list[list[int]]]
) -> None:
    harness, port = drafting
    for size in (1, 2, 3, 10):
        assert texts(harness, growing(demo)[:size]) == expected["growing"][:size]
    harness.check_nothing_left()
    found = outcomes(port)
    assert sum(found.values()), "no step was prepared: do the draft's steps stay on the GPU?"
    assert found["hit"] > 5
    assert found["miss"] > 5


@pytest.mark.parametrize("size", [1, 2])
def test_a_draft_that_dies_while_it_prepares(
    size: int, drafting: tuple[Harness, int], demo: Path, expected: dict[str, list[list[int]]]
) -> None:
    harness, port = drafting
    assert harness.draft is not None
    killer = threading.Timer(KILL_SECONDS, harness.draft.kill)
    killer.start()
    found = texts(harness, long(demo)[:size])
    was_killed = not killer.is_alive()
    killer.join()
    harness.draft.start()
    harness.wait_for_draft()
    assert was_killed, "the texts ended before"
    assert found == expected["long"][:size]
    assert texts(harness, long(demo)[:size]) == expected["long"][:size]
    assert outcomes(port)["hit"] > 0, "the new draft prepares too"
    harness.check_nothing_left()
