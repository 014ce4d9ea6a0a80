"""Draft trees as tensors of a fixed shape in plain torch, the reference of the kernels: their
masks, and the walk.

A tree of B sequences has R rows each: row 0 is the root, `parents` holds each row's parent row, -1
for the root and -2 for a row that stands for nothing. Rows whose ancestors do not lead to the root
stand for nothing either, so what a draft sent needs no other check than this one and the bounds of
its tokens.
"""

import torch


def ancestors(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns which rows each row may see, and its depth.

    Args:
        parents: int [B, R]; a row may only have an earlier row as its parent.

    Returns:
        bool [B, R, R], a row's ancestors and itself; for rows that stand for nothing themselves
        alone. int64 [B, R], 0 for the root and for rows that stand for nothing.
    """
    rows = parents.shape[1]
    index = torch.arange(rows, device=parents.device)
    is_parent = parents[:, :, None] == index
    is_parent = is_parent & (index[None, :] < index[:, None])  # never later rows
    own = torch.eye(rows, dtype=torch.bool, device=parents.device)
    # Doubling: after k rounds everything within 2^k steps is known.
    reach = (is_parent | own).to(torch.float32)
    for _ in range(max(1, (rows - 1).bit_length())):
        reach = (reach @ reach).clamp_max_(1.0)
    seen = reach > 0
    is_node = seen[:, :, 0]
    seen = (seen & is_node[:, :, None]) | own
    depth = torch.where(is_node, seen.sum(-1) - 1, 0)
    return seen, depth


def walk(
    chosen: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, max_depth: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follows the rule from the roots, as `verification.walk` does.

    Args:
        chosen: int64 [B, R], the token that the rule gives at each row.
        tokens: int [B, R], each row's own token.
        parents: int [B, R].
        max_depth: Maximum depth of the trees.

    Returns:
        int64 [B] accepted rows, the root included; int64 [B, max_depth + 1] these rows, then -1;
        int64 [B, max_depth + 1] the token emitted at each of them, then -1.
    """
    batch = len(chosen)
    index = torch.arange(chosen.shape[1], device=chosen.device)
    row = torch.zeros(batch, 1, dtype=torch.int64, device=chosen.device)
    alive = torch.ones(batch, 1, dtype=torch.bool, device=chosen.device)
    path, emitted = [row], [chosen.gather(1, row)]
    for _ in range(max_depth):
        is_child = (parents == row) & (tokens == chosen.gather(1, row)) & (index > row) & alive
        found, row = is_child.max(1, keepdim=True)  # the first of equal siblings
        alive = found
        path.append(torch.where(alive, row, -1))
        emitted.append(torch.where(alive, chosen.gather(1, row), -1))
    all_rows = torch.cat(path, 1)
    return (all_rows >= 0).sum(1), all_rows, torch.cat(emitted, 1)
