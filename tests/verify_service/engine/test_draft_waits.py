"""What a step's wait for its drafts is made of."""

from types import SimpleNamespace
from typing import Any

from foredraft.trees.draft_tree import DraftTree
from verify_service.controller.messages import NO_WAIT, Wait
from verify_service.drafts.drafts import Drafts
from verify_service.drafts.proposals import Drafted, Proposals
from verify_service.engine.draft_waits import wait_for_drafts

TREES = {7: Drafted(DraftTree((5,), (-1,)), 0)}


def draft(name: str, depth: int, is_free: bool = False) -> Any:
    return SimpleNamespace(
        name=name, depth=depth, capabilities=SimpleNamespace(is_free=is_free, layers=None)
    )


def slots(*nodes: int) -> list[Any]:
    return [
        SimpleNamespace(seq=SimpleNamespace(request_id=7 + i), max_tree_nodes=count)
        for i, count in enumerate(nodes)
    ]


def test_planning_counts_as_a_wait_too() -> None:
    found = wait_for_drafts(
        Drafts([draft("", 3)]), slots(2, 0, 5), Proposals(TREES, {0: 0.25}), 0.75, [4]
    )
    own = Wait(levels=3, sequences=2, seconds=0.75, lead=0.75, unread=4)
    assert found == own._replace(parts=((0, own),))


def test_no_more_levels_than_nodes() -> None:
    found = wait_for_drafts(
        Drafts([draft("", 3)]), slots(2, 1), Proposals(TREES, {0: 0.25}), 0.25, [0]
    )
    assert (found.levels, found.sequences) == (2, 2)


def test_who_has_nothing_to_offer_was_not_waited_for() -> None:
    model, ngrams = draft("", 3), draft("", 3, is_free=True)
    nothing = Proposals({}, {0: 0.25})
    assert wait_for_drafts(Drafts([model]), slots(2), nothing, 0.5, [0]) == NO_WAIT._replace(
        lead=0.5
    )
    assert wait_for_drafts(Drafts([ngrams]), slots(2), nothing, 0.5, [0]).levels == 1
    unasked = Proposals(TREES, {0: 0.25})
    assert wait_for_drafts(Drafts([model]), slots(0), unasked, 0.5, [0]).levels == 0


def test_each_of_several_drafts_has_its_part() -> None:
    drafts = Drafts([draft("a", 3), draft("b", 1)])
    drafts._proposers.update({7: 1, 8: 0, 9: 1})
    found = wait_for_drafts(
        drafts, slots(4, 4, 4), Proposals(TREES, {0: 0.25, 1: 0.5}), 0.5, [6, 2]
    )
    assert [(number, part.sequences, part.unread) for number, part in found.parts] == [
        (0, 1, 6),
        (1, 2, 2),
    ]
    assert (found.levels, found.sequences, found.unread, found.seconds) == (3, 3, 6, 0.5)
