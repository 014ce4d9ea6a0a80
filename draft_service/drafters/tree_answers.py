"""Writes the trees of a fixed-shape step into its answer, cut to what each sequence asked for."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from draft_service.drafters.tree_limits import TreeLimits
from foredraft.api.draft.v1 import draft_pb2


def add_trees(
    response: draft_pb2.StepResponse,
    trees: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]],
    slots: npt.NDArray[np.int64],
    wanted: Mapping[int, TreeLimits | None],
    whole: TreeLimits,
) -> None:
    """Adds trees to a response.

    Args:
        response: Response that the trees are added to.
        trees: Tokens and parents [B, N], see `DraftGraphs.trees`.
        slots: Slots of the sequences in the batch.
        wanted: Limits of the wanted trees by index of the sequence in the batch; None for a whole
            tree.
        whole: Limits of the largest trees.
    """
    tokens, parents = trees
    all_tokens, all_parents = tokens.tolist(), parents.tolist()
    sizes = np.count_nonzero(tokens >= 0, axis=1).tolist()
    add, slot_of = response.proposals.add, slots.tolist()
    for i, limit in wanted.items():
        size, own_tokens, own_parents = sizes[i], all_tokens[i], all_parents[i]
        if limit != whole and limit is not None:
            own_tokens, own_parents = cut(own_tokens[:size], own_parents, limit)
        elif size < len(own_tokens):
            own_tokens, own_parents = own_tokens[:size], own_parents[:size]
        if own_tokens:
            add(slot=slot_of[i], tokens=own_tokens, parents=own_parents)


def cut(
    tokens: Sequence[int], parents: Sequence[int], limits: TreeLimits
) -> tuple[list[int], list[int]]:
    """Cuts a tree to its first nodes within limits.

    Args:
        tokens: Tokens of the nodes, best first.
        parents: Parent of each node; -1 for the root.
        limits: Limits of what remains.

    Returns:
        Tokens and parents of the nodes that remain.
    """
    steps, topk, nodes = limits
    depth, num_children, new_index = {-1: 0}, {-1: 0}, {-1: -1}
    taken: list[int] = []
    for node, parent in enumerate(parents[: len(tokens)]):
        level = depth.get(parent, steps) + 1
        if level <= steps and num_children[parent] < topk and len(taken) < nodes:
            num_children[parent] += 1
            depth[node], num_children[node], new_index[node] = level, 0, len(taken)
            taken.append(node)
    return [tokens[node] for node in taken], [new_index[parents[node]] for node in taken]
