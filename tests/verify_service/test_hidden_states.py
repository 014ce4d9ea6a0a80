"""What reaches a draft that reads hidden states: exactly the target's, whatever happens to sequences and pages."""

import mmap
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.types import SamplingParams, SpeculationParams
from tests.support.checkpoints import SMALL, VOCAB_SIZE, make_checkpoint
from tests.support.eager_ahead import EagerAhead
from tests.support.engines import Harness, Job, running_engine
from tests.support.hidden_drafts import HiddenDrafter, engine_with
from verify_service import startup
from verify_service.drafts import drafting
from verify_service.drafts import links as draft_links
from verify_service.drafts.arena import Arena
from verify_service.drafts.hidden_states import Run
from verify_service.drafts.news import split_news
from verify_service.drafts.tree_sizes import TreeSizes
from verify_service.policy.messages import Plan

WIDTH = SMALL["hidden_size"]
FLAGS = {"page_size": 8, "chunked_prefill_size": 20, "max_running_requests": 8}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hidden") / "target")


def jobs(count: int, num_new: int = 24, temperature: float = 0.0, seed: int = 3) -> list[Job]:
    """Prompts of many lengths, some with prefixes in common that end at a page's border or inside a page."""
    rng = random.Random(seed)
    families = [[rng.randrange(2, VOCAB_SIZE) for _ in range(80)] for _ in range(3)]
    made = []
    for i in range(count):
        prefix = rng.choice(families)[: rng.choice([0, 8, 16, 31, 32, 40, 64, 77])]
        own = [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randint(1, 30))]
        sampling = SamplingParams(
            temperature=temperature, max_new_tokens=num_new, ignore_eos=True, seed=i
        )
        made.append(Job(prefix + own, sampling))
    return made


def texts(target: Path, work: list[Job]) -> list[list[int]]:
    """Prompts and outputs, by plain decoding."""
    with running_engine(target, **FLAGS) as harness:
        results = harness.run(work)
    return [job.prompt + result.tokens for job, result in zip(work, results, strict=True)]


def run(harness: Harness, drafter: HiddenDrafter, work: list[Job]) -> float:
    """Runs jobs whose texts the drafter knows, and checks the output; the share of drafted tokens that was accepted."""
    wait_for_draft(harness)
    results = harness.run(work)
    expected = drafter.texts
    for job, result in zip(work, results, strict=True):
        assert job.prompt + result.tokens in expected
    steps = sum(result.finish.verify_steps for result in results)
    return sum(len(result.tokens) for result in results) / steps


def wait_for_draft(harness: Harness) -> None:
    until(lambda: harness.engine.load().draft_available)


def until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread does."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


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
    """While nothing is drafted, rows are taken before the next step writes over them, and told later."""
    monkeypatch.setattr(startup, "TargetStep", EagerAhead)
    plan, calls = TreeSizes.plan, iter(range(1 << 30))

    def now_and_then(self: TreeSizes, sequences: Any, other_rows: int = 0) -> Plan:
        if next(calls) // 12 % 2:
            return plan(self, sequences, other_rows)
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
        assert harness.engine._drafting._hidden._runs == {}
    assert EagerAhead.num_ahead > 10
    assert drafter.check(target) > 500


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_under_pressure(target: Path, temperature: float) -> None:
    """Few pages, so that sequences are preempted, take over each other's pages, and find prefixes again."""
    work = jobs(24, num_new=100, temperature=temperature)
    drafter = HiddenDrafter(WIDTH)
    drafter.texts = texts(target, work)
    with engine_with(drafter, target, **{**FLAGS, "max_total_tokens": 8 * 34}) as harness:
        wait_for_draft(harness)
        results = harness.run(work)
        assert sum(result.finish.preemptions for result in results) > 0
        assert sum(result.finish.cached_tokens for result in results) > 0
        harness.check_nothing_left()
        run(harness, drafter, work)
        harness.check_nothing_left()
        assert harness.engine._drafting._hidden._runs == {}
    assert drafter.check(target) > 10_000
    assert all(view.start == 0 for view in drafter.views), "a hole, though no draft was lost"
    assert drafter.num_attaches == 1


