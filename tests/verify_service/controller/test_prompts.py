"""Tests how much is drafted while prompts interrupt steps that else follow one another on a GPU:
never much slower than always or never.

In a model of steps (`testing.policy_simulation`) by what a log of an H200's steps showed; nothing
here reads a clock.
"""

from dataclasses import replace

import pytest

from testing.policy_simulation import FixedNodes, Load, simulate
from testing.step_model import StepModel
from testing.step_trace import Trace
from verify_service.controller.controller import Controller
from verify_service.controller.costs import CostModel
from verify_service.controller.messages import DraftKind, Wait


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


# A small model, its prompts computed operation by operation and as captured graphs: waiting for a
# draft takes as long as ten plain steps. And a large one, where it takes about as long as one.
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


def controller_of(model: StepModel) -> Controller:
    return Controller(CostModel(model.times()), [DraftKind(3, 3, is_beside=True)])


def adaptive(model: StepModel, loads: list[Load], seconds: float) -> Trace:
    return simulate(model, controller_of(model), loads, seconds)


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


def test_a_fast_target_to_which_many_prompts_come_is_hardly_slower_than_plainly() -> None:
    """As with the small family on an H200: a plan for 32 takes the host as long as half a step."""
    model = replace(model_of(0.5, 2.5, 2.0, 32, (1.5, 0.1), (2.0, 0.004)), beside=0.3)
    loads = [Load(0, 32, (0.55, 0.55), 250)]
    rate = adaptive(model, loads, 6.0).rate(1.0, 6.0)
    assert rate > 0.97 * simulate(model, FixedNodes(0), loads, 6.0).rate(1.0, 6.0)


@pytest.mark.parametrize("arrivals", [1, 3, 6])
@pytest.mark.parametrize("prompt", [60.0, 240.0])
def test_a_large_batch_between_long_prompts_is_drafted_for(prompt: float, arrivals: float) -> None:
    """As with a chain of an 8B model on an H100: waiting for a draft takes as long as four plain
    steps, but a step that does not wait costs nothing.
    """
    model = StepModel(
        name="long prompts",
        is_padded=True,
        target={(128, 1): 9.2e-3, (128, 2): 10.6e-3, (128, 4): 14e-3},
        draft=(0.0, 0.0, 0.0),
        tree=(3, 1, 3),
        extra={(128, 1): 0.0, (128, 2): 3e-3, (128, 4): 4e-3},
        change=(2e-3, 0.3e-3),
        read=(1e-3, 2e-6),
        prompt=prompt * 1e-3,
        stall=20e-3,
    )
    loads = [Load(0, 128, (0.82, 0.82), arrivals)]
    rates = [simulate(model, FixedNodes(nodes), loads, 6.0).rate(2.0, 6.0) for nodes in (0, 3)]
    assert adaptive(model, loads, 6.0).rate(2.0, 6.0) > 0.95 * max(rates)


class Listening(Controller):
    """Remembers which steps with prompts were drafted for."""

    def __init__(self, model: StepModel) -> None:
        super().__init__(CostModel(model.times()), [DraftKind(3, 3, is_beside=True)])
        self.drafted: list[bool] = []

    def interrupted(self, wait: Wait) -> None:
        super().interrupted(wait)
        self.drafted.append(wait.levels > 0)


@pytest.mark.parametrize(("change", "pays"), [((1.0, 0.1), True), ((3.0, 1.0), False)])
def test_a_step_with_prompts_is_drafted_for_where_that_pays(
    change: tuple[float, float], pays: bool
) -> None:
    model = replace(LARGE, change=(change[0] * 1e-3, change[1] * 1e-3))
    controller = Listening(model)
    simulate(model, controller, [Load(0, 8, (0.9, 0.9), 10)], 4.0)
    assert not controller.is_suspended
    late = controller.drafted[len(controller.drafted) // 2 :]
    assert sum(late) > 0.9 * len(late) if pays else sum(late) < 0.1 * len(late)
