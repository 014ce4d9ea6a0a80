"""Draft trees as plain data (torch-free): the tree itself, its check on arrival, its depths and paths. Masks live in `tree`."""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.types import NO_TOKEN

ROOT = -1  # as a parent: the root of the tree, or nothing before the root
NO_PARENT = -2  # parent of a node or row that is none


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Proposed continuations of a sequence, without the root (the newest token).

    Attributes:
        tokens: The token of node i.
        parents: The index of node i's parent, less than i; -1 for a child of the root.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the one before it."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def first(self, num_nodes: int) -> "DraftTree":
        """The tree of the first nodes; parents stand before their children, so it is whole."""
        if num_nodes >= len(self.tokens):
            return self
        return DraftTree(self.tokens[:num_nodes], self.parents[:num_nodes])

    def within(self, num_steps: int, topk: int) -> "DraftTree":
        """The tree without nodes deeper than `num_steps`, and without children beyond the first `topk` of a node."""
        tokens: list[int] = []
        parents: list[int] = []
        new_index = [-1]  # by row: the root's, then each node's, -2 when it was dropped
        depth, num_children = [0], [0]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            row = parent + 1
            depth.append(depth[row] + 1)
            num_children[row] += 1
            num_children.append(0)
            is_kept = new_index[row] != -2 and depth[-1] <= num_steps and num_children[row] <= topk
            new_index.append(len(tokens) if is_kept else -2)
            if is_kept:
                tokens.append(token)
                parents.append(new_index[row])
        return DraftTree(tuple(tokens), tuple(parents))


EMPTY = DraftTree()


def sanitize(
    tokens: Sequence[int], parents: Sequence[int], vocab_size: int, max_nodes: int
) -> tuple[DraftTree, int]:
    """A proposal from outside, without what cannot be verified.

    A node is dropped if its token is not in the vocabulary, its parent is not an earlier node or the root, or it lies
    beyond `max_nodes`; its descendants go with it. Nodes padded with the token -1 are dropped without being counted, and
    siblings with the same token become one node.

    Returns:
        The tree of the nodes that remain, and the number of nodes that were bad by themselves.
    """
    if _is_clean(tokens, parents, vocab_size, max_nodes):
        return DraftTree(tuple(tokens), tuple(parents)), 0
    kept_tokens: list[int] = []
    kept_parents: list[int] = []
    new_index: list[int] = []  # of each node seen so far, -2 when it was dropped
    known: dict[tuple[int, int], int] = {}
    num_bad = abs(len(tokens) - len(parents))
    for index, (token, parent) in enumerate(zip(tokens, parents, strict=False)):
        if not -1 <= parent < index or not NO_TOKEN <= token < vocab_size or index >= max_nodes:
            num_bad += 1
            new_index.append(-2)
            continue
        new_parent = -1 if parent == -1 else new_index[parent]
        if token == NO_TOKEN or new_parent == -2:
            new_index.append(-2)
            continue
        twin = known.setdefault((new_parent, token), len(kept_tokens))
        new_index.append(twin)
        if twin < len(kept_tokens):
            continue
        kept_tokens.append(int(token))
        kept_parents.append(new_parent)
    return DraftTree(tuple(kept_tokens), tuple(kept_parents)), num_bad


def _is_clean(
    tokens: Sequence[int], parents: Sequence[int], vocab_size: int, max_nodes: int
) -> bool:
    """Whether nothing has to be dropped: what nearly every proposal is, told without a loop in Python."""
    size = len(tokens)
    if not 0 < size == len(parents) <= max_nodes or min(tokens) < 0 or max(tokens) >= vocab_size:
        return False
    return parents == _parents_of_chain(size) or (
        min(parents) >= -1
        and all(map(operator.lt, parents, range(size)))
        and len(set(zip(parents, tokens, strict=True))) == size
    )


@functools.lru_cache(maxsize=64)
def _parents_of_chain(size: int) -> list[int]:
    return list(range(-1, size - 1))


def depths(parents: Sequence[int]) -> list[int]:
    """The depth of every node; the root's children have depth 1."""
    out: list[int] = []
    for parent in parents:
        out.append(1 if parent < 0 else out[parent] + 1)
    return out


def paths(tree: DraftTree) -> list[list[int]]:
    """For every row (row 0 is the root, row i + 1 is node i) the tokens from below the root down to the row's own."""
    out: list[list[int]] = [[]]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        out.append([*out[parent + 1], token])
    return out


def children(tree: DraftTree) -> list[dict[int, int]]:
    """For every row the rows of its children by token; of equal siblings the first."""
    out: list[dict[int, int]] = [{} for _ in range(len(tree) + 1)]
    for index, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        out[parent + 1].setdefault(token, index + 1)
    return out
