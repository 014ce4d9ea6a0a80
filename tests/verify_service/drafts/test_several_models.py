"""Drafts that read hidden states, of other layers each, and one that reads tokens, beside each
other: each gets exactly what is its own, while sequences change between them, lose their pages and
share those of others, and drafts die.
"""

import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import pytest

from testing.checkpoints import make_checkpoint
from testing.eager_ahead import EagerAhead
from testing.engines import Harness
from testing.hidden_drafts import HiddenDrafter, engine_with
from testing.hidden_work import FLAGS, WIDTH, jobs, texts
from testing.late_drafts import LateDrafter, asks
from testing.stack import eventually
from verify_service import target_executor
from verify_service.attach import links as draft_links
from verify_service.controller.messages import Candidate, DraftHistory, Offer

SCARCE = {**FLAGS, "max_total_tokens": 8 * 34}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("several") / "target")


@pytest.fixture(autouse=True)
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts are in this process: there is no model whose files would say more."""
    monkeypatch.setattr(draft_links, "resolve", lambda config, on_cpu: config)


@pytest.fixture
def drafters() -> list[HiddenDrafter]:
    return [
        HiddenDrafter(WIDTH, weight_bytes=1),
        HiddenDrafter(2 * WIDTH, (0, 2), weight_bytes=1, algorithm="EAGLE3"),
        HiddenDrafter(0, weight_bytes=1, algorithm="STANDALONE"),
    ]


def prefer(harness: Harness, wish: Callable[[DraftHistory], int]) -> None:
    """Makes the draft that `wish` names for a sequence better than any measurement could say."""
    controller = harness.engine._sizes.controller

    def values(candidates: Sequence[Candidate], plain: float) -> np.ndarray:
        found = np.ones((len(controller.drafts), len(candidates)))
        for i, one in enumerate(candidates):
            found[wish(one.history), i] = 2.0
        return found

    controller._goodput.of_drafts = values


def change_often(harness: Harness, seed: int) -> None:
    """Gives sequences to other drafts at random, a few steps each."""
    rng = random.Random(seed)
    wishes: dict[int, tuple[int, int]] = {}

    def wish(history: DraftHistory) -> int:
        number, num_left = wishes.get(id(history), (0, 0))
        if not num_left:
            number, num_left = rng.randrange(3), rng.choice([1, 2, 5, 20])
        wishes[id(history)] = number, num_left - 1
        return number

    prefer(harness, wish)


@pytest.mark.parametrize(("runs_ahead", "temperature"), [(False, 0.8), (True, 0.0)])
def test_each_gets_what_is_its_own_under_pressure(
    target: Path,
    drafters: list[HiddenDrafter],
    runs_ahead: bool,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if runs_ahead:
        monkeypatch.setattr(target_executor, "EagerExecutor", EagerAhead)
    work = jobs(10, num_new=100, temperature=temperature)
    known = texts(target, work)
    for drafter in drafters:
        drafter.texts = known
    with engine_with(drafters, target, **SCARCE) as harness:
        harness.wait_for_draft()
        change_often(harness, 1)
        for _ in range(2):
            results = harness.run(work)
            assert [j.prompt + r.tokens for j, r in zip(work, results, strict=True)] == known
            assert sum(result.finish.cached_tokens for result in results) > 0
            assert sum(result.finish.preemptions for result in results) > 0
            harness.check_nothing_left()
        drafts = harness.engine._drafts
        hidden = [one._hidden for one in drafts.each]
        assert [one and one._runs for one in hidden] == [{}, {}, None]
    for drafter in drafters:
        assert drafter.check(target) > 2000
        assert drafter.num_attaches == 1


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_each_gets_its_own_layers(
    target: Path, runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if runs_ahead:
        monkeypatch.setattr(target_executor, "EagerExecutor", EagerAhead)
    drafters = [
        HiddenDrafter(2 * WIDTH, (1, 2), weight_bytes=1, algorithm="EAGLE3"),
        HiddenDrafter(2 * WIDTH, (0, 1), weight_bytes=1, algorithm="PEAGLE"),
        HiddenDrafter(WIDTH, (2,), weight_bytes=1, algorithm="DFLASH"),
    ]
    work = jobs(10, num_new=60)
    for drafter in drafters:
        drafter.texts = texts(target, work)
    with engine_with(drafters, target, **FLAGS) as harness:
        harness.wait_for_draft()
        change_often(harness, 3)
        results = harness.run(work)
        assert [j.prompt + r.tokens for j, r in zip(work, results, strict=True)] == drafters[
            0
        ].texts
        harness.check_nothing_left()
    for drafter in drafters:
        assert drafter.check(target) > 1000
        assert drafter.num_attaches == 1


def test_one_that_dies_leaves_the_others_what_is_theirs(
    target: Path, drafters: list[HiddenDrafter]
) -> None:
    work = jobs(12, num_new=60)
    known = texts(target, work)
    for drafter in drafters:
        drafter.texts = known
    with engine_with(drafters, target, **FLAGS) as harness:
        harness.wait_for_draft()
        change_often(harness, 2)
        for i in range(6):
            one = drafters[i % 3]
            one.fail_in, attaches = 6, one.num_attaches
            results = harness.run(work)
            assert [j.prompt + r.tokens for j, r in zip(work, results, strict=True)] == known
            eventually(lambda one=one, before=attaches: one.num_attaches > before)
            harness.wait_for_draft()
        harness.check_nothing_left()
    for drafter in drafters:
        assert drafter.check(target) > 1000
        assert drafter.num_attaches == 3


def test_for_a_suspended_draft_no_prefix_is_computed_again(
    target: Path, drafters: list[HiddenDrafter]
) -> None:
    first, *others = jobs(2, num_new=20)
    known = texts(target, [first, *others])
    for drafter in drafters:
        drafter.texts = known
    with engine_with(drafters, target, **FLAGS) as harness:
        harness.wait_for_draft()
        harness.engine._sizes.controller._trials.others = lambda candidates: {}
        found = []
        for best, work in ((2, [first]), *((best, others) for best in (2, 2, 0, 0, 0))):
            prefer(harness, lambda history, best=best: best)
            results = harness.run(work)
            for job, result in zip(work, results, strict=True):
                assert job.prompt + result.tokens in known
            cached = [result.finish.cached_tokens for result in results]
            starts = {view.start for drafter in drafters for view in drafter.views}
            found.append((cached, starts))
            for drafter in drafters:
                drafter.check(target)
                drafter.views.clear()
    common, whole = [24], [56]
    assert found == [
        ([0], {0}),
        (common, {0}),
        (whole, {0}),
        (whole, {56}),  # until now the head had been told of nothing
        (common, {0}),  # it is computed again for its sake,
        (whole, {0}),  # once
    ]


def test_a_late_trial_of_one_holds_up_nobody(target: Path) -> None:
    """Sequences go on with their own draft; the other is tried again once it has answered."""
    work = jobs(5, num_new=80)
    first, late = HiddenDrafter(WIDTH, weight_bytes=1), LateDrafter(0, asks, "STANDALONE")
    first.texts = late.texts = texts(target, work)
    judged = []
    with engine_with([first, late], target, draft_step_timeout=60.0, **FLAGS) as harness:
        harness.wait_for_draft()
        controller = harness.engine._sizes.controller
        tried = controller.tried

        def note(
            offer: Offer, draft: int, num_known: int, right: Collection[int], batch: int
        ) -> None:
            if draft == 1:
                judged.append(len(right))
            tried(offer, draft, num_known, right, batch)

        controller.tried = note
        prefer(harness, lambda history: 0)

        def run_all() -> None:
            results = harness.run(work)
            assert [job.prompt + r.tokens for job, r in zip(work, results, strict=True)] == (
                first.texts
            )

        for _ in range(3):
            run_all()
        eventually(lambda: run_all() or late.num_held == 1)
        assert judged == []
        late.gate.set()
        eventually(lambda: run_all() or any(judged))
        assert late.num_attaches == 1
        harness.check_nothing_left()
    assert first.check(target) > 100
