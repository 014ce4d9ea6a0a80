"""What an executor may put off is done while nothing runs, and no request is likely to come."""

from pathlib import Path

import pytest

from foredraft.types import SamplingParams
from testing.checkpoints import make_checkpoint
from testing.engines import Job, running_engine
from testing.stack import eventually
from verify_service.engine import engine as engine_module

PARTS = 30


def test_an_idle_engine_does_what_may_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    job = Job([5, 6, 7], sampling)
    with running_engine(make_checkpoint(tmp_path)) as harness:
        engine, done = harness.engine, []
        want = harness.run([job])[0].tokens

        def prepare() -> bool:
            if len(done) == PARTS:
                return False
            assert not engine._steps.has_work
            done.append(1)
            return True

        monkeypatch.setattr(engine_module, "IDLE_SECONDS", 1e6)
        assert harness.run([job])[0].tokens == want
        monkeypatch.setattr(engine._executor, "prepare", prepare)
        for _ in range(3):  # after each of them the next may come at any moment
            assert harness.run([job])[0].tokens == want
            eventually(lambda: engine.is_idle)
        assert not done
        monkeypatch.setattr(engine_module, "IDLE_SECONDS", 0.01)
        engine.wake()
        eventually(lambda: len(done) == PARTS)
        assert harness.run([job])[0].tokens == want
        assert engine.failure is None