class SmallArena(Arena):
    """As --arena-mb would make it, were it in bytes."""

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
        wait_for_draft(harness)
        results = harness.run(work)
        arena = harness.engine._drafting._hidden.writer.arena
        assert arena.size <= (16 << 20) + 4096
    drafter.texts = [job.prompt + r.tokens for job, r in zip(work, results, strict=True)]
    assert drafter.check(path) * 2048 * 4 > 64 << 20
    # What was sent is bounded by the tokens, not by their states.
    assert max(request.ByteSize() for request in drafter.requests) < 4096 * 3
    assert {view.start for view in drafter.views} == {0}


def test_prefix_hits_cost_no_acceptance(target: Path) -> None:
    work = jobs(12, num_new=30)
    lengths = []
    for cache in (True, False):
        drafter = HiddenDrafter(WIDTH, skill=1.0)
        drafter.texts = texts(target, work)
        with engine_with(drafter, target, disable_radix_cache=not cache, **FLAGS) as harness:
            lengths.append([run(harness, drafter, work) for _ in range(2)])
            results = harness.run(work)
            assert (sum(result.finish.cached_tokens for result in results) > 0) == cache
        assert drafter.check(target) > 1000
        assert all(view.start == 0 for view in drafter.views)
    with_cache, without = lengths
    assert with_cache[1] == pytest.approx(without[1], rel=0.02)


