"""Tests that a draft catches up on hidden states that it missed while absent or unasked."""

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foredraft.types import SamplingParams, SpeculationParams
from testing.checkpoints import make_checkpoint
from testing.engines import Job
from testing.hidden_drafts import HiddenDrafter, engine_with
from testing.hidden_work import FLAGS, WIDTH, jobs, run, texts
from testing.stack import eventually
from verify_service.connection.arena import Exchange
from verify_service.controller.messages import Plan
from verify_service.drafts import remote_draft, sync
from verify_service.drafts.step_sync import StepSync
from verify_service.engine.tree_sizes import TreeSizes


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hidden") / "target")


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
        for turn in itertools.count():
            if turn > 1 and num_holes > 0:  # none where the draft comes back after the end
                break
            drafter.views.clear()
            drafter.fail_in, attaches = 12, drafter.num_attaches
            run(harness, drafter, work)
            # Sequences that lived through it have a hole, and what comes after it is right.
            num_holes += sum(view.start > 0 for view in drafter.views)
            assert drafter.check(target) > 0
            eventually(lambda before=attaches: drafter.num_attaches > before)
            harness.wait_for_draft()
            drafter.views.clear()
            run(harness, drafter, work)
            assert all(view.start == 0 for view in drafter.views)
            assert drafter.check(target) > 10_000
        results = harness.run(work)
        harness.check_nothing_left()
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
        harness.wait_for_draft()
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
        harness.wait_for_draft()
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
        harness.wait_for_draft()
        decider = harness.engine._sizes._decider
        limit = decider.limit
        decider.limit = lambda seq: 0 if seq.num_output < 80 else limit(seq)
        run(harness, drafter, work)
        assert harness.engine._drafts.each[0]._hidden._runs == {}
    told = [request for request in drafter.requests if request.sequences]
    assert len(told) < 50  # of more than 80 steps
    assert drafter.check(target) > 1000
    assert {view.start for view in drafter.views} == {0}


@pytest.mark.parametrize(
    ("kept_bytes", "drops", "drops_states"),
    [(1 << 30, 0.0, False), (40_000, 0.0, False), (1 << 30, 0.05, False), (1 << 30, 0.0, True)],
)
def test_a_suspended_draft_is_told_nothing_until_it_is_asked(
    target: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int, drops: float, drops_states: bool
) -> None:
    """Then it is told all, in an order in which no page is read before it was filled, whoever
    shares it.
    """
    monkeypatch.setattr(remote_draft, "MOST_KEPT", kept_bytes)
    monkeypatch.setattr(sync, "MOST_READ", 100)
    plan, rng, num_suspended = TreeSizes.plan, random.Random(4), 0

    def now_and_then(self: TreeSizes, sequences: Any, other_rows: int = 0) -> Plan:
        nonlocal num_suspended
        whole = plan(self, sequences, other_rows)
        assert self._each
        num_suspended += 1
        is_suspended = num_suspended % 30 < 22
        # For part of the time nothing is kept, also for a probe now and then.
        self._each[0].suspend(is_suspended, not (drops_states and num_suspended % 30 < 14))
        if not is_suspended:
            return whole
        if rng.random() < drops:
            self._each[0]._hidden.drop_all()
        tried = rng.randrange(len(sequences)) if sequences and rng.random() < 0.1 else -1
        return Plan([n * (i == tried) for i, n in enumerate(whole.nodes)], 1)

    work = jobs(24, num_new=100)
    drafter = HiddenDrafter(WIDTH, weight_bytes=1)
    drafter.texts = texts(target, work)
    monkeypatch.setattr(TreeSizes, "plan", now_and_then)
    with engine_with(drafter, target, **{**FLAGS, "max_total_tokens": 8 * 50}) as harness:
        assert run(harness, drafter, work) > 1.1
        harness.check_nothing_left()
        assert harness.engine._drafts.each[0]._hidden._runs == {}
    told = [request for request in drafter.requests if request.sequences]
    if kept_bytes > 1 << 20:
        assert len(told) < 0.6 * num_suspended
    assert drafter.check(target) > 1000


def test_steps_with_prompts_put_off_what_a_draft_is_told(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where steps follow on the device: as if they did, but for the following."""
    plan, rng, told = TreeSizes.plan, random.Random(5), []
    as_on_a_gpu = property(lambda self: SimpleNamespace(trees=torch.zeros(1, 2, 4)))

    def spared(self: TreeSizes, sequences: Any, other_rows: int = 0) -> Plan:
        """Drafts now and then, mostly not beside prompts, and is suspended for a while."""
        whole = plan(self, sequences, other_rows)
        assert self._each
        is_suspended = len(told) // 40 % 3 == 2
        self._each[0].suspend(is_suspended)
        is_plain = rng.random() < (0.9 if other_rows else 0.3) or is_suspended
        return Plan([0] * len(whole.nodes), 1) if is_plain else whole

    def note(self: StepSync, step: sync.StepFacts, *args: Any) -> None:
        usual(self, step, *args)
        told.append((step.has_prompts, step.has_requests, len(self._wire._request.sequences)))

    usual = StepSync.fill
    work = jobs(40, num_new=30)
    drafter = HiddenDrafter(WIDTH, weight_bytes=1)
    drafter.texts = texts(target, work)
    monkeypatch.setattr(Exchange, "device", as_on_a_gpu)
    monkeypatch.setattr(TreeSizes, "plan", spared)
    monkeypatch.setattr(StepSync, "fill", note)
    with engine_with(drafter, target, **{**FLAGS, "max_total_tokens": 8 * 60}) as harness:
        assert run(harness, drafter, work) > 1.1
        harness.check_nothing_left()
    assert drafter.check(target) > 1000
    beside = [count for has_prompts, is_asked, count in told if has_prompts and not is_asked]
    assert len(beside) > 20
    assert sum(beside) < 0.5 * len(beside)
