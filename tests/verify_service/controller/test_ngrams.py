"""Tests how much is asked of n-grams, which answer before it is known what they are worth."""

import random

from testing.controllers import TYPICAL, controller
from verify_service.controller.controller import Controller
from verify_service.controller.costs import CostModel
from verify_service.controller.messages import (
    Candidate,
    DraftHistory,
    DraftKind,
    Observed,
    Offer,
    Wait,
)


def test_an_ngram_that_is_never_right_costs_little_and_one_that_is_right_is_used() -> None:
    for acceptance in (0.0, 0.9):
        controller_, rng = controller(TYPICAL, 11, 11, is_first=True), random.Random(1)
        history, tokens, seconds = DraftHistory(), 0, 0.0
        for _ in range(600):
            asked = controller_.plan([Candidate(history, [11])]).nodes[0] > 0
            wait = 0.001 if asked else 0.0
            offered = 11 if asked and rng.random() < 0.7 else 0
            nodes = controller_.trim([Offer(history, offered, 1)])[0] if asked else 0
            right = 0
            while right < offered and rng.random() < acceptance:
                right += 1
            target = TYPICAL.seconds(1, 1 + nodes)
            accepted = min(right, nodes)
            controller_.observe(
                Observed(1, 1 + nodes, target, accepted + 1, Wait(int(asked), 1, wait))
            )
            # What was not verified is known as far as the next token tells.
            known = offered if right <= nodes else nodes + 1
            controller_.record(history, known, range(min(right, nodes + 1)), 1, accepted)
            tokens += accepted + 1
            seconds += target + wait
        ratio = tokens / seconds * TYPICAL.seconds(1, 1)
        assert ratio > (2.5 if acceptance else 0.97)


def test_a_few_useless_answers_do_not_end_the_trial_of_ngrams() -> None:
    policy, history = controller(TYPICAL, 11, 11, is_first=True), DraftHistory()
    policy._bank.pay(0.15)
    for _ in range(8):
        assert policy.plan([Candidate(history, [11])]).nodes == [11]
        policy._asking.each[0].brought(history, -0.3)
        policy.think()
    policy._bank.pay(1.0)
    policy.think()
    assert not policy._bank.has_any
    assert policy.plan([Candidate(history, [11])]).nodes == [0]


def test_ngrams_read_at_no_cost() -> None:
    one = Candidate(DraftHistory(), [5], behind=[2000])
    for is_first, unread in ((False, 2000), (True, 0)):
        policy = Controller(CostModel(TYPICAL), [DraftKind(5, 5, is_first)])
        assert policy.unread([one], [5]) == [unread]
