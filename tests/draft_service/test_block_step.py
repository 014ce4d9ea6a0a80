"""Block drafters by steps of fixed shape, run operation by operation: the chains that the ordinary
path gives.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from draft_service.drafters.block_method import BlockMethod
from draft_service.drafters.graph_drafting import GraphSettings
from draft_service.drafters.parallel_method import ParallelMethod
from foredraft.transport.inline import InlineReader
from foredraft.transport.rows import RowFormat
from testing.block_cases import KINDS, load_on_cpu
from testing.block_drafts import tiny_peagle
from testing.draft_cases import limits_of
from testing.head_verifier import Verifier, request_of
from testing.sequence_lives import life

HEADS = {kind: head for kind, (head, _) in KINDS.items()} | {
    "peagle": tiny_peagle(3),
    "peagle-one-layer": tiny_peagle(5, num_layers=1),
}


def blocks_life(verifier: Verifier, steps: int, topk: int, seed: int) -> list[Any]:
    """Sequences that grow by few tokens and by many."""

    def wish(rng: random.Random) -> tuple[int, int, int]:
        asked = rng.randrange(1, steps + 1)
        # A smaller tree is cut out of the largest one there.
        return (asked, 1, asked + 1) if topk == 1 else (steps, topk, 12)

    return life(verifier, seed, 12, (2, 3, 9, 60), (1, 1, 2, steps + 1, 7), wish)


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("ordering", ["topk", "coupled"])
@pytest.mark.parametrize("kind", HEADS)
def test_the_same_trees_as_by_the_ordinary_path(
    kind: str, ordering: str, topk: int, target: Path, tmp_path: Path
) -> None:
    drafter = load_on_cpu(HEADS[kind], target, tmp_path)
    steps = drafter.info().limits.num_steps
    found = []
    for static in (False, True):
        drafter.graphs = GraphSettings(8, captures=False) if static else None
        limits = limits_of((steps, topk, 12 if topk > 1 else steps + 1))
        proposer, _ = drafter.attach(request_of(target, draft_sampling=ordering, limits=limits))
        row = RowFormat.of(drafter.info().hidden)
        proposer.hidden = InlineReader(row)
        proposer.prepare()
        found.append(blocks_life(Verifier(proposer, row.width), steps, topk, seed=len(kind)))
        proposer.close()
    assert sum(len(answer) for answer in found[0]) > 20
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["dflash", "dspark", "peagle"])
def test_rows_of_a_block_are_made_with_the_batches(kind: str, target: Path, tmp_path: Path) -> None:
    """And not by the first run: what a run allocates may belong to a graph that is thrown away."""
    drafter = load_on_cpu(HEADS[kind], target, tmp_path)
    drafter.graphs = GraphSettings(8, captures=False)
    steps = drafter.info().limits.num_steps
    proposer, _ = drafter.attach(request_of(target, limits=limits_of((steps, 1, steps + 1))))
    assert isinstance(proposer._method, BlockMethod | ParallelMethod)
    proposer.hidden = InlineReader(RowFormat.of(drafter.info().hidden))
    proposer.prepare()
    assert proposer._fixed_steps is not None
    rows = proposer._fixed_steps.graphs.step.batches_of(2).block_rows
    assert rows is not None
    assert rows.first_row.tolist() == [0, len(rows.tokens) // 2]
    proposer.close()
