"""How much is drafted, given what drafts brought and what a wider forward costs."""

import random

import pytest

from verify_service.draft_policy import LONGEST_PAUSE, DraftHistory, DraftPolicy, StepCost, rising

FLAT = StepCost([1, 2, 4, 8, 16], [1.0, 1.0, 1.0, 1.0, 1.0])
LINEAR = StepCost([1, 2, 4, 8, 16], [1.0, 2.0, 4.0, 8.0, 16.0])
TYPICAL = StepCost([1, 2, 4, 8, 16], [1.0, 1.1, 1.3, 1.7, 2.5])


def run(cost: StepCost, acceptance: float, steps: int = 400, seed: int = 1) -> tuple[float, float]:
    """Simulates chains whose nodes are accepted with `acceptance` each; tokens per second, and per second plainly."""
    policy, history, rng = DraftPolicy(cost), DraftHistory(), random.Random(seed)
    tokens, seconds = 0, 0.0
    for _ in range(steps):
        nodes = policy.num_nodes(history, 11, 1)
        accepted = 0
        while accepted < nodes and rng.random() < acceptance:
            accepted += 1
        policy.record(history, range(-1, nodes - 1), range(accepted))
        tokens += accepted + 1
        seconds += cost.seconds(1 + nodes)
    return tokens / seconds, 1 / cost.seconds(1)


def run_model(
    cost: StepCost, acceptance: float, wait: float, steps: int = 1000
) -> tuple[float, float, float]:
    """The same for a draft model whose chain of up to 5 costs (2 + levels) * `wait` before it can be verified; the third is
    the best rate of a fixed length."""
    policy, history, rng = DraftPolicy(cost), DraftHistory(), random.Random(3)
    tokens, seconds = 0, 0.0
    for _ in range(steps):
        nodes = policy.num_nodes(history, 5, 1, depth=5)
        accepted = 0
        while accepted < nodes and rng.random() < acceptance:
            accepted += 1
        if nodes:
            policy.observe_draft(nodes, (2 + nodes) * wait * rng.uniform(1, 1.3))
            seconds += (2 + nodes) * wait
        policy.record(history, range(-1, nodes - 1), range(accepted))
        tokens += accepted + 1
        seconds += cost.seconds(1 + nodes)
    plain = 1 / cost.seconds(1)
    fixed = [
        sum(acceptance**i for i in range(nodes + 1))
        / (cost.seconds(1 + nodes) + (2 + nodes) * wait)
        for nodes in range(1, 6)
    ]
    return tokens / seconds, plain, max(plain, *fixed)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("wait", [0.01, 0.05, 0.1, 0.2, 0.5])
def test_a_draft_models_time_counts(acceptance: float, wait: float) -> None:
    rate, plain, best = run_model(TYPICAL, acceptance, wait)
    assert rate > 0.95 * plain
    assert rate > 0.85 * best


def test_free_rows_are_always_used() -> None:
    assert DraftPolicy(FLAT).num_nodes(DraftHistory(), 11, 1) == 11


def test_drafts_that_are_never_right_cost_little() -> None:
    rate, plain = run(TYPICAL, acceptance=0.0)
    assert rate > 0.93 * plain


def test_rows_that_cost_a_step_each_are_not_worth_it() -> None:
    rate, plain = run(LINEAR, acceptance=0.5)
    assert rate > 0.9 * plain


@pytest.mark.parametrize("acceptance", [0.5, 0.8, 0.95])
def test_good_drafts_come_near_the_best_fixed_width(acceptance: float) -> None:
    def fixed(nodes: int) -> float:
        expected = sum(acceptance**i for i in range(nodes + 1))
        return expected / TYPICAL.seconds(1 + nodes)

    best = max(fixed(nodes) for nodes in range(12))
    rate, _ = run(TYPICAL, acceptance, steps=2000)
    assert rate > 0.85 * best


def test_drafting_is_tried_again() -> None:
    policy, history = DraftPolicy(TYPICAL), DraftHistory()
    idle = 0
    for _ in range(200):
        nodes = policy.num_nodes(history, 11, 1)
        policy.record(history, range(-1, nodes - 1), [])
        idle = idle + 1 if nodes == 0 else 0
        assert idle <= LONGEST_PAUSE + 1
    widest = max(self_nodes(policy, history) for _ in range(LONGEST_PAUSE + 2))
    assert widest > 0


def self_nodes(policy: DraftPolicy, history: DraftHistory) -> int:
    nodes = policy.num_nodes(history, 11, 1)
    policy.record(history, range(-1, nodes - 1), range(nodes))
    return nodes


def test_real_steps_correct_the_table() -> None:
    cost = StepCost([1, 2, 4], [1.0, 1.0, 1.0])
    for _ in range(100):
        cost.observe(1, 1.0)
        cost.observe(2, 3.0)
    assert cost.seconds(1) == pytest.approx(1.0, rel=0.2)
    assert cost.seconds(2) == pytest.approx(3.0, rel=0.2)
    assert cost.seconds(1) <= cost.seconds(2) <= cost.seconds(4)


def test_a_table_measured_on_a_busy_machine_keeps_its_shape() -> None:
    cost = StepCost([1, 2, 4, 8], [10.0, 11.0, 13.0, 17.0])
    for _ in range(60):
        cost.observe(1, 1.0)
    assert cost.seconds(8) / cost.seconds(1) < 3


def test_rising_is_the_nearest_non_decreasing_sequence() -> None:
    assert rising([1, 3, 2, 4]) == [1, 2.5, 2.5, 4]
    assert rising([3, 2, 1]) == [2, 2, 2]
    assert rising([]) == []
