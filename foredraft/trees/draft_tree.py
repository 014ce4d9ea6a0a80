"""Draft trees as plain data (torch-free): trees, their check on arrival, their depths and paths.

`runner.batch.ancestor_mask` has the mask of a tree.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.types import NO_TOKEN

ROOT = -1  # value of a parent: the root of the tree, or nothing before the root
NO_PARENT = -2  # parent that marks an absent node or row


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
        """Whether each node follows the previous one."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def first(self, num_nodes: int) -> "DraftTree":
        """Returns the tree of the first nodes, which is whole: parents precede their children."""
        if num_nodes >= len(self.tokens):
            return self
        return DraftTree(self.tokens[:num_nodes], self.parents[:num_nodes])

    def within(self, num_steps: int, topk: int) -> "DraftTree":
        """Returns the tree without nodes deeper than `num_steps`, and with at most the first `topk`
        children of a node.
        """
        tokens: list[int] = []
        parents: list[int] = []
        new_index = [-1]  # of the root and of each node; NO_PARENT for dropped ones
        depth, num_children = [0], [0]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            row = parent + 1
            depth.append(depth[row] + 1)
            num_children[row] += 1
            num_children.append(0)
            is_kept = new_index[row] != NO_PARENT and depth[-1] <= num_steps
            is_kept = is_kept and num_children[row] <= topk
            new_index.append(len(tokens) if is_kept else NO_PARENT)
            if is_kept:
                tokens.append(token)
                parents.append(new_index[row])
        return DraftTree(tuple(tokens), tuple(parents))

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Returns the nodes of a path from the root on, as far as the tree has its tokens.

        Of equal siblings it takes the first.
        """
        below, row, nodes = children(self), 0, []
        for token in tokens:
            found = below[row].get(token)
            if found is None:
                break
            row = found
            nodes.append(row - 1)
        return nodes

    def below(self, node: int) -> "DraftTree":
        """Returns the tree below a node; -1 is the root."""
        tokens: list[int] = []
        parents: list[int] = []
        new_index = {node: -1}
        for index in range(node + 1, len(self)):
            parent = new_index.get(self.parents[index])
            if parent is not None:
                new_index[index] = len(tokens)
                tokens.append(self.tokens[index])
                parents.append(parent)
        return DraftTree(tuple(tokens), tuple(parents))


EMPTY = DraftTree()


def sanitize(
    tokens: Sequence[int], parents: Sequence[int], vocab_size: int, max_nodes: int
) -> tuple[DraftTree, int]:
    """Removes the nodes of a received proposal that cannot be verified.

    A node is dropped if its token is not in the vocabulary, its parent is not an earlier node or
    the root, or it lies beyond `max_nodes`; its descendants go with it. Nodes padded with the token
    -1 are dropped without being counted, and siblings with the same token become one node.

    Returns:
        The remaining tree, and the number of nodes that were invalid themselves.
    """
    if _is_clean(tokens, parents, vocab_size, max_nodes):
        return DraftTree(tuple(tokens), tuple(parents)), 0
    kept_tokens: list[int] = []
    kept_parents: list[int] = []
    new_index: list[int] = []  # of each node; NO_PARENT for dropped ones
    known: dict[tuple[int, int], int] = {}
    num_bad = abs(len(tokens) - len(parents))
    for index, (token, parent) in enumerate(zip(tokens, parents, strict=False)):
        if not -1 <= parent < index or not NO_TOKEN <= token < vocab_size or index >= max_nodes:
            num_bad += 1
            new_index.append(NO_PARENT)
            continue
        new_parent = -1 if parent == -1 else new_index[parent]
        if token == NO_TOKEN or new_parent == NO_PARENT:
            new_index.append(NO_PARENT)
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
    """Returns whether nothing has to be dropped.

    Nearly all proposals are clean, so this check runs no loop in Python.
    """
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
    """Returns the depth of every node; the root's children have depth 1."""
    out: list[int] = []
    for parent in parents:
        out.append(1 if parent < 0 else out[parent] + 1)
    return out


def paths(tree: DraftTree) -> list[list[int]]:
    """Returns, for every row, the tokens from below the root down to the row's own.

    Row 0 is the root, row i + 1 is node i.
    """
    out: list[list[int]] = [[]]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        out.append([*out[parent + 1], token])
    return out


def children(tree: DraftTree) -> list[dict[int, int]]:
    """Returns, for every row, the rows of its children by token; of equal siblings the first."""
    out: list[dict[int, int]] = [{} for _ in range(len(tree) + 1)]
    for index, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        out[parent + 1].setdefault(token, index + 1)
    return out
