"""Tests the odds of a change of acceptance against exact Bayes factors, and what they change."""

import random

import numpy as np
import pytest

from verify_service.controller.acceptance import Acceptance, SizeBins
from verify_service.controller.config import DEFAULT
from verify_service.controller.doubt import Doubt
from verify_service.controller.messages import DraftHistory


def test_odds_are_those_of_bayes_rule_for_the_likeliest_beginning() -> None:
    """By numerical integration over all chances, for every step since which they may have held."""
    rng, chances = random.Random(1), (np.arange(20_000) + 0.5) / 20_000
    for _ in range(40):
        doubt, steps = Doubt(DEFAULT), []
        for _ in range(rng.randint(1, 14)):
            tries = rng.randint(1, 6)
            right, known = rng.randint(0, tries), rng.uniform(0.1, 0.9)
            doubt.record(right, tries - right, known * tries)
            steps.append((tries, right, known * tries))
        factors = []
        for start in range(max(len(steps) - DEFAULT.near_steps, 0), len(steps)):
            total, right, mean = np.sum(steps[start:], axis=0)
            any_chance = (chances**right * (1 - chances) ** (total - right)).mean()
            known = mean / total
            factors.append(any_chance / (known**right * (1 - known) ** (total - right)))
        assert doubt.odds == pytest.approx(max(factors) / DEFAULT.pool_memory, rel=1e-3)


def test_few_wrong_trees_cast_doubt_on_a_good_draft_and_more_on_a_middling_one() -> None:
    counts = []
    for chance in (0.9, 0.75, 0.6):
        doubt, count = Doubt(DEFAULT), 0
        while doubt.odds < 1 and count < DEFAULT.near_steps:
            doubt.record(0, 1, chance)
            count += 1
        counts.append(count)
    assert counts == [3, 5, 8]


def after_three_wrong_trees() -> tuple[Acceptance, list[int], list[int], float]:
    """Returns estimates after 30 trees that were mostly right and three wrong ones, the sequence's
    track and pool, and its expected nodes without doubt.
    """
    acceptance, history = Acceptance(SizeBins([1, 2, 3, 4, 5])), DraftHistory()
    for right in [5, 3, 5, 1, 5, 5, 4, 5, 2, 5] * 3 + [0] * 3:
        acceptance.record(history, 0, 5, range(right), 0)
        acceptance.learn()
    tracks, pools = [acceptance.track(history, 0, 0)], [0]
    estimated = acceptance._estimates(tracks, pools, 0.0).sum()
    return acceptance, tracks, pools, float(estimated)


def test_doubted_estimates_are_lower_unless_optimism_is_paid_for() -> None:
    acceptance, tracks, pools, estimated = after_three_wrong_trees()
    assert acceptance.gains(tracks, pools).sum() < 0.95 * estimated
    assert acceptance.gains(tracks, pools, 1.0).sum() >= estimated


def test_doubt_passes_with_the_tokens_of_a_hard_stretch_of_text_and_evidence_stays() -> None:
    acceptance, tracks, pools, estimated = after_three_wrong_trees()
    acceptance.pass_time(1e-3, steps=1.0)
    assert acceptance.gains(tracks, pools).sum() < 0.95 * estimated
    acceptance.pass_time(30e-3, steps=90.0)
    assert acceptance.gains(tracks, pools).sum() == pytest.approx(estimated, rel=0.02)
