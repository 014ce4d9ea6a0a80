"""What an executor may put off is done while nothing runs."""

from pathlib import Path

import pytest

from foredraft.types import SamplingParams
from testing.checkpoints import make_checkpoint
from testing.engines import Job, running_engine
from testing.stack import eventually

PARTS = 30


def test_an_idle_engine_does_what_may_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    with running_engine(make_checkpoint(tmp_path)) as harness:
        engine, done = harness.engine, []
        want = harness.run([Job([5, 6, 7], sampling)])[0].tokens

        def prepare() -> bool:
            if len(done) == PARTS:
                return False
            assert not engine._steps.has_work
            done.append(1)
            return True

        monkeypatch.setattr(engine._executor, "prepare", prepare)
        assert harness.run([Job([5, 6, 7], sampling)])[0].tokens == want
        eventually(lambda: len(done) == PARTS)
        assert harness.run([Job([5, 6, 7], sampling)])[0].tokens == want
        assert engine.failure is None
