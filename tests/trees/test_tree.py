"""Draft trees as data: what arrives from outside is checked, depths, paths and masks are
derived.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.runner.batch import ancestor_mask
from foredraft.trees.draft_tree import EMPTY, DraftTree, children, depths, paths, sanitize

# A worked example: nodes A B C E G with parents root root A B C.
EXAMPLE = DraftTree((65, 66, 67, 69, 71), (-1, -1, 0, 1, 2))


def test_worked_example() -> None:
    assert depths(EXAMPLE.parents) == [1, 1, 2, 2, 3]
    assert paths(EXAMPLE) == [[], [65], [66], [65, 67], [66, 69], [65, 67, 71]]
    assert children(EXAMPLE) == [{65: 1, 66: 2}, {67: 3}, {69: 4}, {71: 5}, {}, {}]
    assert ancestor_mask(EXAMPLE.parents).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ]
    assert ancestor_mask(EMPTY.parents).tolist() == [[True]]
    assert len(EXAMPLE) == 5


def test_sanitize_drops_bad_nodes_with_their_descendants() -> None:
    tree, num_bad = sanitize([5, 100, 6, 7, 8, 9], [-1, 0, 1, 0, 9, 3], 100, 10)
    assert tree == DraftTree((5, 7, 9), (-1, 0, 1))
    assert (
        num_bad == 2
    )  # token 100 and parent 9; the child of the first is dropped but not bad itself


def test_sanitize_drops_padding_silently() -> None:
    assert sanitize([5, -1, -1], [-1, -1, 1], 100, 10) == (DraftTree((5,), (-1,)), 0)


def test_sanitize_merges_equal_siblings() -> None:
    tree, num_bad = sanitize([5, 5, 6, 7], [-1, -1, 0, 1], 100, 10)
    assert tree == DraftTree((5, 6, 7), (-1, 0, 0))
    assert num_bad == 0


def test_sanitize_bounds_the_number_of_nodes() -> None:
    assert sanitize([1, 2, 3], [-1, 0, 1], 100, 2) == (DraftTree((1, 2), (-1, 0)), 1)
    assert sanitize([1, 2, 3], [-1, 0], 100, 5) == (DraftTree((1, 2), (-1, 0)), 1)


@given(
    st.lists(
        st.tuples(st.integers(-(2**40), 2**40) | st.integers(-2, 12), st.integers(-3, 9)),
        max_size=12,
    ),
    st.integers(0, 12),
)
def test_sanitized_trees_are_valid(nodes: list[tuple[int, int]], max_nodes: int) -> None:
    tree, num_bad = sanitize([t for t, _ in nodes], [p for _, p in nodes], 10, max_nodes)
    assert len(tree) <= min(max_nodes, len(nodes))
    assert all(0 <= token < 10 for token in tree.tokens)
    assert all(-1 <= parent < index for index, parent in enumerate(tree.parents))
    assert 0 <= num_bad <= len(nodes)
    siblings = list(zip(tree.parents, tree.tokens, strict=True))
    assert len(set(siblings)) == len(siblings)
    if not num_bad and all(token >= 0 for token, _ in nodes) and len(tree) == len(nodes):
        assert tree == DraftTree(tuple(t for t, _ in nodes), tuple(p for _, p in nodes))


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), max_size=14),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_a_tree_within_limits_has_the_first_children_of_each_node(
    raw: list[tuple[int, int]], num_steps: int, topk: int
) -> None:
    parents = [parent % (index + 1) - 1 for index, (_, parent) in enumerate(raw)]
    tree, _ = sanitize([token for token, _ in raw], parents, 10, 14)
    kept: list[int] = []
    for node, parent in enumerate(tree.parents):
        earlier = tree.parents[:node].count(parent)
        is_deep = depths(tree.parents)[node] > num_steps
        if (parent == -1 or parent in kept) and earlier < topk and not is_deep:
            kept.append(node)
    whole, cut = paths(tree), paths(tree.within(num_steps, topk))
    assert cut[1:] == [whole[node + 1] for node in kept]
    assert tree.within(14, 14) == tree


@given(st.lists(st.integers(0, 30), max_size=20))
def test_mask_agrees_with_depths_and_paths(raw: list[int]) -> None:
    parents = [value % (index + 1) - 1 for index, value in enumerate(raw)]
    mask = ancestor_mask(parents)
    assert (mask.sum(-1)[1:] - 1).tolist() == depths(parents)
    tree = DraftTree(tuple(range(len(parents))), tuple(parents))
    for row, path in enumerate(paths(tree)):
        assert torch.nonzero(mask[row, 1:])[:, 0].tolist() == sorted(path)
