"""Stop strings against a search in the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stops import StopMatcher


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Finds the text before the stop string that is complete first, by brute force."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    pieces=st.lists(st.text("ab<", max_size=6), max_size=12),
    stops=st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4),
)
def test_equals_a_search_in_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    released = ""
    expected, stop = first_stop("".join(pieces), stops)
    for piece in pieces:
        released += matcher.feed(piece)
        assert expected.startswith(released)
    assert matcher.matched == stop
    assert released + matcher.flush() == expected


@pytest.mark.parametrize("stops", [["at", "cat"], ["cat", "at"], ["t", "at", "cat", "dog"]])
def test_of_several_complete_at_once_the_longest_wins(stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    longest = max((stop for stop in stops if "cat".endswith(stop)), key=len)
    assert matcher.feed("a cat sat") == "a cat sat".partition(longest)[0]
    assert matcher.matched == longest


def test_holds_back_only_what_could_begin_a_stop_string() -> None:
    matcher = StopMatcher(["STOP", "!!"])
    assert matcher.feed("go ST") == "go "
    assert matcher.feed("AR") == "STAR"
    assert matcher.feed("! S") == "! "
    assert matcher.feed("TO") == ""
    assert matcher.feed("P rest") == ""
    assert matcher.matched == "STOP"
    assert matcher.feed("more") == ""


def test_no_stop_strings() -> None:
    matcher = StopMatcher([])
    assert matcher.feed("text") == "text"
    assert matcher.flush() == ""