def test_hot_prefixes_heal_after_a_restart(target: Path) -> None:
    work = jobs(12, num_new=100)
    drafter = HiddenDrafter(WIDTH)
    drafter.texts = texts(target, work)
    num_holes = 0
    with engine_with(drafter, target, **FLAGS) as harness:
        run(harness, drafter, work)
        for _ in range(4):
            drafter.views.clear()
            drafter.fail_in, attaches = 12, drafter.num_attaches
            run(harness, drafter, work)
            # Sequences that lived through it have a hole, and what comes after it is right.
            num_holes += sum(view.start > 0 for view in drafter.views)
            assert drafter.check(target) > 0
            until(lambda before=attaches: drafter.num_attaches > before)
            wait_for_draft(harness)
            drafter.views.clear()
            run(harness, drafter, work)
            assert all(view.start == 0 for view in drafter.views)
            assert drafter.check(target) > 10_000
        results = harness.run(work)
        harness.check_nothing_left()
    assert num_holes > 0
    # What healed needs not be computed again, but for each output's last page.
    cached = sum(result.finish.cached_tokens for result in results)
    assert cached >= sum((len(job.prompt) - 1) // 8 * 8 for job in work) - 8


@pytest.mark.parametrize("refill", [0, 16])
def test_refilling_keeps_to_its_budget(target: Path, refill: int) -> None:
    work = jobs(1, seed=11)
    work[0] = Job([*range(2, 102)], work[0].sampling)
    drafter = HiddenDrafter(WIDTH)
    drafter.texts = texts(target, work)
    with engine_with(drafter, target, draft_refill_tokens=refill, **FLAGS) as harness:
        run(harness, drafter, work)
        drafter.fail_in = 1
        run(harness, drafter, work)
        wait_for_draft(harness)
        drafter.views.clear()
        for _ in range(2):
            result = harness.run(work)[0]
            assert {view.start for view in drafter.views} == {96 - refill}
            assert result.finish.cached_tokens >= 96 - refill
        # The second time nothing had to be computed again.
        assert result.finish.cached_tokens == 96
    assert drafter.check(target) > 100


def test_nothing_is_computed_again_for_who_will_not_draft(target: Path) -> None:
    prompt = [*range(2, 102)]
    drafter = HiddenDrafter(WIDTH)
    one = SamplingParams(temperature=0.0, max_new_tokens=1)
    some = SamplingParams(temperature=0.0, max_new_tokens=9, ignore_eos=True)
    off = SpeculationParams(enabled=False)
    with engine_with(drafter, target, **FLAGS) as harness:
        wait_for_draft(harness)
        harness.run([Job(prompt, one)])  # the draft never hears of its last chunk
        for job in (Job(prompt, one), Job(prompt, some, speculation=off)):
            assert harness.run([job])[0].finish.cached_tokens == 96
        assert harness.run([Job(prompt, some)])[0].finish.cached_tokens < 96
        assert harness.run([Job(prompt, some)])[0].finish.cached_tokens == 96


def test_a_draft_that_is_not_asked_is_told_now_and_then(target: Path) -> None:
    work = jobs(3, num_new=100)
    drafter = HiddenDrafter(WIDTH)
    drafter.texts = texts(target, work)
    with engine_with(drafter, target, **FLAGS) as harness:
        wait_for_draft(harness)
        engine = harness.engine
        limit = engine._sizes.limit
        engine._sizes.limit = lambda seq: 0 if seq.num_output < 80 else limit(seq)
        run(harness, drafter, work)
        assert harness.engine._drafting._hidden._runs == {}
    told = [request for request in drafter.requests if request.sequences]
    assert len(told) < 50  # of more than 80 steps
    assert drafter.check(target) > 1000
    assert {view.start for view in drafter.views} == {0}


@pytest.mark.parametrize(("kept_bytes", "drops"), [(1 << 30, 0.0), (40_000, 0.0), (1 << 30, 0.05)])
def test_a_draft_that_rests_is_told_nothing_until_it_is_asked(
    target: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int, drops: float
) -> None:
    """Then it is told all, in an order in which no page is read before it was filled, whoever shares it."""
    monkeypatch.setattr(drafting, "MOST_KEPT", kept_bytes)
    monkeypatch.setattr(drafting, "MOST_READ", 100)
    plan, rng, num_resting = TreeSizes.plan, random.Random(4), 0

    def now_and_then(self: TreeSizes, sequences: Any, other_rows: int = 0) -> Plan:
        nonlocal num_resting
        whole = plan(self, sequences, other_rows)
        assert self._drafting is not None
        num_resting += 1
        self._drafting.is_resting = num_resting % 30 < 22
        if not self._drafting.is_resting:
            return whole
        if rng.random() < drops:
            self._drafting._hidden.drop_all()
        tried = rng.randrange(len(sequences)) if sequences and rng.random() < 0.1 else -1
        return Plan([n * (i == tried) for i, n in enumerate(whole.nodes)], 1)

    work = jobs(24, num_new=100)
    drafter = HiddenDrafter(WIDTH, weight_bytes=1)
    drafter.texts = texts(target, work)
    monkeypatch.setattr(TreeSizes, "plan", now_and_then)
    with engine_with(drafter, target, **{**FLAGS, "max_total_tokens": 8 * 50}) as harness:
        assert run(harness, drafter, work) > 1.1
        harness.check_nothing_left()
        assert harness.engine._drafting._hidden._runs == {}
    told = [request for request in drafter.requests if request.sequences]
    if kept_bytes > 1 << 20:
        assert len(told) < 0.6 * num_resting
    assert drafter.check(target) > 1000


def test_nothing_is_captured_for_drafts_that_read_nothing(target: Path) -> None:
    with running_engine(target, "NGRAM", **FLAGS) as harness:
        wait_for_draft(harness)
        harness.run(jobs(2))
        assert harness.engine._drafting.capture is None
        assert harness.engine._drafting._hidden._runs == {}


@pytest.mark.parametrize(
    ("width", "layers"), [(WIDTH + 1, ()), (WIDTH, (0, 1)), (WIDTH, (4,)), (0, ())]
)
def test_a_draft_that_reads_what_there_is_not_is_refused(
    target: Path, width: int, layers: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    drafter = HiddenDrafter(width, layers)
    with engine_with(drafter, target, **FLAGS) as harness:
        until(lambda: "not attached: hidden" in caplog.text)
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


def news(position: int, num_tokens: int) -> draft_pb2.SequenceStep:
    made = draft_pb2.SequenceStep(
        slot=3, position=position, tokens=range(num_tokens), new_pages=[1, 2], first_page=4
    )
    made.begin.valid_from = 5
    made.propose.num_steps = 2
    return made


@pytest.mark.parametrize("position", [0, 7])
def test_news_are_split_by_rows(position: int) -> None:
    rest = news(position, 10)
    part = split_news(rest, 4)
    first = 4 if position else 5
    assert list(part.tokens) == list(range(first))
    assert list(rest.tokens) == list(range(first, 10))
    assert (part.position, rest.position) == (position, position + first)
    assert part.HasField("begin")
    assert not part.HasField("propose")
    assert rest.HasField("propose")
    assert not rest.HasField("begin")
    assert list(part.new_pages) == [1, 2]
    assert not rest.new_pages
    assert part.slot == rest.slot == 3
