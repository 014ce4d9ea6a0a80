"""Whether steps draft ahead is judged by their time, by a clock that the tests turn."""

from collections.abc import Callable

import pytest

from draft_service.drafters.ahead_policy import KEPT_STEPS, NUM_TURNS, TURN_STEPS, AheadPolicy

TRIAL = 2 * NUM_TURNS * TURN_STEPS
Cost = Callable[[int, bool], float]  # seconds of a step, by its number and whether it is ahead


class Steps:
    """Runs steps one after another."""

    def __init__(self) -> None:
        self.now, self.step = 50.0, 7
        self.policy = AheadPolicy(lambda: self.now)

    def run(self, count: int, batch: int, cost: Cost) -> list[bool]:
        """Returns which of the steps were ahead."""
        chosen = []
        for _ in range(count):
            self.step += 1
            chosen.append(self.policy.is_ahead(self.step, batch))
            self.now += cost(self.step, chosen[-1])
        return chosen


def constant(ahead: float, without: float) -> Cost:
    return lambda step, is_ahead: ahead if is_ahead else without


@pytest.mark.parametrize("ahead", [0.9, 1.1])
def test_what_was_faster_is_kept_and_tried_again(ahead: float) -> None:
    steps = Steps()
    turns = [*[True] * TURN_STEPS, *[False] * TURN_STEPS] * NUM_TURNS
    for cost in (constant(ahead, 1.0), constant(2.0 - ahead, 1.0), constant(ahead, 1.0)):
        assert steps.run(TRIAL, 1, cost) == turns
        faster = cost(0, True) < cost(0, False)
        assert steps.run(KEPT_STEPS, 1, cost) == [faster] * KEPT_STEPS


def test_rare_hits_that_gain_much_are_worth_it() -> None:
    """The median of steps that are ahead would be that of misses, or the other way round."""
    for hit, miss, every, is_worth_it in ((0.2, 1.1, 3, True), (1.9, 0.9, 3, False)):
        steps = Steps()
        steps.run(
            TRIAL,
            1,
            lambda step, ahead, hit=hit, miss=miss, every=every: (  # type: ignore[misc]
                (miss if step % every else hit) if ahead else 1.0
            ),
        )
        assert steps.run(3, 1, constant(1.0, 1.0)) == [is_worth_it] * 3


def test_a_pause_within_a_turn_does_not_decide() -> None:
    steps = Steps()
    steps.run(TRIAL, 1, lambda step, ahead: 90.0 if step == 20 else 0.9 if ahead else 1.0)
    assert steps.run(1, 1, constant(0.9, 1.0)) == [True]


def test_batch_sizes_are_judged_alone() -> None:
    steps = Steps()
    costs = {1: constant(0.9, 1.0), 2: constant(4.0, 3.0)}
    for _ in range(2 * TRIAL // 8):  # a change of the batch costs one step's time
        for batch, cost in costs.items():
            steps.run(8, batch, cost)
    for batch, cost in costs.items():
        assert steps.run(2, batch, cost) == [batch == 1] * 2


def test_time_between_steps_that_are_not_consecutive_is_nobodys() -> None:
    steps = Steps()
    for _ in range(TRIAL):
        steps.run(2, 1, constant(0.9, 1.0))
        steps.step += 1  # a step through the host, which the policy is not told of
        steps.now += 5.0 if steps.step % 2 else 0.1
    assert steps.run(1, 1, constant(0.9, 1.0)) == [True]
    steps = Steps()
    for _ in range(TRIAL + TURN_STEPS):  # never two in a row: nothing is judged
        assert steps.run(1, 1, constant(9.0, 1.0)) == [True]
        steps.step += 1
