"""Tests the costs of steps: tables, learnt differences, and the compared sets of nodes against
brute force.
"""

import itertools
import random

import numpy as np
import pytest

from verify_service.controller.costs import CostModel
from verify_service.controller.tables import GridTable, RowTable, rising

ROWS = RowTable([1, 2, 4, 8, 16], [10e-3, 11e-3, 13e-3, 17e-3, 25e-3])
FAST_ROWS = RowTable([1, 2, 4, 8, 16], [4.02e-3, 4.04e-3, 4.08e-3, 4.16e-3, 4.32e-3])
GRID = GridTable({(b, r): 4e-3 + 2e-5 * b * r for b in (1, 2, 4) for r in (1, 2, 4, 8)})


def steps(costs: CostModel, kinds: list[int], slow: list[float], more: float) -> None:
    for rows, speed in zip(kinds, slow, strict=True):
        seconds = ROWS.seconds(1, rows) * speed * (more if rows > 1 else 1.0)
        costs.observe(1, rows, seconds)


def test_a_machine_that_is_slow_at_times_changes_no_choice() -> None:
    """A difference between kinds of steps is learnt all the same."""
    for more in (1.0, 1.3):
        costs, rng = CostModel(ROWS), random.Random(3)
        kinds = [rng.choice([1, 4]) for _ in range(40) for _ in range(10)]
        slow = [speed for _ in range(10) for speed in [rng.choice([1.0, 1.6, 2.5])] * 40]
        steps(costs, kinds, slow, more)
        assert costs.target(1, 4) / costs.plain(1) == pytest.approx(more * 1.3, rel=0.07)


def test_a_kind_that_was_not_seen_for_long_is_not_taken_for_slower() -> None:
    costs = CostModel(ROWS)
    steps(costs, [1] * 20 + [4] * 300, [1.0] * 20 + [2.0] * 300, 1.0)
    assert costs.target(1, 4) / costs.plain(1) < 1.3 * 1.8
    steps(costs, [1, 1, 1, 4, 4, 4] * 20, [2.0] * 120, 1.0)
    assert costs.target(1, 4) / costs.plain(1) == pytest.approx(1.3, rel=0.05)


def test_hiccups_of_two_plain_steps_do_not_outvote_those_before_them() -> None:
    """A hiccup is not compared with all steps of the other kind behind it."""
    costs = CostModel(ROWS)
    kinds = [1, *[4] * 9]
    for slow in (1.0, 1.0, 1.0, 1.0, 3.0, 3.0):
        steps(costs, kinds, [slow] + [1.0] * 9, 1.0)
    assert costs.target(1, 4) / costs.plain(1) == pytest.approx(1.3)


def test_waits_for_drafts_are_learnt_and_scaled_to_what_was_not_seen() -> None:
    costs = CostModel(ROWS)
    assert costs.draft(0, 1, 3) == pytest.approx(0.08 * 4 * 10e-3)
    for _ in range(20):
        costs.waited(0, 4, 5, 14e-3)
    assert costs.draft(0, 4, 5) == pytest.approx(14e-3, rel=0.05)
    assert costs.draft(0, 4, 1) == pytest.approx(14e-3 / 3, rel=0.05)
    assert costs.draft(0, 1, 5) < 14e-3
    costs.waited(0, 4, 5, 3.0)  # a hiccup
    assert costs.draft(0, 4, 5) < 20e-3
    assert costs.draft(1, 4, 0) == 0.0


def test_a_wait_that_was_not_seen_is_on_the_line_through_those_that_were() -> None:
    """As on two fast cores, where waiting takes 1.9 ms and a level 0.45 ms more."""
    costs = CostModel(ROWS)
    for levels in (1, 3, 5):
        for _ in range(9):
            costs.waited(0, 1, levels, 1.9e-3 + 0.45e-3 * levels)
    for levels in (2, 4, 7):
        expected = 1.9e-3 + 0.45e-3 * levels
        assert costs.draft(0, 1, levels) == pytest.approx(expected, rel=0.1)


def test_deeper_trees_never_seem_to_take_less_than_shallow_ones() -> None:
    costs = CostModel(ROWS)
    for _ in range(9):
        costs.waited(0, 1, 1, 9e-3)
        costs.waited(0, 1, 3, 4e-3)
    assert costs.draft(0, 1, 2) <= costs.draft(0, 1, 4) <= costs.draft(0, 1, 5) < 9e-3


def test_steps_that_contain_the_draft_teach_what_it_takes() -> None:
    costs = CostModel(GRID)
    for _ in range(50):
        costs.waited_within(0, 4, 3, 4, GRID.seconds(4, 4) + 1e-3)
    assert costs.draft(0, 4, 3, is_ahead=True) == pytest.approx(1e-3, rel=0.06)


@pytest.mark.parametrize("table", [ROWS, GRID], ids=["rows", "grid"])
def test_the_sets_that_are_compared_hold_the_best_of_all(table: RowTable | GridTable) -> None:
    """Two chains of up to three nodes: every pair of sizes on a CPU, one size for all on a GPU."""
    rng = np.random.default_rng(5)
    bins = table.bins(3)
    for _ in range(50):
        chances = np.sort(rng.random((2, 3)), axis=1)[:, ::-1]
        sums = np.concatenate([np.zeros((2, 1)), np.cumsum(chances, axis=1)], axis=1)
        ends = [0, *bins.sizes]
        gains = np.diff(sums[:, ends], axis=1)
        choices = table.choices(gains, bins, 3, 0)
        rates = (2 + choices.added) / table.many(2, choices.rows)
        found = choices.nodes(int(rates.argmax()))
        best = 0.0
        for pair in itertools.product(range(1, 4), repeat=2):
            if table.is_padded and pair[0] != pair[1]:
                continue
            rows = 1 + pair[0] if table.is_padded else 2 + sum(pair)
            best = max(best, (2 + sums[0, pair[0]] + sums[1, pair[1]]) / table.seconds(2, rows))
        rows = 1 + max(found) if table.is_padded else 2 + sum(found)
        rate = (2 + sum(sums[i, n] for i, n in enumerate(found))) / table.seconds(2, rows)
        assert rate >= best - 1e-9
        assert rates.max() == pytest.approx(rate)


