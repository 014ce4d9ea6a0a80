"""Tests which sequences a step syncs to the draft, and how many of their tokens."""

from pathlib import Path

import pytest

from testing.checkpoints import make_checkpoint
from testing.hidden_drafts import HiddenDrafter, engine_with
from testing.hidden_work import FLAGS, jobs, texts


@pytest.mark.parametrize("refill", [0, 6])
def test_all_catch_up_however_little_a_step_may_read(refill: int, tmp_path: Path) -> None:
    """Who is told last is left nothing of what a step may read; what it commits is told all the
    same.
    """
    target = make_checkpoint(tmp_path / "target")
    work = jobs(6, num_new=90)
    drafter = HiddenDrafter(0, skill=1.0, weight_bytes=1, algorithm="STANDALONE")
    drafter.texts = texts(target, work)
    with engine_with(drafter, target, draft_refill_tokens=refill, **FLAGS) as harness:
        harness.wait_for_draft()
        results = harness.run(work)
        harness.check_nothing_left()
    for job, result in zip(work, results, strict=True):
        assert job.prompt + result.tokens in drafter.texts
        assert result.finish is not None
        assert result.finish.accepted_tokens > 0
    assert drafter.check(target) > 100
