"""The step after a forward on an NVIDIA GPU: the rule, the check of proposals, the walk, the move of KV. All can be captured."""

from dataclasses import dataclass
from typing import Protocol

import torch

_BLOCK = 1024  # tokens that a program looks at together
_MAX_PARTS = 128
_PROGRAMS = 512  # enough to keep a GPU busy


class PagedData(Protocol):
    """What `commit_paths` reads of `kvcache.PagedKV`."""

    data: torch.Tensor  # [layers, planes, slots, head_dim]
    page_size: int


@dataclass(slots=True)
class CheckedTrees:
    """Draft trees of B sequences with R rows each that passed the check; row 0 is the root.

    Attributes:
        tokens: int32 [B, R], all in the vocabulary.
        parents: int32 [B, R], parent rows; -1 for the root, -2 for a row that stands for nothing.
        depths: int32 [B, R]; 0 for the root and for rows that stand for nothing.
        positions: int64 [B, R].
        mask: uint8 [B * R, R]: a row's ancestors and itself; itself alone where it stands for nothing.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor


def choose_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """As `sampling.choose` for rows without top-k, top-p and min-p, in one pass.

    Args:
        logits: float32, bfloat16 or float16 [R, V], the last dimension contiguous.
        temperature: float32 [R].
        seed: int64 [R].
        position: int64 [R].

    Returns:
        int64 [R].
    """
    from foredraft.speculation import sampling_kernels

    num_rows, vocab = logits.shape
    blocks = -(-vocab // _BLOCK)
    parts = min(blocks, _MAX_PARTS, max(4, -(-_PROGRAMS // max(1, num_rows))))
    tiles = -(-blocks // parts)
    parts = -(-blocks // tiles)
    floats = torch.empty(3, num_rows, parts, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, parts, dtype=torch.int32, device=logits.device)
    chosen = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    sampling_kernels.choose_parts[(num_rows, parts)](
        logits, temperature, seed, position, floats[0], floats[1], floats[2], tokens,
        vocab, logits.stride(0),
        BLOCK=_BLOCK, TILES=tiles, NUM_PARTS=parts, num_warps=4,
    )  # fmt: skip
    sampling_kernels.choose_best[(num_rows,)](
        temperature, floats[0], floats[1], floats[2], tokens, chosen,
        NUM_PARTS=parts, BLOCK=_power_of_two(parts), num_warps=1,
    )  # fmt: skip
    return chosen


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """As `noise.gumbel`, within 2 ulp of max(1, |g|).

    Args:
        seeds: int64 [R].
        positions: int64 [R].
        tokens: int64 [C] or [R, C].

    Returns:
        float32 [R, C].
    """
    from foredraft.speculation import sampling_kernels

    num_rows, num_tokens = seeds.shape[0], tokens.shape[-1]
    out = torch.empty(num_rows, num_tokens, dtype=torch.float32, device=seeds.device)
    sampling_kernels.gumbel_rows[(num_rows, -(-num_tokens // _BLOCK))](
        seeds, positions, tokens, out, num_tokens, tokens.stride(0) if tokens.dim() > 1 else 0,
        BLOCK=_BLOCK,
    )  # fmt: skip
    return out


def check_trees(
    roots: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    committed: torch.Tensor,
    vocab_size: int,
) -> CheckedTrees:
    """What a draft proposed, without what cannot be verified; the draft's memory is read once.

    A node whose token is not in the vocabulary, or whose parent is neither an earlier node nor the root, stands for
    nothing, and so do its descendants. Of siblings with the same token, `walk_trees` takes the first.

    Args:
        roots: int32 [B], the newest tokens.
        tokens: int32 [B, N]; may be a strided view.
        parents: int32 [B, N], indexes of earlier nodes, -1 for the root's children; may be a strided view.
        committed: int32 [B], the roots' positions.
        vocab_size: Of the target.
    """
    from foredraft.speculation import tree_kernels

    batch, rows = tokens.shape[0], tokens.shape[1] + 1
    ints = torch.empty(3, batch, rows, dtype=torch.int32, device=tokens.device)
    positions = torch.empty(batch, rows, dtype=torch.int64, device=tokens.device)
    mask = torch.empty(batch * rows, rows, dtype=torch.uint8, device=tokens.device)
    tree_kernels.check[(batch,)](
        roots, tokens, parents, committed, ints[0], ints[1], ints[2], positions, mask,
        rows, vocab_size, tokens.stride(0), parents.stride(0),
        BLOCK=max(16, _power_of_two(rows)), ROUNDS=(rows - 1).bit_length(),
    )  # fmt: skip
    return CheckedTrees(ints[0], ints[1], ints[2], positions, mask)


def walk_trees(
    chosen: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `verification.walk`, for all sequences at once.

    Args:
        chosen: int64 [B, R], the rule's token at each row; may be a strided view, as the others.
        tokens: int32 [B, R], row 0 is the root.
        parents: int32 [B, R], parent rows, -1 for the root, -2 for a row that stands for nothing.

    Returns:
        int32 [B, R] the accepted rows from the root down, then -1; int32 [B] how many; int64 [B, R] the token chosen
        at each of them, then -1.
    """
    from foredraft.speculation import tree_kernels

    batch, rows = chosen.shape
    path = torch.empty(batch, rows, dtype=torch.int32, device=chosen.device)
    length = torch.empty(batch, dtype=torch.int32, device=chosen.device)
    emitted = torch.empty(batch, rows, dtype=torch.int64, device=chosen.device)
    tree_kernels.walk[(batch,)](
        chosen, tokens, parents, path, length, emitted, rows,
        chosen.stride(0), tokens.stride(0), parents.stride(0),
        BLOCK=_power_of_two(rows), num_warps=1,
    )  # fmt: skip
    return path, length, emitted


def commit_paths(
    kv: PagedData,
    page_tables: torch.Tensor,
    committed: torch.Tensor,
    path: torch.Tensor,
    length: torch.Tensor,
) -> None:
    """Moves the KV of accepted rows, in all layers, to follow the committed keys.

    Args:
        kv: The cache. Row r of a tree lies at key index committed + r, and path[i] goes to committed + i.
        page_tables: int32 [B, P].
        committed: int32 [B], keys before the tree.
        path: int32 [B, R], ascending from 0; of `walk_trees`.
        length: int32 [B].
    """
    from foredraft.speculation import tree_kernels

    num_layers, planes, num_slots, head_dim = kv.data.shape
    block_d = _power_of_two(head_dim)
    block_p = max(1, 2048 // block_d)
    num_planes = num_layers * planes
    tree_kernels.commit[(path.shape[0], -(-num_planes // block_p))](
        kv.data, page_tables, committed, path, length,
        num_planes, num_slots * head_dim, page_tables.stride(0), path.stride(0),
        HEAD_DIM=head_dim, BLOCK_D=block_d, PAGE_SIZE=kv.page_size, BLOCK_P=block_p,
    )  # fmt: skip


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
