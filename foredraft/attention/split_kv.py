"""Shares of equal size for attention's programs, so that a batch takes the time of all its keys and not of its longest context.

A layer reads 2 * KV heads * head dimension numbers for each key: 4 KiB in 16 bits for Llama-3.1-8B. So 32,768 keys, however they
are spread over sequences, are 128 MiB, or 30 us at the 4.49 TB/s of an H200, if enough programs read them side by side.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from foredraft.kernel_launch import power_of_two

COLUMNS = 16  # of a share; see `share_kernels`
LEAST_PAIRS = 64  # that the kernel is compiled for
# Shares of each KV head that are not used where all sequences are as long as each other: they must cost nothing then.
SPARE = 16


@dataclass(frozen=True, slots=True)
class Lengths:
    """Where the rows and keys of B sequences lie at each of some levels, which differ in the keys before and the positions alone.

    Attributes:
        first_row, num_rows, prefix_start: int32 [B], as in `TritonPlan`.
        prefix_len, write_index: int32 [levels, B].
        positions: int64 [levels, T], of the rows: of a sequence with a mask the first is at the lowest, those of others rise.
    """

    first_row: torch.Tensor
    num_rows: torch.Tensor
    prefix_start: torch.Tensor
    prefix_len: torch.Tensor
    write_index: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class Shares:
    """What the programs of one KV head read, each one share; made on the device, anew for every step.

    Attributes:
        shares: int32 [N, COLUMNS]; see `share_kernels`.
        pairs: int32 [pairs, 2], in how many shares each sequence's block of rows is, and the first of them.
        counters: int32 [N * KV heads], zeros: parts that are done.
        tiles: Tile sizes that the shares were made for.
        num_parts: Shares of which sums are kept at most; they come first.
        joins: Whether the program that is done last adds up the parts, instead of another kernel.
        chunk: Parts that are added up at a time.
    """

    shares: torch.Tensor
    pairs: torch.Tensor
    counters: torch.Tensor
    tiles: Mapping[str, int]
    num_parts: int
    joins: bool
    chunk: int


@dataclass(frozen=True, slots=True)
class Levels:
    """What differs between levels, see `Lengths`."""

    prefix_len: torch.Tensor
    write_index: torch.Tensor
    positions: torch.Tensor


@dataclass(slots=True)
class Balance:
    """That the device is to share out the keys of a forward, or of all levels of a draft before the first of them.

    Attributes:
        dtype: Of the queries.
        levels: None for a plan that is the only one.
        shares: What came of it: of each level, by window.
    """

    dtype: torch.dtype
    levels: Levels | None = None
    shares: dict[int | None, list[Shares]] = field(default_factory=dict)


def spare_shares(pairs: int, splits: int) -> int:
    """How many more shares than pairs there are.

    Args:
        pairs: Sequences times blocks of rows.
        splits: Parts of each pair if all are as long as each other.
    """
    return pairs * (splits - 1) if splits > 1 else min(pairs, SPARE)


def share_out(
    lengths: Lengths,
    *,
    max_rows: int,
    group: int,
    kv_heads: int,
    splits: int,
    tiles: Mapping[str, int],
    window: int | None,
    is_masked: bool,
) -> list[Shares]:
    """Cuts each level's keys into shares, in one kernel that reads all lengths from the device.

    A share is as short as there are enough of them, but no less than the mean pair's part. With `splits` of 1 nothing is cut while
    no pair is longer than 1.5 times the mean.

    Args:
        max_rows: No sequence has more rows.
        group: Query heads per KV head.
        splits: See `spare_shares`.
        tiles: Of the attention kernel.
        window: Of the layers that these shares are for.
        is_masked: Whether rows see the keys from prefix_len on by a mask; all are read then.
    """
    from foredraft.attention import split_kv_kernels

    row_blocks = -(-max_rows * group // tiles["BLOCK_M"])
    num_pairs = lengths.num_rows.shape[0] * row_blocks
    spare = spare_shares(num_pairs, splits)
    num_shares, device = num_pairs + spare, lengths.num_rows.device
    num_levels = len(lengths.write_index)
    shares, pairs, counters = (
        torch.empty(num_levels, *shape, dtype=torch.int32, device=device)
        for shape in ((num_shares, COLUMNS), (num_pairs, 2), (num_shares * kv_heads,))
    )
    split_kv_kernels.share_out[(num_levels,)](
        shares, pairs, counters, lengths.first_row, lengths.num_rows, lengths.prefix_start, lengths.prefix_len,
        lengths.write_index, lengths.positions,
        lengths.prefix_len.stride(0), lengths.write_index.stride(0), lengths.positions.stride(0),
        num_pairs, num_shares, spare, splits, window or 0, row_blocks, group, kv_heads, tiles["BLOCK_M"], tiles["BLOCK_N"],
        PAIRS=max(LEAST_PAIRS, power_of_two(num_pairs)), WINDOWED=window is not None, MASKED=is_masked, num_warps=4,
    )  # fmt: skip
    return [
        Shares(
            shares=shares[level],
            pairs=pairs[level],
            counters=counters[level],
            tiles=tiles,
            # A pair of p shares takes p - 1 spare ones.
            num_parts=min(num_shares, 2 * spare),
            joins=splits == 1,
            chunk=max(8, splits),
        )
        for level in range(num_levels)
    ]
