"""Simulated acceptance: the mean that was asked for, along paths that exist."""

import random

import pytest

from foredraft.trees.draft_tree import DraftTree, depths, sanitize
from verify_service.executor.choice.simulation import SimulatedAcceptance
from verify_service.executor.choice.verification import walk


def random_tree(rng: random.Random, size: int) -> DraftTree:
    tokens = [rng.randrange(90, 110) for _ in range(size)]
    return sanitize(tokens, [rng.randrange(-1, i) for i in range(size)], 1000, size)[0]


def test_every_tree_gets_a_number_of_tokens_of_its_own_no_more_than_it_is_deep():
    rng, simulated = random.Random(1), SimulatedAcceptance(3.4, 5)
    lengths, pairs = [], set()
    for _ in range(400):
        trees = [random_tree(rng, 20) for _ in range(3)]
        walked = [
            walk(tree, forced) for tree, forced in zip(trees, simulated.forced(trees), strict=True)
        ]
        limits = [1 + max(depths(tree.parents)) for tree in trees]
        for tree, verified, limit in zip(trees, walked, limits, strict=True):
            assert min(3, limit) <= len(verified.tokens) <= min(4, limit)
            assert [tree.tokens[row - 1] for row in verified.path[1:]] == verified.tokens[:-1]
            assert -1 not in verified.tokens
            if limit >= 4:
                lengths.append(len(verified.tokens))
        if min(limits) >= 4:
            pairs.add(tuple(len(verified.tokens) for verified in walked[:2]))
    assert sum(lengths) / len(lengths) == pytest.approx(3.4, abs=0.1)
    assert pairs == {(3, 3), (3, 4), (4, 3), (4, 4)}


def test_nodes_are_right_as_often_as_was_asked_for():
    simulated = SimulatedAcceptance(1.0, 3)
    simulated.acceptance = 0.5
    lengths = simulated.draw(4000)
    assert set(lengths) == {1, 2, 3, 4}
    for length in (1, 2, 3):
        reached = sum(n >= length for n in lengths)
        assert sum(n > length for n in lengths) / reached == pytest.approx(0.5, abs=0.05)


def test_an_empty_tree_gives_one_token():
    assert SimulatedAcceptance(4.0, 5).forced([DraftTree()]) == [[100]]


def test_less_than_the_targets_own_token_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        SimulatedAcceptance(0.5, 5)
