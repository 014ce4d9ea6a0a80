"""The sampling rule on a GPU: shapes are fixed and the host reads nothing.

The kernels are imported on first use.
"""

import torch

from foredraft.kernel_launch import power_of_two
from foredraft.sampling.rows import SamplingRows
from foredraft.types import NO_TOKEN

_BLOCK = 1024  # tokens that a program reads at a time
_PARTS = 32  # parts of a row that are searched side by side
_MAX_PARTS = 128
_PROGRAMS = 1024  # enough to keep a GPU busy
# Minimum block size and maximum number of blocks for the search of the best logits.
_LEAST_TOP, _MAX_TOPS = 64, 2048


def choose_tokens(
    logits: torch.Tensor,
    rows: SamplingRows,
) -> torch.Tensor:
    """Computes `sampling.choose`: one pass for rows without filters, two more where
    `rows.any_filtered`.

    Args:
        logits: float32, bfloat16 or float16 [R, V], the last dimension contiguous.
        rows: The parameters of each row; `top_k` may have any integer type.

    Returns:
        int64 [R]; of equal scores the lowest token, NO_TOKEN for a row in which a logit is NaN or
        plus infinity.
    """
    from foredraft.sampling import sampling_kernels

    num_rows, vocab = logits.shape
    blocks = -(-vocab // _BLOCK)
    # Whatever the number of rows: scores are rounded against the best of their part.
    tiles = -(-blocks // min(blocks, _PARTS))
    parts = -(-blocks // tiles)
    floats = torch.empty(2, num_rows, parts, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, parts, dtype=torch.int32, device=logits.device)
    chosen = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    sampling_kernels.choose_parts[(num_rows, parts)](
        logits, rows.temperature, rows.seed, rows.position, floats[0], floats[1], tokens,
        vocab, logits.stride(0),
        BLOCK=_BLOCK, TILES=tiles, NUM_PARTS=parts, NO_TOKEN=NO_TOKEN, num_warps=4,
    )  # fmt: skip
    sampling_kernels.choose_best[(num_rows,)](
        rows.temperature, floats[0], floats[1], tokens, chosen,
        NUM_PARTS=parts, BLOCK=power_of_two(parts), num_warps=1,
    )  # fmt: skip
    if rows.any_filtered:
        _choose_filtered(logits, rows, chosen)
    return chosen


def _choose_filtered(logits: torch.Tensor, rows: SamplingRows, chosen: torch.Tensor) -> None:
    """Overwrites `chosen` in rows that have filters."""
    from foredraft.sampling import filter_kernels

    (num_rows, vocab), device = logits.shape, logits.device
    size = max(_LEAST_TOP, power_of_two(-(-vocab // _MAX_TOPS)))
    blocks, tops_of_program = -(-vocab // size), max(1, 1024 // size)
    tops = torch.empty(num_rows, blocks, dtype=torch.float32, device=device)
    asked = rows.temperature, *rows.filters
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
        logits, rows.seed, rows.position, *asked, bases, counts, totals, ranks, chosen,
        vocab, logits.stride(0), turns, BLOCK=4096, SHORT=1024, num_warps=16,
    )  # fmt: skip


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Computes `noise.gumbel`, within 2 ulp of max(1, |g|).

    Args:
        seeds: int64 [R].
        positions: int64 [R].
        tokens: int64 [C] or [R, C].

    Returns:
        float32 [R, C].
    """
    from foredraft.sampling import sampling_kernels

    num_rows, num_tokens = seeds.shape[0], tokens.shape[-1]
    out = torch.empty(num_rows, num_tokens, dtype=torch.float32, device=seeds.device)
    sampling_kernels.gumbel_rows[(num_rows, -(-num_tokens // _BLOCK))](
        seeds, positions, tokens, out, num_tokens, tokens.stride(0) if tokens.dim() > 1 else 0,
        BLOCK=_BLOCK,
    )  # fmt: skip
    return out
