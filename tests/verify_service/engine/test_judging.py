"""Tests how later tokens judge a proposal that was not verified, or only in part."""

import random

from foredraft.trees.draft_tree import DraftTree, sanitize
from verify_service.engine.judging import known_outcome

TREE = DraftTree((5, 6, 7, 8, 9), (-1, -1, 0, 2, 1))


def test_a_token_that_was_not_proposed_judges_the_whole_tree() -> None:
    assert known_outcome(TREE, [4]) == (5, [])
    assert known_outcome(TREE, [5, 3]) == (5, [0])


def test_a_proposed_token_leaves_what_follows_it_open() -> None:
    assert known_outcome(TREE, [5]) == (2, [0])
    assert known_outcome(TREE, [6]) == (4, [1])
    assert known_outcome(TREE, [5, 7, 8]) == (5, [0, 2, 3])


def test_what_is_judged_does_not_depend_on_later_tokens() -> None:
    rng = random.Random(1)
    for _ in range(300):
        size = rng.randrange(1, 9)
        tokens = [rng.randrange(3) for _ in range(size)]
        tree, _ = sanitize(tokens, [rng.randrange(-1, i) for i in range(size)], 3, size)
        text = [rng.randrange(3) for _ in range(6)]
        _, all_right = known_outcome(tree, text)
        for count in range(1, 6):
            known, right = known_outcome(tree, text[:count])
            assert [node for node in all_right if node < known] == [n for n in right if n < known]
