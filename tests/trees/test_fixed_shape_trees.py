"""Trees of fixed shape against the trees of plain data."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.runner.batch import ancestor_mask
from foredraft.trees.draft_tree import NO_PARENT, ROOT, depths, sanitize
from testing import static_trees
from verify_service.executor.choice.verification import walk

VOCAB = 4


@st.composite
def proposals(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Tokens and parents as a draft may send them: wrong parents, padding, equal siblings."""
    size = draw(st.integers(0, 9))
    tokens = [draw(st.integers(0, VOCAB - 1)) for _ in range(size)]
    parents = [draw(st.integers(-1, size)) for _ in range(size)]
    return tokens, parents


def rows_of(parents: list[int], num_rows: int) -> list[int]:
    rows = [ROOT, *(parent + 1 for parent in parents)]
    return rows + [NO_PARENT] * (num_rows - len(rows))


@given(st.lists(proposals(), min_size=1, max_size=4), st.data())
def test_walk_and_masks_equal_those_of_the_checked_tree(batch, data):
    num_rows = 1 + max(len(tokens) for tokens, _ in batch) + 1
    parents = torch.tensor([rows_of(p, num_rows) for _, p in batch])
    tokens = torch.tensor([[0, *t] + [0] * (num_rows - 1 - len(t)) for t, _ in batch])
    chosen = torch.tensor(
        [[data.draw(st.integers(0, VOCAB - 1)) for _ in range(num_rows)] for _ in batch]
    )
    seen, depth = static_trees.ancestors(parents)
    lengths, path, emitted = static_trees.walk(chosen, tokens, parents, num_rows - 1)
    for i, (drafted, drafted_parents) in enumerate(batch):
        # Which of the rows the checked tree keeps, in its order; a twin is kept once.
        tree, _ = sanitize(drafted, drafted_parents, VOCAB, len(drafted))
        expected = walk_of_rows(drafted, drafted_parents, chosen[i].tolist())
        assert emitted[i, : lengths[i]].tolist() == expected
        assert (emitted[i, lengths[i] :] == -1).all()
        assert (path[i, lengths[i] :] == -1).all()
        if len(tree) == len(drafted):  # nothing was dropped: the same tree
            size = len(drafted) + 1
            assert torch.equal(seen[i, :size, :size], ancestor_mask(tree.parents))
            assert depth[i, :size].tolist() == [0, *depths(tree.parents)]
            assert path[i, : lengths[i]].tolist() == walk(tree, chosen[i].tolist()).path
    assert not seen.any(-1).logical_not().any()  # every row sees a key


def walk_of_rows(tokens: list[int], parents: list[int], chosen: list[int]) -> list[int]:
    """By brute force: the first child, in order, that has the chosen token."""
    row, emitted = 0, [chosen[0]]
    while True:
        children = [
            i + 1
            for i, (token, parent) in enumerate(zip(tokens, parents, strict=True))
            if parent + 1 == row and token == chosen[row] and parent < i
        ]
        if not children:
            return emitted
        row = children[0]
        emitted.append(chosen[row])


def test_a_chain_is_walked_to_its_end():
    parents = torch.tensor([[-1, 0, 1, 2]])
    tokens = torch.tensor([[9, 5, 6, 7]])
    lengths, path, emitted = static_trees.walk(torch.tensor([[5, 6, 7, 8]]), tokens, parents, 3)
    assert lengths.tolist() == [4]
    assert path.tolist() == [[0, 1, 2, 3]]
    assert emitted.tolist() == [[5, 6, 7, 8]]
