"""Engines that take turns, and the confidence of a median."""

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

from foredraft.types import SamplingParams
from testing.checkpoints import make_checkpoint
from testing.engines import Job, running_engine
from testing.turns import Turns, median_within


def test_no_engine_runs_two_steps_in_a_row_while_another_has_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_checkpoint(tmp_path / "target")
    jobs = [Job([5, 6, 7], SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True))]
    with running_engine(target) as first, running_engine(target) as second:
        pair = (first, second)
        order: list[str] = []
        alone = first.run(jobs)[0].tokens
        with Turns([harness.engine for harness in pair]) as turns:
            for name, harness in zip("ab", pair, strict=True):
                run = harness.engine._steps._execute

                def noted(*args: Any, run: Any = run, name: str = name) -> Any:
                    order.append(name)
                    return run(*args)

                monkeypatch.setattr(harness.engine._steps, "_execute", noted)
            threads = [threading.Thread(target=harness.run, args=(jobs,)) for harness in pair]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        second_began = order.index("b" if order[0] == "a" else "a")
        first_ended = len(order) - order[::-1].index(order[0])
        both = order[second_began:first_ended]
        assert all(one != other for one, other in itertools.pairwise(both))
        assert all(seconds > 0 for seconds in (*turns.seconds, *turns.cpu_seconds))
        assert first.run(jobs)[0].tokens == alone


def test_a_median_of_many_lies_within_less_than_one_of_few() -> None:
    few, many = median_within([3, 1, 2]), median_within(range(101))
    assert few == (2, 1, 3)
    assert many[0] == 50
    assert many[1] == pytest.approx(40, abs=1)
    assert many[2] == pytest.approx(60, abs=1)
