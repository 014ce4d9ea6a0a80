"""Tests which drafts the bank pays for, and which it stops."""

import pytest

from testing.controllers import TYPICAL
from verify_service.controller.controller import Controller
from verify_service.controller.costs import CostModel
from verify_service.controller.messages import (
    NO_WAIT,
    Candidate,
    DraftHistory,
    DraftKind,
    Observed,
    Wait,
)


def test_drafting_begins_only_if_the_bank_can_pay_for_what_is_read_first() -> None:
    """A full bank pays for it; one that is nearly empty does not, unless drafting surely pays."""
    kind = DraftKind(5, 5)
    for lost, behind, drafts in ((0.0, 2000, True), (3.5, 2000, False), (3.5, 0, True)):
        policy = Controller(CostModel(TYPICAL), [kind])
        policy.is_drafting = [False]
        policy._bank.pay(lost * 0.1)
        one = Candidate(DraftHistory(), [5], behind=[behind], left=80)
        policy.plan([one])
        assert policy.is_drafting == [drafts]


@pytest.mark.parametrize(
    ("wrong", "lost", "drafts"), [(6, 0, True), (6, 0.5, False), (24, 0, False)]
)
def test_a_full_bank_pays_for_a_trial_that_seems_to_lose_little(
    wrong: int, lost: float, drafts: bool
) -> None:
    """A few bad guesses, which may all be of one text, kept drafts away for seconds."""
    policy = Controller(CostModel(TYPICAL), [DraftKind(5, 5)])
    policy.is_drafting = [False]
    policy._bank.pay(lost * 0.1)
    for _ in range(9):
        policy._costs.waited(0, 1, 5, 0.12)
    for _ in range(wrong):
        policy._acceptance[0].record(DraftHistory(), 0, 5, (), 0)
    policy.plan([Candidate(DraftHistory(), [5], left=500)])
    assert policy.is_drafting == [drafts]


def steady(policy: Controller, history: DraftHistory, right: list[int], count: int) -> list[int]:
    """Runs steps of a chain of five whose outcomes repeat; returns their nodes."""
    found = []
    for i in range(count):
        [nodes] = policy.plan([Candidate(history, [5], left=1000)]).nodes
        accepted = min(nodes, right[i % len(right)])
        policy.record(history, nodes, range(accepted))
        wait = Wait(nodes, 1, 0.02 + 0.004 * nodes) if nodes else NO_WAIT
        seconds = TYPICAL.seconds(1, 1 + nodes)
        if nodes or not policy.passes(seconds):
            policy.observe(Observed(1, 1 + nodes, seconds, 1 + accepted, wait))
        found.append(nodes)
    return found


def test_bad_luck_does_not_stop_a_draft_that_is_known_to_pay() -> None:
    policy, history = Controller(CostModel(TYPICAL), [DraftKind(5, 5)]), DraftHistory()
    steady(policy, history, [5, 4, 0, 5, 2], 400)
    policy._bank.pay(1000.0)
    assert not policy._bank.has_any
    drafted = steady(policy, history, [0, 5, 0, 5, 4], 20)
    assert sum(nodes > 0 for nodes in drafted) >= 17  # but for steps that check plain ones


def test_an_empty_bank_stops_a_draft_of_which_little_is_known() -> None:
    policy, history = Controller(CostModel(TYPICAL), [DraftKind(5, 5)]), DraftHistory()
    assert steady(policy, history, [5], 2)[1] > 0
    policy._bank.pay(1000.0)
    policy._unplanned = 1000.0
    assert steady(policy, history, [5], 20) == [0] * 20
