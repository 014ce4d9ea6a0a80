"""What n-grams cost and gain on two small cores by default, in a model of such steps (`testing.ngram_load`)."""

from statistics import mean

import pytest

from testing.ngram_load import COPIED, MACHINES, NEW, SAMPLED, Machine, Match, gain
from verify_service.policy.acceptance import Acceptance, DraftHistory, Ladder
from verify_service.policy.step_time import RowTimes

LENGTH, ANSWERS, SEEDS = 64, 6, (0, 1)


def mean_gain(machine: Machine, batch: int, matches: tuple[Match, ...]) -> float:
    return mean(gain(machine, batch, matches, LENGTH, ANSWERS * 8 // batch, s) for s in SEEDS)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("matches", [SAMPLED, NEW], ids=["sampled", "new"])
def test_matches_that_are_seldom_right_cost_little(batch: int, matches: tuple[Match, ...]) -> None:
    assert mean_gain(MACHINES[batch, True], batch, matches) > 0.97


@pytest.mark.parametrize("batch", [1, 8])
def test_text_that_does_not_repeat_costs_little_at_temperature_0(batch: int) -> None:
    assert mean_gain(MACHINES[batch, False], batch, NEW) > 0.97


@pytest.mark.parametrize("batch", [1, 8])
def test_copies_gain(batch: int) -> None:
    assert mean_gain(MACHINES[batch, False], batch, COPIED) > 1.6


def test_what_a_step_with_trees_takes_is_learnt_beyond_the_table_for_every_draft() -> None:
    times = RowTimes([1, 8, 16], [0.010, 0.020, 0.022])
    for _ in range(100):
        times.observe(8, 8, 0.040)
        times.observe(8, 10, 0.048)
    assert times.seconds(8, 8) == pytest.approx(0.040, rel=0.02)
    assert times.seconds(8, 10) == pytest.approx(0.048, rel=0.02)


def test_few_outcomes_say_less_of_a_sequence_than_many_of_others_with_matches_as_long() -> None:
    acceptance = Acceptance(Ladder(list(range(1, 12))))
    for i in range(200):
        acceptance.record(DraftHistory(), 11, [0] if i % 5 == 0 else [], 1, 1e-3 * i)
    lucky = DraftHistory()
    for _ in range(4):
        acceptance.record(lucky, 11, [0, 1], 1, 0.2)
    gains = acceptance.gains(lucky, 1, 0.2)
    assert 0.2 < gains[0] < 0.4
    assert gains[1] < 0.25


def test_deeper_nodes_are_expected_to_be_right_as_often_as_those_that_were_seen() -> None:
    acceptance = Acceptance(Ladder(list(range(1, 12))))
    for i in range(
        300
    ):  # a second node is right after every third first one, and no third one was ever seen
        acceptance.record(DraftHistory(), 2, [0, 1] if i % 3 == 0 else [0], 2, 1e-3 * i)
    gains = acceptance.gains(DraftHistory(), 2, 0.3)
    assert gains[:4] == pytest.approx([1.0, 1 / 3, 1 / 9, 1 / 27], rel=0.3)
