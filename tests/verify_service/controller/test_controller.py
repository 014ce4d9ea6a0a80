"""Tests what a controller plans for a step, and how long a plan lasts."""

import numpy as np
import pytest

from testing.controllers import GPU_CHAIN, GPU_TREE, TYPICAL, controller
from verify_service.controller.controller import Controller
from verify_service.controller.costs import CostModel
from verify_service.controller.messages import (
    NO_WAIT,
    Candidate,
    DraftHistory,
    DraftKind,
    Observed,
    Offer,
    Wait,
)
from verify_service.controller.tables import Choices, GridTable, RowTable, Table

# Of a CPU and of a GPU.
TABLES = (RowTable([1, 6], [0.01, 0.015]), GridTable({(1, 1): 0.01, (1, 6): 0.015}))


def test_free_rows_are_always_used() -> None:
    assert controller(RowTable([1, 16], [1.0, 1.0]), 11, 11).plan(
        [Candidate(DraftHistory(), [11])]
    ).nodes == [11]


def test_without_a_table_everything_is_drafted() -> None:
    plan = controller(None, 5, 5).plan(
        [Candidate(DraftHistory(), [5]), Candidate(DraftHistory(), [2])]
    )
    assert plan.nodes == [5, 2]
    assert plan.rows == 6


def test_who_must_not_draft_does_not_and_who_must_does() -> None:
    controller_ = controller(GPU_TREE.times(), 31, 5)
    histories = [DraftHistory() for _ in range(3)]
    plan = controller_.plan(
        [
            Candidate(histories[0], [0]),
            Candidate(histories[1], [31], forced=True),
            Candidate(histories[2], [4]),
        ]
    )
    assert plan.nodes[0] == 0
    assert plan.nodes[1] == 31
    assert plan.nodes[2] <= 4
    assert plan.rows == 32


def test_rows_are_padded_to_what_was_captured() -> None:
    times = GridTable({(1, 1): 4.0, (1, 4): 4.1, (4, 1): 4.2, (4, 2): 4.3, (4, 4): 4.4})
    controller_ = controller(times, 3, 3)
    for batch in range(1, 5):
        plan = controller_.plan([Candidate(DraftHistory(), [3])] * batch)
        assert plan.rows in times.rows(batch)
        assert all(nodes <= plan.rows - 1 for nodes in plan.nodes)


def test_a_plan_lasts_for_the_same_sequences_and_is_cut_to_what_they_may_have() -> None:
    policy = Controller(CostModel(RowTable([1, 8], [1e-3, 1.1e-3])), [DraftKind(5, 5)])
    one, other = DraftHistory(), DraftHistory()
    [nodes] = policy.plan([Candidate(one, [5])]).nodes
    for _ in range(8):
        policy.record(one, nodes, ())  # not counted before the next plan
    assert policy.plan([Candidate(one, [5])]).nodes == [nodes]
    assert policy.plan([Candidate(one, [2])]).nodes == [2]
    assert policy.plan([Candidate(one, [0])]).nodes == [0]
    assert policy._acceptance[0]._pending
    policy.plan([Candidate(one, [5]), Candidate(other, [5])])
    assert not policy._acceptance[0]._pending
    for _ in range(60):
        policy.observe(Observed(1, 1, 1e-3, 1))  # longer than a plan lasts
    policy.record(one, nodes, ())
    policy.plan([Candidate(one, [5]), Candidate(other, [5])])
    assert not policy._acceptance[0]._pending


def test_a_plan_is_renewed_while_a_step_waits() -> None:
    policy = Controller(CostModel(RowTable([1, 8], [1e-3, 1.1e-3])), [DraftKind(5, 5)])
    one = DraftHistory()
    policy.plan([Candidate(one, [5])])
    for _ in range(8):
        policy.record(one, 5, ())
    policy.think()
    assert policy._unplanned == 0
    assert policy._acceptance[0]._pending
    policy._unplanned = 1.0
    policy.think()
    assert policy._unplanned == 0
    assert not policy._acceptance[0]._pending


def test_the_first_outcomes_of_a_text_are_not_counted() -> None:
    """Where steps wait on a CPU; texts begin with tokens that are hard to guess."""
    for kind, table, num_counted in (
        (DraftKind(5, 5), TYPICAL, 8),
        (DraftKind(5, 5, is_asked_first=True), TYPICAL, 10),
        (DraftKind(5, 5), GridTable({(1, 1): 1.0, (1, 6): 1.1}), 10),
    ):
        policy, history = Controller(CostModel(table), [kind]), DraftHistory()
        policy.plan([Candidate(history, [5])])
        for _ in range(10):
            policy.record(history, 5, ())
        assert len(policy._acceptance[0]._pending) == num_counted


