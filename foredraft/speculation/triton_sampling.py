"""The sampling rule, the walk and what surrounds them on a GPU: shapes are fixed and nothing is read on the host.

A tree of R rows has its root in row 0; `parents` holds each row's parent row, which stands before it. A row whose ancestors
do not lead to the root stands for nothing. The kernels are imported on first use.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from foredraft.kernel_launch import power_of_two

ROOT, PAD = -1, -2  # as parents: of the root, and of rows that stand for nothing
_BLOCK = 1024  # tokens that a program looks at together
_MAX_PARTS = 128
_PROGRAMS = 1024  # enough to keep a GPU busy
_LEAST_TOP, _MAX_TOPS = 64, 2048  # tokens of a block whose best is looked at, and how many blocks


class PagedData(Protocol):
    """What `commit_paths` reads of `kvcache.PagedKV`."""

    data: torch.Tensor  # [layers, planes, slots, head_dim]
    page_size: int


def choose_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    *,
    num_parts: int | None = None,
) -> torch.Tensor:
    """As `sampling.choose`: in one pass for rows without top-k, top-p and min-p, in two more for those that have some.

    Args:
        logits: float32, bfloat16 or float16 [R, V], the last dimension contiguous.
        temperature: float32 [R].
        seed: int64 [R].
        position: int64 [R].
        top_k, top_p, min_p: Integers, float32 and float32 [R], as in `SamplingRows`; all three or none of them.
        num_parts: Programs of a row, each number of which compiles a kernel; by default as many as keep a GPU busy.

    Returns:
        int64 [R]; of equal scores the lowest token.
    """
    from foredraft.speculation import sampling_kernels

    num_rows, vocab = logits.shape
    blocks = -(-vocab // _BLOCK)
    wanted = num_parts or max(4, -(-_PROGRAMS // max(1, num_rows)))
    tiles = -(-blocks // min(blocks, _MAX_PARTS, wanted))
    parts = -(-blocks // tiles)
    floats = torch.empty(2, num_rows, parts, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, parts, dtype=torch.int32, device=logits.device)
    chosen = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    sampling_kernels.choose_parts[(num_rows, parts)](
        logits, temperature, seed, position, floats[0], floats[1], tokens,
        vocab, logits.stride(0),
        BLOCK=_BLOCK, TILES=tiles, NUM_PARTS=parts, num_warps=4,
    )  # fmt: skip
    sampling_kernels.choose_best[(num_rows,)](
        temperature, floats[0], floats[1], tokens, chosen,
        NUM_PARTS=parts, BLOCK=power_of_two(parts), num_warps=1,
    )  # fmt: skip
    if top_k is not None and top_p is not None and min_p is not None:
        _choose_filtered(logits, temperature, seed, position, top_k, top_p, min_p, chosen)
    return chosen


def _choose_filtered(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    chosen: torch.Tensor,
) -> None:
    """Overwrites `chosen` where rows have filters."""
    from foredraft.speculation import filter_kernels

    (num_rows, vocab), device = logits.shape, logits.device
    size = max(_LEAST_TOP, power_of_two(-(-vocab // _MAX_TOPS)))
    blocks, tops_of_program = -(-vocab // size), max(1, 1024 // size)
    tops = torch.empty(num_rows, blocks, dtype=torch.float32, device=device)
    asked = temperature, top_k, top_p, min_p
    filter_kernels.tops[(num_rows, -(-blocks // tops_of_program))](
        logits, *asked, tops, vocab, logits.stride(0), blocks, SIZE=size, COUNT=tops_of_program
    )
    bases, cuts = (torch.empty(num_rows, dtype=torch.float32, device=device) for _ in range(2))
    counts = torch.empty(num_rows, dtype=torch.int32, device=device)
    totals = torch.empty(num_rows, dtype=torch.int64, device=device)
    filter_kernels.bound[(num_rows,)](
        tops, *asked, bases, cuts, counts, totals, vocab, blocks,
        BLOCK=power_of_two(blocks), num_warps=4,
    )  # fmt: skip
    tiles = -(-vocab // _BLOCK)
    parts = min(tiles, _MAX_PARTS, max(4, -(-_PROGRAMS // max(1, num_rows))))
    tiles = -(-tiles // parts)
    ranks = torch.empty(num_rows, vocab, dtype=torch.int64, device=device)
    filter_kernels.collect[(num_rows, parts)](
        logits, *asked, bases, cuts, counts, totals, ranks, vocab, logits.stride(0), tiles,
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    turns = 8 + -(-(vocab - 1).bit_length() // 4)
    filter_kernels.choose_kept[(num_rows,)](
        logits, temperature, seed, position, top_k, top_p, min_p, bases, counts, totals, ranks, chosen,
        vocab, logits.stride(0), turns, BLOCK=4096, SHORT=1024, num_warps=16,
    )  # fmt: skip


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


def walk_trees(
    chosen: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follows the rule from the roots, as `verification.walk` does.

    Args:
        chosen: int64 [B, R], the token that the rule gives at each row.
        tokens: int32 [B, R], each row's own; the root first.
        parents: int32 [B, R], parent rows, ROOT or PAD.

    Returns:
        int32 [B, R] accepted rows, then -1; int32 [B] how many; int64 [B, R] the token emitted at each, then -1.
    """
    from foredraft.speculation import tree_kernels

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
        path, length: Of `walk_trees`.
    """
    from foredraft.speculation import tree_kernels

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
    """What a forward over trees of fixed shape reads.

    Attributes:
        tokens: int64 [B * R], inside the vocabulary.
        positions: int64 [B * R].
        slots: int64 [B * R].
        mask: uint8 [B * R, R]: which of its tree's rows each row sees.
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
    """Checks what a draft sent and derives everything else from it.

    Args:
        tokens, parents: int32 [B, R], as in `walk_trees`. A token out of range reads another's embedding and, as the walk
            compares what was sent, can never be accepted.
        committed: int32 [B], keys before the tree; may be strided.
        num_rows: int32 [B], rows that exist, with the same stride; the others write to `no_slot`.
        page_tables: int32 [B, P].
    """
    from foredraft.speculation import tree_kernels

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
