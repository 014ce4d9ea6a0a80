"""Triton kernel that lists the segments of a step's sequences, so that programs share them evenly."""

# mypy: ignore-errors
import triton
import triton.language as tl

from foredraft.attention.exact_tile_kernels import segment_of, start_of

FIELDS = 8  # numbers of a record


@triton.jit(
    do_not_specialize=["records", "num_records", "first_rows", "nums_rows", "prefix_lens", "num_sequences", "limit"]
)  # fmt: skip
def list_segments(
    records, num_records, first_rows, nums_rows, prefix_lens, positions, num_sequences, limit,
    BLOCK: tl.constexpr, BRANCHED: tl.constexpr, FIELDS: tl.constexpr, TILE: tl.constexpr, NEAR: tl.constexpr,
    SMALL: tl.constexpr, LARGE: tl.constexpr,
):  # fmt: skip
    """Writes a record for each segment of keys, large segments first.

    A record holds sequence, segment, its first key, number of the sequence's keys, tiles of the
    segment, and the sequence's first row, rows and keys before them. Of a tree with branches only
    the whole tiles before the tree count.

    Args:
        records: int32 [n, FIELDS], written.
        num_records: int32 [1], written.
        limit: Number of keys up to which a sequence has no records.
        BLOCK: Number of sequences, rounded up to a power of two.
        BRANCHED: Whether there may be trees with branches.
    """
    sequence = tl.arange(0, BLOCK)
    is_there = sequence < num_sequences
    num_rows = tl.load(nums_rows + sequence, mask=is_there, other=0)
    first_row = tl.load(first_rows + sequence, mask=is_there, other=0)
    prefix_len = tl.load(prefix_lens + sequence, mask=is_there, other=0)
    end = prefix_len + num_rows
    if BRANCHED:  # see `has_branches`
        last = tl.load(positions + first_row + num_rows - 1, mask=num_rows > 0, other=0).to(
            tl.int32
        )
        end = tl.where(last - prefix_len != num_rows - 1, prefix_len // TILE * TILE, end)
    end = tl.where((num_rows > 0) & (prefix_len + num_rows > limit), end, 0)
    num_segments = tl.where(end > 0, segment_of(end - 1, NEAR, SMALL, LARGE) + 1, 0)
    MOST_SMALL: tl.constexpr = NEAR // SMALL
    num_large = tl.maximum(num_segments - MOST_SMALL, 0)
    num_small = num_segments - num_large
    first_large = tl.cumsum(num_large, 0) - num_large
    first_small = tl.sum(num_large, 0) + tl.cumsum(num_small, 0) - num_small
    if tl.program_id(0) == 0:
        tl.store(num_records, tl.sum(num_segments, 0))
    for segment in range(tl.program_id(0), tl.max(num_segments, 0), tl.num_programs(0)):
        place = tl.where(
            segment < MOST_SMALL, first_small + segment, first_large + segment - MOST_SMALL
        )
        begin = start_of(segment, NEAR, SMALL, LARGE)
        stop = tl.minimum(start_of(segment + 1, NEAR, SMALL, LARGE), end)
        at = records + place * FIELDS
        is_one = segment < num_segments
        tl.store(at, sequence, mask=is_one)
        tl.store(at + 1, tl.full([BLOCK], 0, tl.int32) + segment, mask=is_one)
        tl.store(at + 2, tl.full([BLOCK], 0, tl.int32) + begin, mask=is_one)
        tl.store(at + 3, end, mask=is_one)
        tl.store(at + 4, tl.cdiv(stop - begin, TILE), mask=is_one)
        tl.store(at + 5, first_row, mask=is_one)
        tl.store(at + 6, num_rows, mask=is_one)
        tl.store(at + 7, prefix_len, mask=is_one)
