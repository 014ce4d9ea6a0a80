"""Draft trees as the verifier's rows see them: the attention mask over a tree. The data itself lives in `draft_tree`."""

from collections.abc import Sequence

import torch

from foredraft.speculation.draft_tree import EMPTY, DraftTree, children, depths, paths, sanitize

__all__ = ["EMPTY", "DraftTree", "ancestor_mask", "children", "depths", "paths", "sanitize"]


def ancestor_mask(parents: Sequence[int]) -> torch.Tensor:
    """Which rows a row may attend to among the rows of its tree.

    Args:
        parents: Of every node, as in `DraftTree`.

    Returns:
        bool [n + 1, n + 1]: entry (i, j) says whether row j is row i or an ancestor of it. Row 0 is the root.
    """
    mask = torch.eye(len(parents) + 1, dtype=torch.bool)
    for index, parent in enumerate(parents):
        mask[index + 1] |= mask[parent + 1]
    return mask
