"""How much is drafted while prompts interrupt steps that else follow one another on a GPU: never much slower than always or never.

In a model of steps (`testing.policy_simulation`) by what a log of an H200's steps showed; nothing here reads a clock.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from testing.policy_simulation import FixedNodes, Load, simulate
from testing.step_model import StepModel
from testing.step_trace import Trace
from verify_service.policy.acceptance import Acceptance, DraftHistory, Ladder
from verify_service.policy.grid_choice import BUSY_SECONDS, LISTEN_SECONDS, LOOK_SECONDS, GridChoice
from verify_service.policy.messages import Observed, Plan, Wait, Want
from verify_service.policy.policy import DraftPolicy
from verify_service.policy.probing import Probing
from verify_service.policy.step_time import DraftTimes, GridTimes


def model_of(
    plain: float,
    drafted: float,
    prompt: float,
    batch: int,
    change: tuple[float, float],
    read: tuple[float, float],
) -> StepModel:
    """Steps of a chain of three, by milliseconds of a plain step and of one with drafts."""
    target = {(batch, 1): plain, (batch, 2): plain * 1.02, (batch, 4): plain * 1.05}
    return StepModel(
        name="prompts",
        is_padded=True,
        target={shape: ms * 1e-3 for shape, ms in target.items()},
        draft=(0.0, 0.0, 0.0),
        tree=(3, 1, 3),
        extra={(batch, 1): 0.0, (batch, 4): (drafted - 1.05 * plain) * 1e-3},
        change=(change[0] * 1e-3, change[1] * 1e-3),
        read=(read[0] * 1e-3, read[1] * 1e-3),
        prompt=prompt * 1e-3,
        stall=plain * 2.5e-3,
    )


# A small model, its prompts computed operation by operation and as captured graphs: waiting for a draft takes as long as ten plain
# steps. And a large one, where it takes about as long as one.
SMALL = model_of(0.4, 1.1, 10.0, 8, (0.9, 0.26), (0.3, 0.004))
CAPTURED = replace(SMALL, prompt=1.5e-3)
LARGE = model_of(4.4, 5.4, 12.0, 8, (1.5, 0.3), (1.0, 0.004))
CASES = {
    **{f"small, {n} a second": (SMALL, n, 0.55) for n in (10, 40, 80, 160)},
    **{f"small, drafts good, {n} a second": (SMALL, n, 0.92) for n in (10, 80)},
    **{f"captured, {n} a second": (CAPTURED, n, 0.55) for n in (10, 40, 80, 160)},
    **{f"captured, drafts good, {n} a second": (CAPTURED, n, 0.92) for n in (10, 30, 40, 80, 160)},
    **{f"large, {n} a second": (LARGE, n, 0.72) for n in (1, 5, 10, 20)},
}
SECONDS = 3.0


def adaptive(model: StepModel, loads: list[Load], seconds: float) -> Trace:
    return simulate(model, DraftPolicy(model.times(), 3, 3), loads, seconds)


@pytest.mark.parametrize(("model", "arrivals", "acceptance"), CASES.values(), ids=CASES)
def test_prompts_that_interrupt_are_part_of_the_choice(
    model: StepModel, arrivals: float, acceptance: float
) -> None:
    loads = [Load(0, 8, (acceptance, acceptance), arrivals)]
    rates = [
        simulate(model, FixedNodes(nodes), loads, SECONDS).rate(1.0, SECONDS) for nodes in (0, 3)
    ]
    rate = adaptive(model, loads, SECONDS).rate(1.0, SECONDS)
    assert rate > 0.95 * max(rates)


@pytest.mark.parametrize("model", [SMALL, CAPTURED], ids=["small", "captured"])
def test_drafting_comes_back_when_no_more_prompts_come(model: StepModel) -> None:
    loads = [Load(0, 8, (0.92, 0.92), 100), Load(2.0, 8, (0.92, 0.92))]
    trace = adaptive(model, loads, 5.0)
    during = [step for step in trace.steps if 1 < step.end < 2]
    assert sum(step.rows > 1 for step in during) < 0.1 * len(during)
    assert trace.of_best(4.0, 5.0, 0.92) > 0.95


class Counting(DraftPolicy):
    """Counts whole plans and trials, by its own clock."""

    def __init__(self, model: StepModel) -> None:
        super().__init__(model.times(), 3, 3)
        self.planned: list[float] = []
        self.tried: list[float] = []
        self.deaf: list[float] = []

    def passes(self, seconds: float, tokens: int) -> bool:
        """See DraftPolicy."""
        if self.is_deaf:
            self.deaf.append(self._probing.now)
        return super().passes(seconds, tokens)

    def plan(self, wanted: Sequence[Want], other_rows: int = 0, is_ahead: bool = False) -> Plan:
        """See DraftPolicy."""
        plan = super().plan(wanted, other_rows, is_ahead)
        self.planned.append(self._probing.now)
        if plan.tried:
            self.tried.append(self._probing.now)
        return plan


def test_who_rests_while_many_prompts_come_plans_and_tries_seldom() -> None:
    """As with the small family on an H200: a plan for 32 takes the host as long as half a step."""
    model = replace(model_of(0.5, 2.5, 2.0, 32, (1.5, 0.1), (2.0, 0.004)), beside=0.3)
    policy, loads = Counting(model), [Load(0, 32, (0.55, 0.55), 250)]
    rate = simulate(model, policy, loads, 6.0).rate(1.0, 6.0)
    assert rate > 0.97 * simulate(model, FixedNodes(0), loads, 6.0).rate(1.0, 6.0)
    seconds = policy.planned[-1]
    late = [at for at in policy.planned if at > 0.5]
    assert len(late) < 1.2 * seconds / LOOK_SECONDS
    assert len(policy.tried) <= 1 + seconds / BUSY_SECONDS
    assert len(policy.tried) > 1
    # After the first of them the draft is not even kept anything for most of the time, but before another one it is.
    assert len(policy.deaf) * 0.5e-3 > 0.4 * seconds
    for at in policy.tried:
        assert not any(at - 0.9 * LISTEN_SECONDS < deaf < at for deaf in policy.deaf)


@pytest.mark.parametrize("model", [LARGE, SMALL], ids=["large", "small"])
def test_what_a_draft_may_need_is_kept_unless_many_prompts_come_to_a_fast_target(
    model: StepModel,
) -> None:
    policy = Counting(model)
    arrivals = [4, 30] if model is LARGE else [4]
    for rate in arrivals:
        simulate(model, policy, [Load(0, 8, (0.1, 0.1), rate)], 4.0)
    assert policy.tried
    assert not policy.deaf


class Listening(DraftPolicy):
    """Remembers which steps with prompts were drafted for."""

    def __init__(self, model: StepModel) -> None:
        super().__init__(model.times(), 3, 3)
        self.drafted: list[bool] = []

    def interrupted(self, batch: int, tokens: int, seconds: float, wait: Wait) -> None:
        super().interrupted(batch, tokens, seconds, wait)
        self.drafted.append(wait.levels > 0)


@pytest.mark.parametrize(("change", "pays"), [((1.0, 0.1), True), ((3.0, 1.0), False)])
def test_a_step_with_prompts_is_drafted_for_where_that_pays(
    change: tuple[float, float], pays: bool
) -> None:
    model = replace(LARGE, change=(change[0] * 1e-3, change[1] * 1e-3))
    policy = Listening(model)
    simulate(model, policy, [Load(0, 8, (0.9, 0.9), 10)], 4.0)
    assert not policy.is_resting
    late = policy.drafted[len(policy.drafted) // 2 :]
    assert sum(late) > 0.9 * len(late) if pays else sum(late) < 0.1 * len(late)


@pytest.mark.parametrize("is_asked_in_between", [False, True])
def test_drafting_starts_again_however_many_joined_while_it_rested(
    is_asked_in_between: bool,
) -> None:
    """What an interruption of many costs is not reckoned by what a token of one took: nobody plans while drafting rests."""
    times = GridTimes(
        {(batch, rows): 5e-4 + 4e-6 * batch * rows for batch in (1, 32) for rows in (1, 4)}
    )
    acceptance, probing = Acceptance(Ladder([3])), Probing(is_padded=True)
    probing.drafted_step(1.0, 0.0, was_trial=True)  # nothing is tried for some time
    choice = GridChoice(acceptance, DraftTimes(is_padded=True), probing, 3)
    histories = [DraftHistory() for _ in range(32)]
    wants = [Want(history, 3, False, 0, 1000, 100) for history in histories]
    for _ in range(100):
        acceptance.record(histories[0], 3, [], 0, probing.now)
    assert choice.plan(times, wants[:1], False, False).rows == 1
    for _ in range(50):
        if is_asked_in_between:
            choice.plan(times, [wants[0]] * 32, True, False)
        choice.interrupted(times, 32, 32, 2e-3, Wait(lead=1e-4))
        for _ in range(20):
            choice.settles(times, Observed(32, 1, 6.5e-4, 32, Wait(lead=1e-4)))
    for history in histories:
        for _ in range(100):
            acceptance.record(history, 3, [0, 1, 2], 0, probing.now)
    assert choice.plan(times, wants, False, False).rows == 4
