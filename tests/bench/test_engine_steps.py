"""Records of an engine's steps, run one by one and overlapped."""

from pathlib import Path

import pytest

from foredraft.types import SamplingParams
from testing.checkpoints import make_checkpoint
from testing.engine_steps import EngineSteps, Step, report
from testing.engines import Job, running_engine
from testing.triton_device import INTERPRETED, needs_triton

JOBS = [
    Job([*[5, 6, 7, 98, 99] * 3, 40 + i], SamplingParams(temperature=0.0, max_new_tokens=20))
    for i in range(3)
]


def listen(path: Path, algorithm: str, adaptive: bool, most: int) -> tuple[list[Step], int]:
    """All steps of an engine, and how many tokens its clients got."""
    flags = {"page_size": 8, "max_total_tokens": 512, "max_running_requests": 4}
    if algorithm == "NGRAM":
        flags["speculative_num_draft_tokens"] = most
    with running_engine(path, algorithm, speculative_adaptive=adaptive, **flags) as harness:
        steps = EngineSteps(harness.engine, expects=adaptive)
        if not adaptive:
            harness.engine.draft_everything()
        results = harness.run(JOBS, timeout=300)
    decoding = [step.seconds for step in steps.steps if step.kind != "prompt"]
    assert steps.clock == pytest.approx(sum(decoding))
    return steps.steps, sum(len(result.tokens) for result in results)


@pytest.mark.parametrize("adaptive", [False, True], ids=["all", "adaptive"])
def test_steps_that_are_waited_for(
    adaptive: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_checkpoint(tmp_path, num_hidden_layers=1)
    steps, num_tokens = listen(path, "NGRAM", adaptive, 4)
    assert sum(step.tokens for step in steps) == num_tokens
    assert {step.kind for step in steps} >= ({"prompt"} if adaptive else {"prompt", "drafted"})
    assert not any(step.is_behind for step in steps)
    for step in steps:
        assert step.seconds > step.draft + step.target > 0
        if step.kind != "prompt":
            assert step.batch <= step.rows <= step.batch + step.nodes
            assert (step.nodes == 0) == (step.kind == "plain")
            assert step.batch <= step.tokens <= step.rows
            assert (step.expected is not None) == adaptive
    report("an engine", steps)
    table = capsys.readouterr().out
    for kind in {step.kind for step in steps}:
        assert f"| {kind} |" in table


@needs_triton
@pytest.mark.skipif(not INTERPRETED, reason="is for the interpreter")
def test_steps_that_run_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from testing.eager_graphs import use_eager_graphs  # needs Triton

    path = make_checkpoint(tmp_path, num_hidden_layers=1)
    use_eager_graphs(monkeypatch)
    steps, num_tokens = listen(path, "NONE", False, 0)
    plain = [step for step in steps if step.kind == "plain"]
    assert len(plain) >= 19
    assert sum(step.is_behind for step in plain) > 5
    assert {step.rows for step in plain} == {1}
    assert all(step.tokens == step.batch for step in plain)
    # One step was under way when the last request had ended.
    assert num_tokens <= sum(step.tokens for step in steps) <= num_tokens + len(JOBS)
