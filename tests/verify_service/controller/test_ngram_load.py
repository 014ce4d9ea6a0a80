"""Tests the costs and gains of n-grams on two small cores by default, in a model of such steps
(`testing.ngram_load`).
"""

from statistics import mean

import pytest

from testing.ngram_load import COPIED, MACHINES, NEW, SAMPLED, Machine, Match, gain

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