def test_rising_is_the_nearest_non_decreasing_sequence() -> None:
    assert rising([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]


def test_steps_are_padded_to_captured_shapes() -> None:
    assert GRID.seconds(3, 3) == GRID.seconds(4, 4)
    assert GRID.bucket(3, 5) == 8
    assert GRID.rows(3) == [1, 2, 4, 8]


def test_what_a_draft_reads_first_is_no_sign_that_it_takes_longer() -> None:
    costs = CostModel(GRID)
    for _ in range(20):
        costs.waited(0, 4, 3, 2e-3)
    for _ in range(20):
        costs.waited(0, 4, 3, 60e-3, unread=16000)
    assert costs.draft(0, 4, 3) == pytest.approx(2e-3, rel=0.05)
    for _ in range(20):
        costs.waited(0, 4, 3, 1e-3, unread=16000)
    assert costs.draft(0, 4, 3) == pytest.approx(1e-3, rel=0.15)


def test_slow_first_steps_do_not_keep_a_draft_away_for_good() -> None:
    """As on a card whose first steps of a shape took 20 ms more: a draft of 1.4 ms seemed to take
    8, and was not asked again for as long as plain steps were faster.
    """
    costs = CostModel(GRID)
    for _ in range(3):
        costs.waited_within(0, 4, 3, 4, GRID.seconds(4, 4) + 21e-3)
    assert costs.draft(0, 4, 3, is_ahead=True) < 2.5e-3
    for _ in range(9):
        costs.waited_within(0, 4, 3, 4, GRID.seconds(4, 4) + 1e-3)
    assert costs.draft(0, 4, 3, is_ahead=True) == pytest.approx(1e-3, rel=0.06)


def test_a_captured_draft_takes_no_longer_for_larger_trees_until_seen() -> None:
    """It computes all its levels whatever is verified."""
    costs = CostModel(GRID)
    for _ in range(9):
        costs.waited_within(0, 4, 1, 2, GRID.seconds(4, 2) + 3e-3)
    assert costs.draft(0, 4, 3, is_ahead=True) == pytest.approx(3e-3, rel=0.06)


@pytest.mark.parametrize(
    ("table", "is_ahead", "seconds"),
    [(FAST_ROWS, False, 40.0), (GRID, False, 160.0), (GRID, True, 160.0)],
    ids=["cpu", "gpu_host", "gpu_device"],
)
def test_a_size_that_seemed_to_take_too_long_is_tried_again(
    table: RowTable | GridTable, is_ahead: bool, seconds: float
) -> None:
    """As on a CPU that other programs slowed during a self-test: nothing was drafted ever after."""
    costs = CostModel(table)
    for _ in range(9):
        costs.waited(0, 4, 3, 9e-3, is_ahead)
    assert costs.draft(0, 4, 3, is_ahead) == pytest.approx(9e-3, rel=0.06)
    costs.pass_time(seconds)
    assert costs.draft(0, 4, 3, is_ahead) < 2.5e-3


def test_a_gpu_keeps_what_a_short_trial_has_shown_of_a_draft() -> None:
    """As with 64 sequences on an H200: a draft that took five times as long as expected was asked
    again every few seconds, and read for 70 ms first.
    """
    costs = CostModel(GRID)
    for _ in range(6):
        costs.waited_within(0, 4, 3, 4, GRID.seconds(4, 4) + 9e-3)
    assert costs.draft(0, 4, 3, is_ahead=True) == pytest.approx(9e-3, rel=0.06)
    costs.pass_time(15.0)
    assert costs.draft(0, 4, 3, is_ahead=True) == pytest.approx(9e-3, rel=0.06)


def test_a_hiccup_does_not_hide_what_trials_beside_steps_cost() -> None:
    """As on an H200: after one step of 9 ms instead of 5.5, steps with trials beside them seemed to
    take no longer than others, so that every second step had one and a tenth of the speed was lost.
    """
    costs = CostModel(GRID)
    plain = GRID.seconds(4, 1)
    for _ in range(9):
        costs.observe(4, 1, 1.02 * plain)
    costs.observe(4, 1, 1.7 * plain)
    for seconds in (1.0 * plain, 1.2 * plain):  # a trial beside steps takes two of them
        costs.observe(4, 1, seconds, is_clean=False)
    beyond = costs.beyond(4, 1, 1.0 * plain) + costs.beyond(4, 1, 1.2 * plain)
    assert beyond == pytest.approx(0.16 * plain, rel=0.05)


def test_a_size_that_was_slow_for_a_while_is_not_kept_away_while_another_is_used() -> None:
    """As on a CPU that other programs slowed for a third of a second: shorter chains were drafted
    for ten times as long.
    """
    costs = CostModel(RowTable([1, 8], [3e-3, 3.5e-3]))
    for _ in range(9):
        costs.waited(0, 1, 3, 9e-3)
    assert costs.draft(0, 1, 3) == pytest.approx(9e-3)
    for _ in range(100):
        costs.waited(0, 1, 2, 2.4e-3)
        costs.pass_time(6e-3)
    assert costs.draft(0, 1, 2) == pytest.approx(2.4e-3)
    assert 2.4e-3 < costs.draft(0, 1, 3) < 4e-3
