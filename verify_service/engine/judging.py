"""Judges proposals that no step verified, or only in part, by the tokens that came."""

from collections.abc import Callable, Sequence

from foredraft.trees.draft_tree import DraftTree

Judge = Callable[[DraftTree, Sequence[int]], tuple[int, list[int]]]
"""Determines the outcome of a tree that is not verified; see `known_outcome`."""


def known_outcome(tree: DraftTree, tokens: Sequence[int]) -> tuple[int, list[int]]:
    """Judges a tree by the tokens that followed its root.

    Returns:
        The number of leading nodes that can be judged, and the nodes that were right.
    """
    right = tree.follow(tokens)
    if len(right) < len(tokens):
        return len(tree), right
    last = right[-1] if right else -1
    num_known = next((i for i, parent in enumerate(tree.parents) if parent == last), len(tree))
    return num_known, right
