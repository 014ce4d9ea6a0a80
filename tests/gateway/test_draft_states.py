"""Tests the dashboard's state of a draft, from counters in the services' form."""

import pytest

from gateway.draft_states import (
    ACCEPTED,
    ASKED,
    ATTACHES,
    AVAILABLE,
    OFF,
    PROPOSED,
    TREES,
    VERIFIES,
    WINDOW_SECONDS,
    Sample,
    describe,
)


def sample(time: float, verifiers: int = 1, **figures: float) -> Sample:
    names = {
        "available": AVAILABLE,
        "attaches": ATTACHES,
        "verifies": VERIFIES,
        "off": OFF,
        "trees": TREES,
        "accepted": ACCEPTED,
        "asked": ASKED,
        "proposed": PROPOSED,
    }
    figures = {"available": verifiers, "attaches": verifiers, **figures}
    values = {names[name]: {"NGRAM": value} for name, value in figures.items()}
    return Sample(time, values, {"NGRAM": verifiers})


def state(*samples: Sample) -> str:
    return describe("NGRAM", samples, True)["state"]


START = sample(0.0)


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"verifies": 0}, "idle"),
        ({"verifies": 7}, "idle"),
        ({"verifies": 100, "trees": 80, "accepted": 120}, "drafting"),
        ({"verifies": 6, "trees": 5, "accepted": 40}, "drafting"),  # a short answer
        ({"verifies": 100, "trees": 30, "accepted": 30}, "drafting"),
        # Trials alone are drafted, or nothing is asked at all.
        ({"verifies": 100, "trees": 4, "asked": 4, "proposed": 20}, "suspended"),
        ({"verifies": 100, "asked": 0}, "suspended"),
        # Asked every step, proposes, and is not verified.
        ({"verifies": 100, "asked": 100, "proposed": 900}, "suspended"),
        ({"verifies": 100, "asked": 100, "proposed": 12}, "unmatched"),
        # Plain decoding that clients asked for says nothing of the draft.
        ({"verifies": 100, "off": 100}, "idle"),
        ({"verifies": 200, "off": 100, "trees": 60}, "drafting"),
        ({"verifies": 200, "off": 100, "trees": 2}, "suspended"),
    ],
)
def test_states_of_an_attached_draft(figures: dict[str, float], expected: str) -> None:
    assert state(START, sample(5.0, **figures)) == expected


def test_lost_and_loading_are_told_apart() -> None:
    assert state(sample(0.0, available=0, attaches=0)) == "loading"
    assert state(sample(0.0, available=0, attaches=1)) == "lost"
    nothing = Sample(0.0, {}, {})
    assert describe("NGRAM", [nothing], True) == {"name": "NGRAM", "state": "attached"}
    assert describe("NGRAM", [nothing], False) == {"name": "NGRAM", "state": "lost"}


def test_some_of_several_verifiers_may_have_lost_it() -> None:
    told = describe("NGRAM", [sample(0.0, verifiers=3, available=2, attaches=3)], True)
    assert (told["state"], told["attached"], told["verifiers"]) == ("idle", 2, 3)


def test_the_newest_verifications_count() -> None:
    """Verifications from before a suspension are left out once there are enough newer ones."""
    before = sample(4.0, verifies=500, trees=500, accepted=900)
    assert state(START, before, sample(5.0, verifies=540, trees=501, accepted=900)) == "suspended"
    told = describe("NGRAM", [START, before], True)
    assert (told["seconds"], told["verifies"], told["trees"]) == (4.0, 500, 500)
    assert told["tokens_per_tree"] == pytest.approx(1 + 900 / 500)


def test_old_samples_and_those_before_a_restart_are_left_out() -> None:
    old = sample(-WINDOW_SECONDS - 1, verifies=0)
    assert state(old, sample(0.0, verifies=1000, trees=1000)) == "idle"
    assert state(sample(0.0, verifies=5000), sample(1.0, verifies=3)) == "idle"
    assert (
        state(sample(0.0, verifies=5000), START, sample(1.0, verifies=90, trees=90)) == "drafting"
    )
