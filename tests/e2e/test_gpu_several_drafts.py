"""Several drafts of a target on a GPU: one or two that follow there, and n-grams from the host;
texts are those of plain decoding.
"""

from collections.abc import Sequence as Wants
from pathlib import Path

import numpy as np
import pytest

from foredraft.models.registry import BUNDLED_DRAFTS, resolve_model_path
from testing.engines import Harness, running_engine
from testing.family_texts import assert_same, plain_jobs, texts_of
from testing.triton_device import needs_gpu
from verify_service.controller.messages import Candidate
from verify_service.drafts.hidden_states import HiddenStates
from verify_service.drafts.run import Run
from verify_service.metrics import OVERLAPPED_STEPS
from verify_service.scheduler.request import Sequence

pytestmark = [pytest.mark.gpu, needs_gpu]
NUM_TOKENS = 160


@pytest.fixture(scope="module")
def demo() -> Path:
    return resolve_model_path("foredraft-demo")


@pytest.fixture(scope="module")
def expected(demo: Path) -> list[list[int]]:
    return texts_of(demo, "NONE", "cpu", plain_jobs(demo, NUM_TOKENS))


def change_often(harness: Harness) -> None:
    """Gives every sequence to another draft now and then, all at a time or one by one."""
    num_drafts, num_steps = len(harness.drafts), 0

    def values(candidates: Wants[Candidate], plain: float) -> np.ndarray:
        nonlocal num_steps
        num_steps += 1
        found = np.ones((num_drafts, len(candidates)))
        for i, one in enumerate(candidates):
            shift = id(one.history) // 64 % 2 if num_steps % 60 > 40 else 0
            found[(num_steps // 12 + shift) % num_drafts, i] = 2.0
        return found

    harness.engine._sizes.controller._goodput.of_drafts = values


@pytest.mark.parametrize(
    ("names", "adaptive"),
    [
        ("EAGLE3,STANDALONE,NGRAM", True),
        ("EAGLE3,MTP", False),
        ("EAGLE3,NGRAM", False),
        ("STANDALONE,NGRAM", True),
    ],
)
def test_whichever_drafts_the_texts_are_those_of_plain_decoding(
    demo: Path,
    expected: list[list[int]],
    names: str,
    adaptive: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_cut, begin = 0, HiddenStates._begin

    def count_cut(self: HiddenStates, sequence: Sequence, start: int) -> Run:
        nonlocal num_cut
        num_cut += self.run_of(sequence) is not None
        return begin(self, sequence, start)

    monkeypatch.setattr(HiddenStates, "_begin", count_cut)
    work = plain_jobs(demo, NUM_TOKENS)
    paths = {name: BUNDLED_DRAFTS.get(name) for name in names.split(",")}
    flags = {
        "device": "cuda",
        "dtype": "float32",
        "max_total_tokens": 16384,
        "max_running_requests": 8,
        "draft_step_timeout": 60.0,
        "speculative_adaptive": adaptive,
        "speculative_draft_model_path": ",".join(
            f"{name}={path}" for name, path in paths.items() if path
        ),
    }
    with running_engine(demo, names, **flags) as harness:
        got = [result.tokens for result in harness.run(work, timeout=300)]
        assert_same(demo, got, expected, work)
        acceptance = harness.engine._sizes.controller._acceptance
        assert min(one.num_outcomes for one in acceptance) > 1  # all were asked
        # Beside so small a target n-grams may be the better draft all along, behind which no step
        # is started.
        change_often(harness)
        before = OVERLAPPED_STEPS._value.get()
        num_cut = 0
        got = [result.tokens for result in harness.run(work, timeout=300)]
        assert_same(demo, got, expected, work)
        assert OVERLAPPED_STEPS._value.get() - before > 5
        # A head whose turn it is not is given what it misses, also of steps that another one
        # follows.
        assert num_cut <= len(work)
        harness.check_nothing_left()


def test_the_one_that_follows_is_killed(demo: Path, expected: list[list[int]]) -> None:
    work = plain_jobs(demo, NUM_TOKENS)
    flags = {
        "device": "cuda",
        "dtype": "float32",
        "max_total_tokens": 16384,
        "max_running_requests": 8,
        "speculative_adaptive": False,
        "speculative_draft_model_path": BUNDLED_DRAFTS["EAGLE3"],
    }
    with running_engine(demo, "EAGLE3,NGRAM", **flags) as harness:
        harness.drafts["EAGLE3"].kill()
        got = [result.tokens for result in harness.run(work, timeout=300)]
        assert_same(demo, got, expected, work)
        assert not harness.engine._drafts.each[0].epoch
        assert harness.engine._drafts.each[1].epoch
        harness.check_nothing_left()
