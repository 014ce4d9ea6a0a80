"""Block drafters against their published descriptions in float64: the same chains, whatever the
batch, the chunks, the pages and the layout of the files.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draft_service.drafters.heads import HeadDrafter
from foredraft.api.draft.v1 import draft_pb2
from foredraft.errors import AttachRefused
from testing.block_cases import (
    KINDS,
    chain_of,
    check_batch_that_grows,
    check_peagle,
    limits,
    states_of,
)
from testing.block_drafts import BlockReference, tiny_peagle
from testing.draft_heads import best_paths, paths_of
from testing.head_verifier import attached, text

Make = Callable[..., HeadDrafter]


@pytest.mark.parametrize("kind", KINDS)
def test_chains_of_a_batch_that_grows(kind: str, make: Make, target: Path) -> None:
    head, options = KINDS[kind]
    reference = BlockReference(head, target, **options)
    check_batch_that_grows(make(head), reference, target)


def test_a_block_after_a_text_that_came_in_parts(make: Make, target: Path) -> None:
    head, _ = KINDS["dflash-sliding"]
    reference, drafter = BlockReference(head, target), make(head)
    whole = text(5, 41)
    for chunk in (1, 3, 25, 41):
        with attached(drafter, target, limits=drafter.info().limits) as verifier:
            for start in range(0, 41, chunk):
                is_last = start + chunk >= 41
                asked = limits(4) if is_last else None
                tree = verifier.step(verifier.news(2, whole[start : start + chunk], asked))
            expected = reference.chain(whole[-1], states_of(verifier, 2), 4)
            assert chain_of(tree[2]) == expected


def test_keys_that_do_not_exist_are_not_attended(make: Make, target: Path) -> None:
    head, _ = KINDS["dflash"]
    reference, drafter = BlockReference(head, target), make(head)
    with attached(drafter, target, limits=drafter.info().limits) as verifier:
        message = verifier.news(1, text(3, 20), limits(4))
        # The draft comes to a sequence whose first 7 positions it has never seen.
        message.begin.valid_from = 7
        message.position = 8
        del message.tokens[:8]
        message.ClearField("hidden")
        verifier.add_hidden(message, 7, 19)
        tree = verifier.step(message)
        bonus = verifier.tokens[1][-1]
        seen = reference.chain(bonus, states_of(verifier, 1), 4, valid_from=7)
        assert chain_of(tree[1]) == seen


@pytest.mark.parametrize("options", [{}, {"num_layers": 4, "fc_norm": True}])
def test_peagle(options: dict[str, Any], make: Make, target: Path) -> None:
    head = tiny_peagle(3, **options)
    drafter = make(head)
    assert drafter.info().algorithm == "PEAGLE"
    check_peagle(drafter, head, target)


def test_the_files_say_what_it_is(make: Make) -> None:
    assert make(KINDS["dspark"][0], algorithm="DFLASH").info().algorithm == "DSPARK"
    assert make(KINDS["dflash"][0], algorithm="DSPARK").info().algorithm == "DFLASH"
    assert make(tiny_peagle(4), algorithm="EAGLE3").info().algorithm == "PEAGLE"


@pytest.mark.parametrize("kind", ["dflash", "dflash-speculators", "dspark", "dspark-rnn"])
def test_trees_are_the_best_of_all_paths(kind: str, make: Make, target: Path) -> None:
    head, options = KINDS[kind]
    reference, drafter = BlockReference(head, target, **options), make(head)
    most = draft_pb2.TreeLimits(num_steps=4, topk=3, num_draft_tokens=16)
    shapes = [(4, 3, 16), (2, 2, 5), (3, 3, 7), (4, 1, 5), (1, 3, 4)]
    with attached(drafter, target, limits=most, draft_sampling="topk") as verifier:
        for round_number in range(2):
            messages = [
                verifier.news(slot, text(7 * round_number + slot, 5 + slot), shape)
                for slot, shape in enumerate(shapes)
            ]
            trees = verifier.step(*messages)
            for slot, (steps, topk, nodes) in enumerate(shapes):
                bonus, states = verifier.tokens[slot][-1], states_of(verifier, slot)
                after = functools.partial(reference.after, bonus, states)
                assert paths_of(trees[slot]) == best_paths(after, steps, topk, nodes - 1), slot


def test_longer_chains_than_a_block_are_refused(make: Make, target: Path) -> None:
    drafter = make(KINDS["dflash"][0])
    most = drafter.info().limits
    most.num_steps, most.num_draft_tokens = 5, 6
    with pytest.raises(AttachRefused, match="proposes 4"), attached(drafter, target, limits=most):
        pass
