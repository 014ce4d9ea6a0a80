"""Tests estimates of acceptance against exact posteriors, and after a change of acceptance."""

import random

import numpy as np
import pytest

from verify_service.controller.acceptance import Acceptance, SizeBins, falling
from verify_service.controller.config import ControllerConfig
from verify_service.controller.messages import DraftHistory

LASTING = ControllerConfig(pool_memory=1e12, own_memory=1e12)


def gains(acceptance: Acceptance, history: DraftHistory, confidence: int = 0) -> list[float]:
    track, pool = acceptance.track(history, 0, confidence), acceptance.pool(history, confidence)
    acceptance.learn()
    found: list[float] = acceptance.gains([track], [pool])[0].tolist()
    return found


def chain(rng: random.Random, chance: float, length: int) -> list[int]:
    count = 0
    while count < length and rng.random() < chance:
        count += 1
    return list(range(count))


def test_estimates_are_the_posteriors_of_each_depth_given_the_one_before_it() -> None:
    """By hand: Beta with a chain as prior for all sequences, with theirs as prior for one; nodes
    that no tree reached say nothing.
    """
    rng, config = random.Random(1), LASTING
    acceptance, one = Acceptance(SizeBins([1, 2, 3, 4]), config), DraftHistory()
    outcomes = [(size, len(chain(rng, 0.7, size))) for size in rng.choices([1, 2, 4], k=60)]
    for i, (size, right) in enumerate(outcomes):
        history = one if i < 20 else DraftHistory()
        acceptance.record(history, 0, size, range(right), 0)
        acceptance.learn()  # outcomes come one by one
    first = config.prior_chance
    prior, path = config.prior_outcomes, 1.0
    for depth, gain in enumerate(gains(acceptance, one)):
        reached = [right for size, right in outcomes if size > depth and right >= depth]
        hits = sum(right > depth for right in reached)
        ratio = (hits + prior * first) / (len(reached) + prior)
        if depth == 0:
            first = int(100 * ratio + 0.5) / 100  # deeper nodes are expected to be like it
        own = [right for size, right in outcomes[:20] if size > depth]
        path = (sum(right > depth for right in own) + config.prior_outcomes * path * ratio) / (
            len(own) + config.prior_outcomes
        )
        assert gain == pytest.approx(path, rel=1e-6)


def test_what_is_expected_comes_from_the_sequence_and_before_that_from_others() -> None:
    acceptance = Acceptance(SizeBins([1, 3, 7]))
    good, bad = DraftHistory(), DraftHistory()
    for _ in range(60):
        acceptance.record(good, 0, 7, [0, 1, 2], 0)
        acceptance.record(bad, 0, 7, [], 0)
        acceptance.learn()
    assert gains(acceptance, good) == pytest.approx([1.0, 2.0, 0.0], abs=0.25)
    assert sum(gains(acceptance, bad)) < 0.25
    assert gains(acceptance, DraftHistory())[0] == pytest.approx(0.5, abs=0.1)
    assert gains(acceptance, DraftHistory(), 4)[0] == pytest.approx(0.56, abs=0.02)  # another match


def test_what_greedy_texts_show_is_what_sampled_ones_begin_with() -> None:
    acceptance = Acceptance(SizeBins([1, 2]))
    for _ in range(100):
        acceptance.record(DraftHistory(), 0, 2, [], 0)
        acceptance.learn()
    assert gains(acceptance, DraftHistory(group=1))[0] < 0.1


def test_a_change_of_all_sequences_is_noticed_in_one_step() -> None:
    acceptance = Acceptance(SizeBins([1, 2, 3]))
    histories = [DraftHistory() for _ in range(16)]
    for right in [[0, 1, 2]] * 40 + [[]]:
        for history in histories:
            acceptance.record(history, 0, 3, right, 0)
        acceptance.learn()
    assert sum(gains(acceptance, histories[0])) < 1.0


def test_time_lets_the_prior_come_back_and_little_evidence_is_taken_for_a_little_better() -> None:
    acceptance = Acceptance(SizeBins([1]))
    for _ in range(2):
        for _ in range(100):
            acceptance.record(DraftHistory(), 0, 1, [], 0)
        acceptance.learn()
    low = acceptance.gains([0], [0])[0, 0]
    assert acceptance.gains([0], [0], True)[0, 0] == low  # enough was seen
    for _ in range(100):
        acceptance.pass_time(1.0, steps=100.0)
    assert acceptance.gains([0], [0])[0, 0] == pytest.approx(0.7, abs=0.01)
    assert acceptance.gains([0], [0], True)[0, 0] > 0.8


def test_sequences_that_end_give_their_tracks_back() -> None:
    acceptance = Acceptance(SizeBins([1, 2]))
    for _ in range(1000):
        history = DraftHistory()
        acceptance.record(history, 0, 2, [0], 0)
        acceptance.forget(history, 0)
    assert len(acceptance._tracks) == 64
    held = [DraftHistory() for _ in range(200)]
    for history in held:
        acceptance.record(history, 0, 2, [0], 0)
    assert len({acceptance.track(history, 0, 0) for history in held}) == 200


def test_falling_is_the_nearest_with_falling_densities_and_keeps_the_sum() -> None:
    rng = np.random.default_rng(2)
    widths = np.array([1.0, 2.0, 4.0])
    for _ in range(200):
        before = rng.random((1, 3)) * widths
        after = falling(before.copy(), widths)
        density = (after / widths)[0]
        assert (np.diff(density) < 1e-9).all()
        assert after.sum() == pytest.approx(before.sum())
