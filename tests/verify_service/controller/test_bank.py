"""Tests the bank that pays for trials against values computed by hand."""

import pytest

from verify_service.controller.bank import Bank
from verify_service.controller.config import ControllerConfig

STEP = 0.01
CONFIG = ControllerConfig(bank_steps=4.0, bank_share=0.01)


def test_a_bank_that_is_empty_pays_for_no_optimism_until_it_holds_what_a_step_may_lose() -> None:
    bank = Bank(CONFIG, STEP)
    assert bank.is_full
    bank.pay(3.9 * STEP)
    assert bank.has_any
    bank.drafted(2 * STEP, STEP, STEP, False)  # nothing was right
    assert not bank.has_any
    count = 0
    while not bank.has_any and count < 400:
        bank.plain(STEP, True)
        bank.look(STEP)
        count += 1
    # 0.88 steps are missing, and a step may lose one: a hundredth of a step comes with each.
    assert count == pytest.approx(100 * (0.88 + 1.0), abs=2)


def test_drafting_that_loses_more_than_is_owed_at_most_stops() -> None:
    bank = Bank(CONFIG, STEP)
    bank.pay(4.5 * STEP)
    assert bank.is_suspended
    bank.pay(1.4 * STEP)  # owes almost half of what a bank holds
    assert not bank.is_stopped
    bank.pay(30 * STEP)
    assert bank.is_stopped
    for _ in range(99):
        bank.plain(STEP, True)
        bank.look(STEP)
    assert bank.is_stopped
    for _ in range(2):
        bank.plain(STEP, True)
        bank.look(STEP)
    assert not bank.is_stopped


def test_what_it_took_to_begin_is_paid_by_gains_or_when_drafting_ends() -> None:
    bank = Bank(CONFIG, STEP)
    bank.invest(1.5 * STEP)
    bank.invest(0.5 * STEP)
    bank.drafted(STEP, STEP, 2.5 * STEP, False)  # gains a step and a half
    assert bank.is_full
    bank.plain(STEP, False)  # shows what plain steps take
    assert bank.is_full
    bank.plain(STEP, True)
    assert not bank.is_full
    assert bank.affords(3.49 * STEP)
    assert not bank.affords(3.52 * STEP)


def test_it_holds_steps_of_as_many_sequences_as_there_are() -> None:
    bank = Bank(CONFIG, STEP)
    bank.pay(2 * STEP)
    bank.look(5 * STEP)
    assert bank.affords(9.9 * STEP)
    assert not bank.affords(10.1 * STEP)


def test_gains_of_a_draft_that_is_asked_first_pay_for_many_proposals_that_bring_nothing() -> None:
    for is_first in (False, True):
        bank = Bank(CONFIG, STEP)
        for _ in range(5):
            bank.drafted(STEP, STEP, 9 * STEP, is_first)  # eight tokens more than a plain step's
        for _ in range(30):
            bank.drafted(1.3 * STEP, STEP, STEP, is_first)
        assert bank.has_any is is_first
        assert bank.is_stopped is not is_first
        bank.plain(STEP, True)  # what plain steps add does not count beyond a full bank
        assert not bank.is_full or is_first
