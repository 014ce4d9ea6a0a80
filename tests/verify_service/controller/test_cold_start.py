"""Tests the recorded guesses that the model of cold starts replays, and how it judges them."""

import pytest

from foredraft.trees.draft_tree import DraftTree
from testing import cold_start
from testing.cold_start import Guess
from verify_service.engine.judging import known_outcome


@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize("draft", cold_start.DRAFTS, ids=lambda draft: draft.name)
def test_each_draft_guessed_at_each_place_of_the_same_texts(
    draft: cold_start.Drafts, is_sampled: bool
) -> None:
    texts = cold_start.texts(draft.name, draft.nodes, is_sampled)
    assert [len(text) for text in texts] == [95] * 32  # the first of 96 tokens comes with a prompt
    for text in texts:
        for guess in text:
            assert all(0 <= node < guess.nodes <= draft.nodes for node in guess.right)
            assert list(guess.right) == sorted(set(guess.right))


@pytest.mark.parametrize("right", range(6))
@pytest.mark.parametrize("verified", range(6))
def test_a_cut_chain_is_judged_as_the_engine_judges_it(verified: int, right: int) -> None:
    chain = DraftTree(tuple(range(1, 6)), tuple(range(-1, 4)))
    text = [*range(1, right + 1), 99]
    tokens = text[: min(verified, right) + 1]  # those of the step: accepted ones and one more
    num_known, nodes = known_outcome(chain, tokens)
    if verified == 5:  # the engine judges a tree that was not cut by what was accepted
        num_known, nodes = 5, list(range(right))
    judged, accepted = Guess(5, range(right), 0).judged(verified)
    assert (judged, list(accepted)) == (num_known, nodes)
