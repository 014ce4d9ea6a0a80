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
    bank.record_drafted(2 * STEP, STEP, False)  # nothing was right
    assert not bank.has_any
    count = 0
    while not bank.has_any and count < 400:
        bank.record_plain(STEP)
        bank.set_plain_seconds(STEP)
        count += 1
    # 0.88 steps are missing, and a step may lose one: a hundredth of a step comes with each.
    assert count == pytest.approx(100 * (0.88 + 1.0), abs=2)


def test_a_bank_owes_a_step_at_most() -> None:
    bank = Bank(CONFIG, STEP)
    bank.pay(30 * STEP)
    assert bank.is_suspended
    for _ in range(198):
        bank.record_plain(STEP)
        bank.set_plain_seconds(STEP)
    assert bank.is_suspended  # it owed a step, and must hold one
    for _ in range(4):
        bank.record_plain(STEP)
        bank.set_plain_seconds(STEP)
    assert bank.has_any


def test_a_credit_pays_for_the_first_trials_once() -> None:
    bank = Bank(CONFIG, STEP)
    bank.lend(False)
    bank.pay(11.9 * STEP)  # a full bank and twice as much on credit
    assert bank.has_any
    for _ in range(10000):
        bank.record_plain(STEP)
    bank.lend(False)
    assert bank.affords(3.9 * STEP)
    bank.pay(STEP)
    assert not bank.affords(4.1 * STEP)


def test_a_credit_ends_once_it_is_known_what_drafts_bring() -> None:
    bank = Bank(CONFIG, STEP)
    bank.lend(False)
    bank.lend(True)
    bank.pay(3.9 * STEP)
    assert bank.has_any
    bank.pay(0.2 * STEP)
    assert not bank.has_any


def test_it_holds_steps_of_as_many_sequences_as_there_are() -> None:
    bank = Bank(CONFIG, STEP)
    bank.pay(2 * STEP)
    bank.set_plain_seconds(5 * STEP)
    assert bank.affords(9.9 * STEP)
    assert not bank.affords(10.1 * STEP)


def test_gains_of_a_draft_that_is_asked_first_pay_for_many_proposals_that_bring_nothing() -> None:
    for is_first in (False, True):
        bank = Bank(CONFIG, STEP)
        for _ in range(5):
            bank.record_drafted(STEP, 9 * STEP, is_first)  # eight tokens more than a plain step's
        for _ in range(30):
            bank.record_drafted(1.3 * STEP, STEP, is_first)
        assert bank.has_any is is_first
        bank.record_plain(STEP)  # what plain steps add does not count beyond a full bank
        assert not bank.is_full or is_first
