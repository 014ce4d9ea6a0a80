"""Work lists of split-KV attention: items of equal size, so that a batch takes the time of all its
keys and not of its longest context.

A layer reads 2 * KV heads * head dimension numbers for each key: 4 KiB in 16 bits for Llama-3.1-8B.
So 32,768 keys, however they are spread over sequences, are 128 MiB, or 30 us at the 4.49 TB/s of an
H200, if enough programs read them side by side.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from foredraft.kernel_launch import power_of_two

COLUMNS = 16  # int32 numbers in an item; `split_kv_kernels` names them
LEAST_PAIRS = 64  # fewer pairs are padded to this: the kernel is compiled for a power of two
# Additional items per KV head for uneven lengths. They stay unused, and must cost nothing, where
# all sequences have the same length.
SPARE = 16


@dataclass(frozen=True, slots=True)
class Lengths:
    """Locates the rows and keys of B sequences at each level of a draft.

    Levels differ only in the number of earlier keys and in the positions.

    Attributes:
        first_row, num_rows, prefix_start: int32 [B], as in `TritonPlan`.
        prefix_len, write_index: int32 [levels, B], as in `TritonPlan`.
        positions: int64 [levels, T], positions of the rows. The first row of a sequence with a mask
            has the sequence's lowest position; positions of causal rows rise.
    """

    first_row: torch.Tensor
    num_rows: torch.Tensor
    prefix_start: torch.Tensor
    prefix_len: torch.Tensor
    write_index: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class WorkList:
    """Assigns keys to the attention programs of one KV head: one item per program.

    The device builds a new list in every step.

    Attributes:
        items: int32 [N, COLUMNS], the list; `split_kv_kernels` names the columns.
        pairs: int32 [pairs, 2], for each block of a sequence's rows the number of its items, and
            the index of the first.
        counters: int32 [N * KV heads], numbers of finished parts, zero before the kernel.
        tiles: Tile sizes that the list was built for.
        num_parts: Maximum number of items whose partial sums are stored; these items come first.
        joins: Whether the program that finishes last adds up the parts, instead of another kernel.
        chunk: Number of parts that are added up at a time.
    """

    items: torch.Tensor
    pairs: torch.Tensor
    counters: torch.Tensor
    tiles: Mapping[str, int]
    num_parts: int
    joins: bool
    chunk: int


@dataclass(frozen=True, slots=True)
class Levels:
    """Holds the fields of `Lengths` that differ between levels, for all levels."""

    prefix_len: torch.Tensor
    write_index: torch.Tensor
    positions: torch.Tensor


@dataclass(slots=True)
class Balance:
    """Asks the device to build the work lists of a forward, or of all levels of a draft at once.

    Attributes:
        dtype: Type of the queries.
        levels: Lengths at every level of a draft; None where the plan is the only one.
        work_lists: The lists that were built, one for each level, by attention window.
    """

    dtype: torch.dtype
    levels: Levels | None = None
    work_lists: dict[int | None, list[WorkList]] = field(default_factory=dict)


def spare_items(pairs: int, splits: int) -> int:
    """Returns by how many the items of a work list may exceed its pairs.

    Args:
        pairs: Number of sequences times number of blocks of rows.
        splits: Number of parts that each pair is cut into if all have the same length.
    """
    return pairs * (splits - 1) if splits > 1 else min(pairs, SPARE)


def build_work_lists(
    lengths: Lengths,
    *,
    max_rows: int,
    group: int,
    kv_heads: int,
    splits: int,
    tiles: Mapping[str, int],
    window: int | None,
    is_masked: bool,
) -> list[WorkList]:
    """Builds the work list of each level, in one kernel that reads all lengths from the device.

    Items are as short as their number allows, but not shorter than a part of the mean pair. With
    `splits` of 1 nothing is cut while no pair is longer than 1.5 times the mean.

    Args:
        max_rows: Maximum number of rows of a sequence.
        group: Number of query heads per KV head.
        splits: Number of parts for even lengths, see `spare_items`.
        tiles: Tile sizes of the attention kernel.
        window: Attention window of the layers that read the lists; None for full attention.
        is_masked: Whether a mask selects the keys from prefix_len on; all of them are read then.
    """
    from foredraft.attention import split_kv_kernels

    row_blocks = -(-max_rows * group // tiles["BLOCK_M"])
    num_pairs = lengths.num_rows.shape[0] * row_blocks
    spare = spare_items(num_pairs, splits)
    num_items, device = num_pairs + spare, lengths.num_rows.device
    num_levels = len(lengths.write_index)
    items, pairs, counters = (
        torch.empty(num_levels, *shape, dtype=torch.int32, device=device)
        for shape in ((num_items, COLUMNS), (num_pairs, 2), (num_items * kv_heads,))
    )
    split_kv_kernels.build_work_lists[(num_levels,)](
        items, pairs, counters, lengths.first_row, lengths.num_rows, lengths.prefix_start, lengths.prefix_len,
        lengths.write_index, lengths.positions,
        lengths.prefix_len.stride(0), lengths.write_index.stride(0), lengths.positions.stride(0),
        num_pairs, num_items, spare, splits, window or 0, row_blocks, group, kv_heads, tiles["BLOCK_M"], tiles["BLOCK_N"],
        PAIRS=max(LEAST_PAIRS, power_of_two(num_pairs)), WINDOWED=window is not None, MASKED=is_masked, num_warps=4,
    )  # fmt: skip
    return [
        WorkList(
            items=items[level],
            pairs=pairs[level],
            counters=counters[level],
            tiles=tiles,
            # A pair of p items takes p - 1 spare ones.
            num_parts=min(num_items, 2 * spare),
            joins=splits == 1,
            chunk=max(8, splits),
        )
        for level in range(num_levels)
    ]
