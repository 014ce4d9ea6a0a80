"""Tests what the first requests of a new engine gain, in the model of cold starts; each test serves
recorded texts (`testing.cold_start`).
"""

import pytest

from testing import cold_start


@pytest.mark.parametrize("name", ["EAGLE3", "STANDALONE"])
def test_first_requests_lose_little_beside_rivals(name: str) -> None:
    """The cells of `benchmarks.adaptive --cold` that were furthest below the bar."""
    draft = next(one for one in cold_start.DRAFTS if one.name == name)
    rates = [
        sum(cold_start.serve(draft, 4, True, True, arm, seed).rate for seed in range(6))
        for arm in cold_start.ARMS
    ]
    assert rates[2] > 0.95 * max(rates[:2])


@pytest.mark.parametrize("name", ["EAGLE3", "MTP", "STANDALONE"])
def test_first_requests_on_fast_cores_are_near_the_better_of_always_and_never(name: str) -> None:
    """One request at a time: greedy ones gain by a third, sampled ones lose by a fifth."""
    draft = next(one for one in cold_start.FAST_DRAFTS if one.name == name)
    for is_sampled in (False, True):
        rates = [
            sum(cold_start.serve(draft, 1, is_sampled, False, arm, n).rate for n in range(6))
            for arm in cold_start.ARMS
        ]
        assert rates[2] > 0.94 * max(rates[:2])


def test_ngrams_that_gained_much_are_asked_again_soon() -> None:
    """Greedy texts on fast cores that repeat themselves now and then, one at a time."""
    rates = [
        sum(
            cold_start.serve(cold_start.FAST_DRAFTS[0], 1, False, False, arm, n).rate
            for n in range(4)
        )
        for arm in cold_start.ARMS
    ]
    assert rates[2] > 1.4 * rates[0]
    assert rates[2] > 0.8 * rates[1]


@pytest.mark.parametrize("draft", cold_start.DRAFTS, ids=lambda draft: draft.name)
def test_the_first_request_drafts_in_its_first_steps(draft: cold_start.Drafts) -> None:
    for batch, is_sampled in ((1, False), (4, True)):
        assert cold_start.serve(draft, batch, is_sampled, True, "default", 0).first <= 8


@pytest.mark.parametrize("draft", cold_start.FAST_DRAFTS, ids=lambda draft: draft.name)
def test_a_slow_self_test_keeps_no_first_request_from_drafting(draft: cold_start.Drafts) -> None:
    """Rivals slow the draft while it is timed, so that it does not seem to pay, in some of these
    stacks."""
    for seed in (6, 8, 14, 15, 21):
        assert cold_start.serve(draft, 4, False, True, "default", seed).first <= 8
