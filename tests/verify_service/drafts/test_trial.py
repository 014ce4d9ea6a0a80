"""Trees that are asked for beside plain steps are judged by the tokens that come, and nothing else
changes.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from testing.checkpoints import make_checkpoint
from testing.engines import Harness, Job
from testing.hidden_drafts import HiddenDrafter, engine_with
from testing.hidden_work import FLAGS, WIDTH, jobs, texts
from testing.late_drafts import LateDrafter, asks
from testing.stack import eventually
from verify_service.controller.controller import Controller
from verify_service.controller.messages import Candidate, DraftKind, Offer, Plan
from verify_service.drafts import wire
from verify_service.executor.choice.simulation import FILLER


class Tries(Controller):
    """Drafts nothing but tries two sequences as often as it may, and keeps what it is told of
    that.
    """

    is_told = False

    def __init__(self, nodes: int) -> None:
        super().__init__(None, [DraftKind(nodes, nodes)])
        self.is_drafting = [self.is_told]
        self._num_outcomes = 0
        self.outcomes: list[tuple[int, int]] = []
        self.counts: list[int] = []
        self._is_open = False

    def plan(
        self, candidates: Sequence[Candidate], other_rows: int = 0, is_ahead: bool = False
    ) -> Plan:
        """See Controller."""
        wanted = [i for i, one in enumerate(candidates) if one.limits[0]]
        tried = [] if self._is_open else wanted[-2:]
        self._is_open |= bool(tried)
        return Plan([0] * len(candidates), 1, {0: tried} if tried else {})

    def tried(
        self, offer: Offer, draft: int, num_known: int, right: Collection[int], batch: int
    ) -> None:
        """See Controller."""
        self.outcomes.append((num_known, len(right)))
        self._num_outcomes += 1

    def ended_trial(self, draft: int = 0) -> None:
        """See Controller."""
        self.counts.append(self._num_outcomes)
        self._num_outcomes, self._is_open = 0, False


class Tells(Tries):
    """The same of a policy under which the draft is told of everything all the time, and tried
    later.
    """

    is_told = True
    may_try = False

    def plan(
        self, candidates: Sequence[Candidate], other_rows: int = 0, is_ahead: bool = False
    ) -> Plan:
        """See Controller."""
        if not self.may_try:
            return Plan([0] * len(candidates), 1)
        return super().plan(candidates, other_rows, is_ahead)


def run_all(harness: Harness, drafter: HiddenDrafter, work: Sequence[Job]) -> None:
    """Runs jobs whose texts the drafter knows; the texts are those."""
    results = harness.run(work)
    for job, result in zip(work, results, strict=True):
        assert job.prompt + result.tokens in drafter.texts


def test_steps_go_on_while_an_answer_is_late(target: Path) -> None:
    work = jobs(6, num_new=60)
    drafter = LateDrafter(WIDTH, asks)
    drafter.texts = texts(target, work)
    with engine_with(drafter, target, **FLAGS) as harness:
        harness.wait_for_draft()
        sizes = harness.engine._sizes
        policy = sizes._decider.controller = Tries(sizes.controller.max_nodes)
        run_all(harness, drafter, work)  # to their ends, without the answer
        eventually(lambda: drafter.num_held == 1)
        assert policy.counts == []
        drafter.gate.set()
        eventually(lambda: run_all(harness, drafter, work) or len(policy.counts) > 1)
        assert policy.outcomes
        assert harness.engine.load().draft_available
        assert drafter.num_attaches == 1
        harness.check_nothing_left()


def test_a_draft_that_never_answers_a_trial_is_dropped(target: Path) -> None:
    work = jobs(6, num_new=60)
    drafter = LateDrafter(WIDTH, asks)
    drafter.texts = texts(target, work)
    with engine_with(drafter, target, draft_step_timeout=0.5, **FLAGS) as harness:
        harness.wait_for_draft()
        sizes = harness.engine._sizes
        policy = sizes._decider.controller = Tries(sizes.controller.max_nodes)
        while drafter.num_held == 0 or harness.engine.load().draft_available:
            run_all(harness, drafter, work)
        run_all(harness, drafter, work)
        assert policy.outcomes == []
        drafter.gate.set()
        harness.wait_for_draft()
        eventually(lambda: run_all(harness, drafter, work) or len(policy.outcomes) > 0)
        assert drafter.num_attaches > 1
        harness.check_nothing_left()


@pytest.mark.parametrize("algorithm", ["EAGLE", "STANDALONE"])
def test_a_draft_that_is_only_told_is_not_waited_for(
    algorithm: str, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the arena is full of rows that it has not read, or answers pile up of one that reads
    none.
    """
    monkeypatch.setattr(wire, "MOST_UNREAD", 3)
    work = jobs(6, num_new=100)
    drafter = LateDrafter(WIDTH, lambda request: True, algorithm)
    drafter.texts = texts(target, work)
    with engine_with(drafter, target, draft_step_timeout=60.0, **FLAGS) as harness:
        harness.wait_for_draft()
        sizes = harness.engine._sizes
        policy = sizes._decider.controller = Tells(sizes.controller.max_nodes)
        for _ in range(3):
            run_all(harness, drafter, work)
        assert drafter.num_held == 1
        drafter.gate.set()
        policy.may_try = True
        eventually(
            lambda: (
                run_all(harness, drafter, work)
                or any(accepted > 1 for _, accepted in policy.outcomes)
            )
        )
        assert drafter.num_attaches == 1
        harness.check_nothing_left()
    assert drafter.check(target) > 100


@pytest.mark.parametrize("skill", [1.0, 0.0])
def test_tokens_judge_what_was_tried(target: Path, skill: float) -> None:
    work = jobs(12, num_new=100)
    drafter = HiddenDrafter(WIDTH, skill=skill, weight_bytes=1)
    drafter.texts = texts(target, work)
    with engine_with(drafter, target, **FLAGS) as harness:
        harness.wait_for_draft()
        sizes = harness.engine._sizes
        policy = sizes._decider.controller = Tries(sizes.controller.max_nodes)
        # How many trials end in a run depends on how fast the draft answers.
        eventually(
            lambda: (
                run_all(harness, drafter, work)
                or (len(policy.counts) > 2 and len(policy.outcomes) > 4)
            )
        )
        harness.check_nothing_left()
    assert sum(policy.counts) == len(policy.outcomes)
    levels = {accepted for _, accepted in policy.outcomes}
    assert levels == {0} if skill == 0 else min(levels) > 0 and max(levels) > 1
    assert drafter.check(target) > 100


def test_trials_are_judged_by_the_accept_length_that_is_simulated(target: Path) -> None:
    work = jobs(12, num_new=100)
    drafter = HiddenDrafter(WIDTH, skill=0.0, weight_bytes=1)
    drafter.texts = [job.prompt + [FILLER] * 100 for job in work]  # as steps without trees say
    with engine_with(drafter, target, simulate_accept_length=2.5, **FLAGS) as harness:
        harness.wait_for_draft()
        sizes = harness.engine._sizes
        policy = sizes._decider.controller = Tries(sizes.controller.max_nodes)

        def accepted() -> list[int]:
            """Returns the accepted tokens of each tree with room for what is drawn."""
            return [count for nodes, count in policy.outcomes if nodes > 1]

        eventually(lambda: harness.run(work) and len(accepted()) > 100)
        harness.check_nothing_left()
    assert set(accepted()) == {1, 2}
    assert sum(accepted()) / len(accepted()) == pytest.approx(1.5, abs=0.25)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hidden") / "target")
