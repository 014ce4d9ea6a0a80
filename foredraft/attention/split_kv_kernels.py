"""Triton kernel that builds split-KV work lists on the device, where the lengths are."""

# mypy: ignore-errors
import triton
import triton.language as tl

# Columns of an item: the sequence and its block of rows, the keys [BEGIN, END) that the program
# reads, and how many items the keys of this block are cut into.
SEQUENCE = tl.constexpr(0)
BLOCK = tl.constexpr(1)
BEGIN = tl.constexpr(2)
END = tl.constexpr(3)
FIRST_ROW = tl.constexpr(4)
NUM_ROWS = tl.constexpr(5)
PREFIX_LEN = tl.constexpr(6)
PARTS = tl.constexpr(7)  # number of items of this block of rows; 0 marks an unused item
FIRST_PART = tl.constexpr(8)  # index of the first of these items; the others follow it
COLUMNS = tl.constexpr(16)  # the last ones are unused: an item fills one line of memory


@triton.jit(
    do_not_specialize=[
        "items", "pairs", "counters", "prefix_stride", "write_stride", "position_stride",
        "num_pairs", "num_items", "spare", "splits", "window", "row_blocks", "group", "kv_heads", "block_m", "block_n",
    ]
)  # fmt: skip
def build_work_lists(
    items, pairs, counters, first_rows, nums_rows, prefix_starts, prefix_lens, write_indexes, positions,
    prefix_stride, write_stride, position_stride,
    num_pairs, num_items, spare, splits, window, row_blocks, group, kv_heads, block_m, block_n,
    PAIRS: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Builds the work list of one level in one program; see `split_kv.WorkList`.

    The program searches for the shortest length of items whose number fits the list. A pair is a
    sequence and a block of its rows. Pairs of several items come first, so that the longest
    programs start first.
    """
    level = tl.program_id(0)
    items += level * num_items * COLUMNS
    pairs += level * num_pairs * 2
    counters += level * num_items * kv_heads
    prefix_lens += level * prefix_stride
    write_indexes += level * write_stride
    positions += level * position_stride
    pair = tl.arange(0, PAIRS)
    sequence, block = pair // row_blocks, pair % row_blocks
    num_rows = tl.load(nums_rows + sequence, mask=pair < num_pairs, other=0)
    is_active = block * block_m < num_rows * group
    first_row = tl.load(first_rows + sequence, mask=is_active, other=0)
    prefix_len = tl.load(prefix_lens + sequence, mask=is_active, other=0)
    begin = tl.load(prefix_starts + sequence, mask=is_active, other=0)
    if MASKED:
        end = tl.load(write_indexes + sequence, mask=is_active, other=0) + num_rows
    else:
        last_row = tl.minimum(num_rows - 1, (block * block_m + block_m - 1) // group)
        end = prefix_len + last_row + 1
    if WINDOWED:
        oldest_row = first_row
        if not MASKED:
            oldest_row += block * block_m // group
        position = tl.load(positions + oldest_row, mask=is_active, other=0).to(tl.int32)
        begin = tl.maximum(begin, position - window + 1)
        if MASKED:  # the tail may have any positions
            begin = tl.minimum(begin, prefix_len)
    tiles = tl.where(is_active, tl.maximum(tl.cdiv(end - begin, block_n), 1), 0)

    num_active = tl.sum(is_active.to(tl.int32), 0)
    limit = num_active + spare
    even = tl.cdiv(tl.sum(tiles, 0), tl.maximum(num_active * splits, 1))
    high = tl.maximum(tl.max(tiles, 0), 1)
    low = tl.minimum(tl.maximum(even, 1), high)
    if (splits == 1) & (2 * high <= 3 * even):  # nearly even: cutting is not worth adding up parts
        low = high
    while low < high:
        middle = (low + high) // 2
        fits = tl.sum(tl.cdiv(tiles, middle), 0) <= limit
        low, high = tl.where(fits, low, middle + 1), tl.where(fits, middle, high)
    parts = tl.cdiv(tiles, high)
    step = tl.cdiv(tiles, tl.maximum(parts, 1)) * block_n

    of_several = tl.where(parts > 1, parts, 0)
    alone = (parts == 1).to(tl.int32)
    num_of_several = tl.sum(of_several, 0)
    first = tl.where(
        parts > 1,
        tl.cumsum(of_several, 0) - of_several,
        num_of_several + tl.cumsum(alone, 0) - alone,
    )
    first = tl.where(parts > 0, first, 0)
    tl.store(pairs + 2 * pair, parts, mask=pair < num_pairs)
    tl.store(pairs + 2 * pair + 1, first, mask=pair < num_pairs)
    for part in range(0, tl.max(parts, 0)):
        here = part < parts
        item = items + (first + part) * COLUMNS
        part_begin = begin + part * step
        tl.store(item + SEQUENCE, sequence, mask=here)
        tl.store(item + BLOCK, block, mask=here)
        tl.store(item + BEGIN, part_begin, mask=here)
        tl.store(item + END, tl.minimum(part_begin + step, end), mask=here)
        tl.store(item + FIRST_ROW, first_row, mask=here)
        tl.store(item + NUM_ROWS, num_rows, mask=here)
        tl.store(item + PREFIX_LEN, prefix_len, mask=here)
        tl.store(item + PARTS, parts, mask=here)
        tl.store(item + FIRST_PART, first, mask=here)
    for unused in range(num_of_several + tl.sum(alone, 0), num_items, PAIRS):
        item = unused + pair
        tl.store(items + item * COLUMNS + PARTS, 0, mask=item < num_items)
    for counter in range(0, num_items * kv_heads, PAIRS):
        tl.store(counters + counter + pair, 0, mask=counter + pair < num_items * kv_heads)