def test_the_largest_of_nearly_equal_trees_is_taken_on_a_cpu() -> None:
    """It shows what smaller ones cannot, if the bank pays for that."""
    rates, levels = np.array([1.0, 1.02, 1.01, 0.9]), np.arange(4.0)
    choices = Choices(levels, levels, levels, lambda index: [index])
    grid = GridTable({(1, 1): 1.0, (1, 6): 1.1})
    for table, may_explore, best in ((TYPICAL, True, 2), (TYPICAL, False, 1), (grid, True, 1)):
        goodput = Controller(CostModel(table), [DraftKind(5, 5)])._goodput
        assert goodput._best_of(rates, choices, may_explore) == best


@pytest.mark.parametrize(("table", "num_counted"), [(TABLES[0], 9), (TABLES[1], 3)])
def test_most_plain_steps_of_a_suspended_draft_are_only_counted(
    table: Table, num_counted: int
) -> None:
    policy, history = Controller(CostModel(table), [DraftKind(5, 5)]), DraftHistory()
    policy.plan([Candidate(history, [5])])
    policy.is_drafting = [False]
    passed = []
    for _ in range(40):
        passed.append(policy.passes(0.01))
        if not passed[-1]:
            policy.observe(Observed(1, 1, 0.01, 1))
    cycle = [*[True] * num_counted, False]
    assert passed == cycle * (40 // len(cycle))
    assert policy._unplanned == pytest.approx(0.4)


def test_plain_steps_that_the_host_begins_are_learnt_from() -> None:
    """Where drafts follow on the device, such a step is what theirs are compared with."""
    policy = Controller(CostModel(TABLES[1]), [DraftKind(5, 5)])
    policy.plan([Candidate(DraftHistory(), [5])])
    policy.is_drafting = [False]
    assert policy.passes(0.01, lead=0.001)
    policy._switching.follows = True
    assert not policy.passes(0.01, lead=0.001)
    assert policy.passes(0.01)


@pytest.mark.parametrize("table", TABLES)
def test_prompts_are_counted_by_all_time_that_has_passed(table: Table) -> None:
    """One step in 30 with a prompt is not so many that no hidden states are kept."""
    policy = Controller(CostModel(table), [DraftKind(5, 5)])
    policy.plan([Candidate(DraftHistory(), [5])])
    policy.is_drafting = [False]
    for number in range(900):
        if number % 30 == 0:
            policy.interrupted(NO_WAIT)
        elif not policy.passes(0.01):
            policy.observe(Observed(1, 1, 0.01, 1))
    assert 2.0 < policy._switching.prompt_rate < 5.0  # in a second


def test_trials_go_on_where_prompts_keep_steps_from_being_timed() -> None:
    policy, history = Controller(CostModel(TABLES[1]), [DraftKind(5, 5)]), DraftHistory()
    policy.plan([Candidate(history, [5])])
    policy.is_drafting, policy.has_trial[0] = [False], True
    assert not policy.passes(0.01)
    policy.observe(Observed(1, 1, 0.01, 1))
    policy.ended_trial()
    assert not policy._is_clean
    policy.keeps_states = False
    assert policy.passes(0.01)
    assert policy._is_clean


@pytest.mark.parametrize("first", [1.0, 1.1])
def test_trials_beside_steps_cost_little_whatever_the_first_steps_took(first: float) -> None:
    """As on an H200 whose first plain steps took longer: later ones with trials beside them seemed
    to take no longer than others, so that each had one, three seconds long.
    """
    batch, rng, times = 64, np.random.default_rng(3), GPU_CHAIN.times()
    policy, histories = controller(times, 3, 3), [DraftHistory() for _ in range(batch)]
    begun = num_tried = num_drafted = 0
    lost: list[float] = []
    for step in range(1500):
        if any(policy.has_trial) and step == begun + 2:
            for one in rng.choice(batch, 16, replace=False):
                policy.tried(Offer(histories[one], 3), 0, 3, [0] * (rng.random() < 0.15), batch)
            policy.ended_trial()
        rows = 1
        if not policy.stays_suspended:
            plan = policy.plan([Candidate(one, [3]) for one in histories], is_ahead=True)
            rows = plan.rows
            if plan.tried:
                begun, num_tried = step, num_tried + 1
        seconds = times.seconds(batch, rows) * rng.normal(1, 0.01)
        if rows > 1:
            num_drafted += 1
            wait = Wait(3, batch, None)
            wait = wait._replace(parts=((0, wait),))
            policy.observe(Observed(batch, rows, seconds + 2e-3, batch, wait))
            for history in histories:
                policy.record(history, rows - 1, [0] * (rng.random() < 0.15))
            continue
        # The first of a trial's steps takes what others do, the second a tenth more.
        lost.append((any(policy.has_trial) and step > begun) / 10)
        seconds *= 1 + lost[-1] if len(lost) > 12 else first
        if not policy.passes(seconds):
            policy.observe(Observed(batch, 1, seconds, batch))
    assert num_drafted < 20
    assert num_tried > 20
    assert np.mean(lost) < 0.03
