"""Beam trees of fixed shape against those that the host builds."""

import pytest
import torch

from draft_service.steps.static_beams import StaticBeams
from foredraft.sampling.rows import SamplingRows
from foredraft.trees.draft_tree import DraftTree
from foredraft.trees.tree_building import BeamTree, Ordering
from foredraft.types import NO_TOKEN, SamplingParams

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=4),
    SamplingParams(temperature=0.7, seed=5, top_k=3),
    SamplingParams(temperature=2.0, seed=6, top_p=0.8, min_p=0.05),
]


def trees_of(beams: StaticBeams, limit: int | None = None) -> list[DraftTree]:
    """The nodes as the host takes them, the first ones up to a limit."""
    trees = []
    for tokens, parents in zip(*(part.tolist() for part in beams.nodes()), strict=True):
        size = sum(token != NO_TOKEN for token in tokens)
        size = size if limit is None else min(size, limit)
        trees.append(DraftTree(tuple(tokens[:size]), tuple(parents[:size])))
    return trees


@pytest.mark.parametrize("ordering", ["topk", "coupled"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 2), (4, 1, 5), (4, 1, 3), (3, 2, 6), (3, 4, 40), (2, 3, 30)]
)
@pytest.mark.parametrize("mapped", [False, True])
def test_the_same_trees(ordering: Ordering, shape: tuple[int, int, int], mapped: bool) -> None:
    steps, topk, tokens = shape
    vocab, batch = 23, len(PARAMS)
    generator = torch.Generator().manual_seed(steps * 100 + topk)
    token_map = torch.randperm(97, generator=generator)[:vocab] if mapped else None
    rows = SamplingRows.from_params(PARAMS, [5, 6, 7, 8]) if ordering == "coupled" else None
    expected = BeamTree(batch, steps, topk, tokens, ordering, rows)
    found = StaticBeams(batch, steps, topk, tokens, ordering, rows)
    for level in range(steps):
        width = topk if level else 1
        logits = torch.randn(batch, width, vocab, generator=generator) * 3
        if level == 1 and topk > 1:
            logits[0, -1] = float("nan")  # a row without any token
        want, got = expected.expand(logits, token_map), found.expand(logits, token_map)
        assert torch.equal(want[0], got[0])
        assert torch.equal(want[1], got[1])
        if topk > 1:
            assert torch.equal(expected.ancestor_rows(), found.ancestor_rows())
    assert trees_of(found) == expected.finish()
    for limit in range(1, tokens):
        assert trees_of(found, limit) == expected.finish([limit] * batch)
