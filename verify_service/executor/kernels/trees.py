"""Draft trees on a GPU: inputs of a forward over them, the walk, and the commit of accepted KV.

A tree of R rows has its root in row 0; `parents` holds each row's parent row, which precedes it.
A row whose ancestors do not lead to the root is absent. The kernels are imported on first use.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from foredraft.kernel_launch import power_of_two


class PagedData(Protocol):
    """The attributes of `kvcache.PagedKV` that `commit_paths` reads."""

    data: torch.Tensor  # [layers, planes, slots, head_dim]
    page_size: int


def walk_trees(
    chosen: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walks trees from their roots, as `verification.walk` does.

    Args:
        chosen: int64 [B, R], the token that the rule gives at each row.
        tokens: int32 [B, R], each row's own; the root first.
        parents: int32 [B, R], parent rows, ROOT or NO_PARENT.

    Returns:
        int32 [B, R] accepted rows, then -1; int32 [B] how many; int64 [B, R] the token emitted at
        each, then -1.
    """
    from verify_service.executor.kernels import tree_kernels

    batch, rows = chosen.shape
    path = torch.empty((batch, rows), dtype=torch.int32, device=chosen.device)
    length = torch.empty((batch,), dtype=torch.int32, device=chosen.device)
    emitted = torch.empty((batch, rows), dtype=torch.int64, device=chosen.device)
    tree_kernels.walk[(batch,)](
        chosen, tokens, parents, path, length, emitted,
        chosen.stride(0), tokens.stride(0), parents.stride(0), rows,
        ROWS=power_of_two(rows), num_warps=1,
    )  # fmt: skip
    return path, length, emitted


def commit_paths(
    kv: PagedData,
    page_tables: torch.Tensor,
    committed: torch.Tensor,
    path: torch.Tensor,
    length: torch.Tensor,
) -> None:
    """Moves the KV of accepted rows to follow the committed keys, in all layers.

    Args:
        page_tables: int32 [B, P].
        committed: int32 [B]; row r of a tree lies at key index committed + r.
        path, length: Accepted rows and their number, as `walk_trees` returns them.
    """
    from verify_service.executor.kernels import tree_kernels

    num_layers, num_heads, _, head_dim = kv.data.shape
    block_d = max(16, power_of_two(head_dim))
    block_h = max(1, min(power_of_two(num_heads), 2048 // block_d))
    grid = (path.shape[0], num_layers, -(-num_heads // block_h))
    tree_kernels.commit[grid](
        kv.data, page_tables, committed, path, length,
        kv.data.stride(0), kv.data.stride(1), page_tables.stride(0), path.shape[1], num_heads,
        PAGE_SIZE=kv.page_size, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_H=block_h,
    )  # fmt: skip


@dataclass(slots=True)
class TreeRows:
    """Inputs of a forward over trees of fixed shape.

    Attributes:
        tokens: int64 [B * R], tokens inside the vocabulary.
        positions: int64 [B * R].
        slots: int64 [B * R].
        mask: uint8 [B * R, R]: rows of its tree that each row sees.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor


def prepare_trees(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    committed: torch.Tensor,
    num_rows: torch.Tensor,
    page_tables: torch.Tensor,
    page_size: int,
    vocab_size: int,
    no_slot: int,
) -> TreeRows:
    """Checks a draft's trees and derives all other inputs of the forward.

    Args:
        tokens, parents: int32 [B, R], as in `walk_trees`. A token out of range reads another
            token's embedding, and can never be accepted, since the walk compares the original
            token.
        committed: int32 [B], keys before the tree; may be strided.
        num_rows: int32 [B], number of existing rows, with the same stride; the others write to
            `no_slot`.
        page_tables: int32 [B, P].
    """
    from verify_service.executor.kernels import tree_kernels

    batch, rows = tokens.shape
    made = torch.empty((3, batch * rows), dtype=torch.int64, device=tokens.device)
    mask = torch.empty((batch * rows, rows), dtype=torch.uint8, device=tokens.device)
    padded = max(16, power_of_two(rows))
    tree_kernels.prepare[(batch,)](
        tokens, parents, committed, num_rows, page_tables, made[0], made[1], made[2], mask,
        tokens.stride(0), parents.stride(0), committed.stride(0), page_tables.stride(0),
        rows, vocab_size, no_slot,
        PAGE_SIZE=page_size, ROWS=padded, ROUNDS=math.ceil(math.log2(padded)),
    )  # fmt: skip
    return TreeRows(made[0], made[1], made[2], mask)
