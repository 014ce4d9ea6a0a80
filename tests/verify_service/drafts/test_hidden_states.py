"""Tests that a draft gets exactly the target's hidden states, whatever happens to sequences and
pages.
"""

import mmap
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.types import SamplingParams
from testing.checkpoints import VOCAB_SIZE, make_checkpoint
from testing.eager_ahead import EagerAhead
from testing.engines import Job, running_engine
from testing.hidden_drafts import HiddenDrafter, engine_with
from testing.hidden_work import FLAGS, WIDTH, jobs, run, texts
from testing.stack import eventually
from verify_service import target_executor
from verify_service.attach import links as draft_links
from verify_service.connection.arena import Arena
from verify_service.controller.messages import Plan
from verify_service.drafts.run import Run
from verify_service.engine.overlap import OverlapScheduler
from verify_service.engine.tree_sizes import TreeSizes


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hidden") / "target")


@pytest.mark.parametrize("layers", [(), (0,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("transport", ["shm", "inline"])
def test_rows_are_the_targets(target: Path, layers: tuple[int, ...], transport: str) -> None:
    work = jobs(6)
    drafter = HiddenDrafter(WIDTH * max(1, len(layers)), layers)
    drafter.texts = texts(target, work)
    with engine_with(drafter, target, require_transport=transport, **FLAGS) as harness:
        assert run(harness, drafter, work) > 1.8
        harness.check_nothing_left()
    assert drafter.check(target) > 1000
    if transport == "shm":
        news = [news for request in drafter.requests for news in request.sequences]
        assert max(one.hidden.ByteSize() for one in news) < 10
    kinds = {
        news.hidden.WhichOneof("source")
        for request in drafter.requests
        for news in request.sequences
    }
    assert kinds == {"arena_row" if transport == "shm" else "inline"}


def test_rows_that_are_put_together_stay_the_same() -> None:
    run, twin = Run(5, 5, 5), Run(5, 5, 5)
    rows = torch.arange(600.0).view(300, 2)
    start = 0
    for count in [1] * 40 + [40, 1, 3] + [1] * 50 + [2] * 10:
        for one in (run, twin):
            one.append(rows[start : start + count], count)
        start += count
        if start % 17 == 0:
            run.merge()
    assert len(run.parts) < len(twin.parts) / 4
    assert run.end == twin.end
    for first in range(run.first, run.end):
        assert torch.equal(run.rows(first), twin.rows(first))
    run.drop_before(60)
    assert run.first <= 60
    assert torch.equal(run.rows(60), twin.rows(60))


def test_rows_of_steps_that_run_ahead(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing is drafted, rows are taken before the next step writes over them, and told
    later.
    """
    monkeypatch.setattr(target_executor, "EagerExecutor", EagerAhead)
    plan, calls = TreeSizes.plan, iter(range(1 << 30))

    def now_and_then(self: TreeSizes, sequences: Any, *args: Any, **options: Any) -> Plan:
        if next(calls) // 12 % 2:
            return plan(self, sequences, *args, **options)
        return Plan([0] * len(sequences), 1)

    monkeypatch.setattr(TreeSizes, "plan", now_and_then)
    work = jobs(12, num_new=60)
    for i, job in enumerate(work):  # they end one after the other
        work[i] = Job(job.prompt, replace(job.sampling, max_new_tokens=20 + 5 * i))
    drafter = HiddenDrafter(WIDTH)
    drafter.texts = texts(target, work)
    EagerAhead.num_ahead = 0
    with engine_with(drafter, target, **FLAGS) as harness:
        assert run(harness, drafter, work) > 1.1
        harness.check_nothing_left()
        assert harness.engine._drafts.each[0]._hidden._runs == {}
    assert EagerAhead.num_ahead > 10
    assert drafter.check(target) > 500


@pytest.mark.parametrize("layers", [(), (1, 2)])
def test_rows_of_prompts_behind_running_steps(
    layers: tuple[int, ...], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few sequences run at a time, so that most prompts begin while others decode."""
    monkeypatch.setattr(target_executor, "EagerExecutor", EagerAhead)
    plan, calls, behind = TreeSizes.plan, iter(range(1 << 30)), []

    def now_and_then(self: TreeSizes, sequences: Any, *args: Any, **options: Any) -> Plan:
        if next(calls) // 12 % 2:
            return plan(self, sequences, *args, **options)
        return Plan([0] * len(sequences), 1)

    compute_behind = OverlapScheduler.compute_behind

    def counted(self: OverlapScheduler, running: Any, chunks: Any) -> Any:
        behind.append(chunks)
        return compute_behind(self, running, chunks)

    monkeypatch.setattr(TreeSizes, "plan", now_and_then)
    monkeypatch.setattr(OverlapScheduler, "compute_behind", counted)
    work = jobs(14, num_new=40)
    for i, job in enumerate(work):
        work[i] = Job(job.prompt, replace(job.sampling, max_new_tokens=12 + 5 * (i % 5)))
    drafter = HiddenDrafter(WIDTH * max(1, len(layers)), layers)
    drafter.texts = texts(target, work)
    with engine_with(drafter, target, **FLAGS | {"max_running_requests": 4}) as harness:
        run(harness, drafter, work)
        harness.check_nothing_left()
        assert harness.engine._drafts.each[0]._hidden._runs == {}
    assert len(behind) > 3
    assert drafter.check(target) > 500


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_under_pressure(target: Path, temperature: float) -> None:
    """Few pages, so that sequences are preempted, take over each other's pages, and find prefixes
    again.
    """
    work = jobs(12, num_new=100, temperature=temperature)
    drafter = HiddenDrafter(WIDTH)
    drafter.texts = texts(target, work)
    with engine_with(drafter, target, **{**FLAGS, "max_total_tokens": 8 * 34}) as harness:
        harness.wait_for_draft()
        results = harness.run(work)
        assert sum(result.finish.preemptions for result in results) > 0
        assert sum(result.finish.cached_tokens for result in results) > 0
        harness.check_nothing_left()
        run(harness, drafter, work)
        harness.check_nothing_left()
        assert harness.engine._drafts.each[0]._hidden._runs == {}
    assert drafter.check(target) > 10_000
    assert all(view.start == 0 for view in drafter.views), "a hole, though no draft was lost"
    assert drafter.num_attaches == 1


class SmallArena(Arena):
    """An arena of the size that --arena-mb would give, if it were in bytes."""

    def __init__(self, *args: Any, **limits: Any) -> None:
        super().__init__(*args, **{**limits, "max_bytes": mmap.PAGESIZE + 16 * 4 * WIDTH})


@pytest.mark.parametrize("transport", ["shm", "inline"])
def test_a_prompt_longer_than_the_ring_passes_in_pieces(
    target: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_links, "Arena", SmallArena)
    rng = random.Random(1)
    prompts = [[rng.randrange(2, VOCAB_SIZE) for _ in range(400)] for _ in range(3)]
    sampling = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    work = [Job(prompt, sampling) for prompt in prompts]
    drafter = HiddenDrafter(WIDTH)
    drafter.texts = texts(target, work)
    flags = {**FLAGS, "chunked_prefill_size": 300, "require_transport": transport}
    with engine_with(drafter, target, **flags) as harness:
        assert run(harness, drafter, work) > 1.5
    assert drafter.check(target) > 1000
    largest = max(
        sum(news.hidden.num_rows for news in request.sequences) for request in drafter.requests
    )
    assert largest <= 16
    assert all(view.start == 0 for view in drafter.views)


def test_64_mb_pass_through_a_16_mb_arena(tmp_path: Path) -> None:
    path = make_checkpoint(
        tmp_path / "wide", hidden_size=1024, head_dim=16, intermediate_size=64, num_hidden_layers=2
    )
    rng = random.Random(2)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
    work = [Job([rng.randrange(2, VOCAB_SIZE) for _ in range(500)], sampling) for _ in range(17)]
    drafter = HiddenDrafter(2048, (0, 1))
    flags = {"chunked_prefill_size": 4096, "max_running_requests": 8, "arena_mb": 16}
    with engine_with(drafter, path, **flags) as harness:
        harness.wait_for_draft()
        results = harness.run(work)
        arena = harness.engine._drafts.each[0]._hidden.writer.arena
        assert arena.size <= (16 << 20) + 4096
    drafter.texts = [job.prompt + r.tokens for job, r in zip(work, results, strict=True)]
    assert drafter.check(path) * 2048 * 4 > 64 << 20
    # What was sent is bounded by the tokens, not by their states.
    assert max(request.ByteSize() for request in drafter.requests) < 4096 * 3
    assert {view.start for view in drafter.views} == {0}


def test_nothing_is_captured_for_drafts_that_read_nothing(target: Path) -> None:
    with running_engine(target, "NGRAM", **FLAGS) as harness:
        harness.wait_for_draft()
        harness.run(jobs(2))
        assert harness.engine._drafts.capture is None
        assert harness.engine._drafts.each[0]._hidden is None


@pytest.mark.parametrize(
    ("width", "layers"), [(WIDTH + 1, ()), (WIDTH, (0, 1)), (WIDTH, (4,)), (0, ())]
)
def test_a_draft_that_reads_what_there_is_not_is_refused(
    target: Path, width: int, layers: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    drafter = HiddenDrafter(width, layers)
    with engine_with(drafter, target, **FLAGS) as harness:
        eventually(lambda: "not attached: hidden" in caplog.text)
        assert len(harness.run(jobs(1))[0].tokens) == 24
    assert drafter.num_attaches == 0


def test_rows_travel_in_the_drafts_type(target: Path) -> None:
    work = jobs(2)
    drafter = HiddenDrafter(WIDTH)
    drafter.dtype = tensor_pb2.DATA_TYPE_BFLOAT16
    drafter.texts = texts(target, work)
    with engine_with(drafter, target, **FLAGS) as harness:
        run(harness, drafter, work)
    row = drafter.views[-1].entries[-1][0]
    assert row.dtype == torch.bfloat16
