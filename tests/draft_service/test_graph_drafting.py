"""Steps of fixed shape, run operation by operation: the trees that the ordinary path gives,
whatever came before.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from draft_service.drafters.graph_drafting import GraphSettings
from draft_service.drafters.heads import HeadDrafter
from draft_service.drafters.paged import PagedDrafter
from draft_service.drafters.tree_answers import cut
from draft_service.drafters.tree_limits import TreeLimits
from foredraft.api.draft.v1 import draft_pb2
from foredraft.errors import InvalidRequest
from foredraft.transport import codec
from foredraft.transport.inline import InlineReader
from foredraft.transport.rows import RowFormat
from testing.draft_cases import SHAPES, limits_of
from testing.drafts import attach_request
from testing.head_verifier import Verifier, request_of, text
from testing.plan_attention import PlanAttention
from testing.sequence_lives import life


@contextmanager
def attached(
    drafter: PagedDrafter, target: Path, static: bool, max_batch: int = 8, **changes: Any
) -> Iterator[Verifier]:
    """A verifier's end; `static` chooses the path."""
    ordinary, drafter.attention = drafter.attention, PlanAttention()
    drafter.graphs = GraphSettings(max_batch, captures=False) if static else None
    is_head = isinstance(drafter, HeadDrafter)
    tokenizer = drafter.info().tokenizer_fingerprint
    changes = (
        changes if is_head else {"num_pages": 200, "tokenizer_fingerprint": tokenizer} | changes
    )
    request = request_of(target, **changes) if is_head else attach_request(**changes)
    proposer, _ = drafter.attach(request)
    width = 1
    if is_head:
        row = RowFormat.of(drafter.info().hidden)
        proposer.hidden, width = InlineReader(row), row.width
    proposer.prepare()
    verifier = Verifier(proposer, width)
    if not is_head:
        verifier.shift = 0
        verifier.add_hidden = lambda *_: None  # type: ignore[method-assign]
    yield verifier
    proposer.close()
    drafter.attention = ordinary


def trees_life(verifier: Verifier, shape: tuple[int, int, int], seed: int) -> list[Any]:
    """Prompts by chunks, and now and then more than a step of fixed shape takes."""
    return life(verifier, seed, 14, (2, 3, 9, 30), (1, 1, 2, shape[0] + 1, 7), lambda _rng: shape)


@pytest.mark.parametrize(
    "kind", ["eagle", "eagle3", "mtp", "standalone", "windowed", "reduced", "padded"]
)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ordering", ["topk", "coupled"])
def test_the_same_trees_as_step_by_step(
    kind: str, shape: str, ordering: str, drafters: dict[str, PagedDrafter], target: Path
) -> None:
    found = []
    for static in (False, True):
        options = {"draft_sampling": ordering, "limits": limits_of(SHAPES[shape])}
        with attached(drafters[kind], target, static, **options) as verifier:
            found.append(trees_life(verifier, SHAPES[shape], seed=len(kind)))
    assert any(found[0])
    assert found[0] == found[1]


def test_more_sequences_than_a_batch_holds(drafters: dict[str, PagedDrafter], target: Path) -> None:
    found = []
    for max_batch in (8, 2):
        options = {"limits": limits_of(SHAPES["tree"]), "max_batch": 8}
        with attached(drafters["eagle3"], target, True, **options) as verifier:
            if max_batch == 2:
                verifier.proposer._fixed_steps.graphs.max_batch = 2
            found.append(trees_life(verifier, SHAPES["tree"], seed=3))
    assert found[0] == found[1]


def test_smaller_wishes_are_cut_from_the_tree() -> None:
    # By value: 0:A 1:AC 2:ACF 3:B 4:AD 5:BE
    tokens, parents = [1, 3, 6, 2, 4, 5], [-1, 0, 1, -1, 0, 3]
    assert cut(tokens, parents, TreeLimits(3, 2, 6)) == (tokens, parents)
    assert cut(tokens, parents, TreeLimits(3, 1, 6)) == ([1, 3, 6], [-1, 0, 1])
    assert cut(tokens, parents, TreeLimits(3, 2, 4)) == ([1, 3, 6, 2], [-1, 0, 1, -1])
    assert cut(tokens, parents, TreeLimits(2, 2, 6)) == ([1, 3, 2, 4, 5], [-1, 0, -1, 0, 2])
    assert cut(tokens, parents, TreeLimits(1, 2, 1)) == ([1], [-1])


def test_smaller_wishes_are_trees_too(drafters: dict[str, PagedDrafter], target: Path) -> None:
    with attached(drafters["eagle3"], target, True, limits=limits_of((3, 3, 9))) as verifier:
        wishes = [(1, 1, 2), (2, 1, 3), (3, 2, 5), (3, 3, 4), (2, 3, 9)]
        trees = verifier.step(*(verifier.news(s, text(s, 4), w) for s, w in enumerate(wishes)))
        for slot, (steps, topk, size) in enumerate(wishes):
            tokens, parents = trees[slot]
            assert 1 <= len(tokens) < size
            depth: list[int] = []
            for index, parent in enumerate(parents):
                assert -1 <= parent < index
                depth.append(1 if parent < 0 else depth[parent] + 1)
            assert max(depth) <= steps
            assert max(parents.count(parent) for parent in set(parents)) <= topk


def test_many_pages_in_one_step(drafters: dict[str, PagedDrafter], target: Path) -> None:
    found = []
    for static in (False, True):
        with attached(
            drafters["eagle"], target, static, page_size=1, num_pages=2000, max_context=1000,
            limits=limits_of((2, 2, 4)),
        ) as verifier:  # fmt: skip
            pages = list(range(2000))
            random.Random(1).shuffle(pages)
            message = draft_pb2.SequenceStep(slot=3, tokens=text(1, 150), new_pages=pages[:900])
            message.begin.sampling.top_p = 1
            verifier.add_hidden(message, 0, 149)
            verifier.tokens[3], verifier.pages[3] = text(1, 150), pages[:900]
            verifier.step(message)
            more = draft_pb2.SequenceStep(slot=3, position=150, tokens=[7, 8], first_page=900)
            verifier.add_hidden(more, 149, 151)
            more.propose.CopyFrom(limits_of((2, 2, 4)))
            found.append(verifier.step(more))
    assert found[0] == found[1]
    assert found[0]


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_hidden_states_must_be_as_many_as_tokens(
    num_rows: int, drafters: dict[str, PagedDrafter], target: Path
) -> None:
    options = {"limits": limits_of(SHAPES["chain"])}
    with attached(drafters["eagle3"], target, True, **options) as verifier:
        verifier.step(verifier.news(0, [4, 5, 6]))
        message = verifier.news(0, [7, 8], SHAPES["chain"])
        rows = verifier.hidden(0)[2 : 2 + num_rows]
        message.ClearField("hidden")
        if num_rows:
            message.hidden.inline.CopyFrom(codec.encode(rows))
            message.hidden.num_rows = num_rows
        with pytest.raises(InvalidRequest, match="hidden"):
            verifier.step(message)
