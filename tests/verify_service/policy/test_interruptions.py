"""What interruptions cost and how often they come, and what drafting is worth between them."""

import pytest

from verify_service.policy.interruptions import SETTLING, Interruptions


def interrupt(what: Interruptions, is_drafting: bool, lost: float, count: int = 1) -> None:
    """Interruptions that lose so many seconds in equal parts, each followed by 0.1 s and 100 tokens."""
    part = lost / (1 + SETTLING)
    for _ in range(count):
        what.begin(is_drafting, part)
        for _ in range(SETTLING):
            assert what.is_settling
            what.settle(part)
        assert not what.is_settling
        what.step(0.1, 100)


def test_before_any_there_is_no_difference() -> None:
    what = Interruptions()
    assert what.rate(1000, True) == what.rate(1000, False) == 1000


def test_what_they_cost_counts_as_often_as_they_come() -> None:
    what = Interruptions()
    interrupt(what, True, 2e-3, 60)
    # One for each 100 tokens: beside 0.1 s of undisturbed steps 2 ms.
    assert what.rate(1000, True) == pytest.approx(1000 / 1.02, rel=2e-3)
    assert what.rate(1000, False) == 1000
    assert what.rate(1000, True, is_start=True) < what.rate(1000, True)
    what.step(5.0, 5000)  # no more come
    assert what.rate(1000, True) == pytest.approx(1000, rel=1e-3)


def test_what_the_other_state_cost_is_tried_again_in_time() -> None:
    what = Interruptions()
    interrupt(what, True, 8e-3, 60)
    before = what.rate(1000, True)
    interrupt(what, False, 1e-3, 10)  # one second
    assert what.rate(1000, True) == pytest.approx(before, rel=1e-2)
    interrupt(what, False, 1e-3, 2000)
    assert what.rate(1000, True) == pytest.approx(what.rate(1000, False), rel=1e-3)


def test_a_hiccup_tells_little() -> None:
    what = Interruptions()
    interrupt(what, True, 2e-3, 60)
    usual = what.rate(1000, True)
    interrupt(what, True, 1.0)
    assert what.rate(1000, True) == pytest.approx(usual, rel=0.01)


def test_drafting_must_cost_less_to_start_where_tokens_come_beside_prompts() -> None:
    """A large model: what a step with prompts decodes is worth more than the host takes, and each seems to win time."""
    what = Interruptions()
    interrupt(what, False, -6e-3, 60)
    interrupt(what, True, -2e-3, 60)
    assert what.rate(1000, True, is_start=True) < what.rate(1000, True) < what.rate(1000, False)
