"""The kernel of attention whose result for a row depends on that row's own keys alone, in Triton; its
arithmetic is that of `exact_tile_kernels`.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from foredraft.attention.exact_tile_kernels import (
    add_scores,
    add_tile,
    empty,
    has_branches,
    is_start,
    load_query,
    load_sums,
    merge,
    merge_parts,
    segment_of,
    shared_before,
    start_of,
)
from foredraft.attention.page_kernels import load_pages, load_rows


@triton.jit
def add_tiles(
    q, k_ptr, v_ptr, table, scores, slots, pages, first, last, end, newest, oldest, sums, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr, TILE: tl.constexpr, NEAR: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the tiles from `first` to `last`, and computes each tile's scores beside the sums of the
    tile before.

    Args:
        scores: Scores of the tile at `first`; `slots` are its slots, `pages` those of the next.
        sums: Best, total and sum of the segment, and of all segments before.
        MASKED: Whether there may be keys that a row does not see.
    """
    best, total, acc, all_best, all_total, all_acc = sums
    for start in tl.range(first, last, TILE):
        if is_start(start, NEAR, SMALL, LARGE):
            all_best, all_total, all_acc = merge(all_best, all_total, all_acc, best, total, acc)
            best, total, acc = empty(BLOCK_M, BLOCK_D)
        keys = start + tl.arange(0, TILE)
        later = keys + TILE
        later_slots = pages.to(tl.int64) * PAGE_SIZE + later % PAGE_SIZE
        pages = load_pages(table, later + TILE, end, PAGE_SIZE)
        v = load_rows(v_ptr, slots, keys < end, HEAD_DIM, BLOCK_D, MASKED)
        k = load_rows(k_ptr, later_slots, later < end, HEAD_DIM, BLOCK_D, MASKED)
        later_scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        if MASKED:
            seen = (keys[None, :] <= newest[:, None]) & (keys[None, :] >= oldest[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        best, total, acc = add_scores(scores, q, v, best, total, acc, scale, TILE, PRECISION)
        scores, slots = later_scores, later_slots
    return scores, slots, pages, (best, total, acc, all_best, all_total, all_acc)


@triton.jit
def add_paths(
    q, k_ptr, v_ptr, leaf_ends, leaf_slots, first_row, prefix_len, table, start, last_position, row_leaf, begin_leaf, end_leaf,
    newest, oldest, best, total, acc, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    OWN: tl.constexpr, GRAIN: tl.constexpr, HAS_ROOM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds one tile of positions from `start` on to each row of a tree, under the row's own path.

    The matrix units add GRAIN keys at a time, one group after the other, and a group of zeros
    changes nothing. So rows share the groups before the tree. Behind them stand OWN columns: for
    each of some leaves the groups of this tile that hold keys of its path, which the rows on this
    path share. Each key is in the same place of the same group as in plain decoding, and all groups
    of a row are in order.

    Args:
        table: Page table of the sequence.
        last_position: Largest position of the block's rows, included.
        row_leaf: Place of each row's leaf; `begin_leaf` to `end_leaf` are all of them.
        newest: Position of each row.
        HAS_ROOM: Whether shared memory holds all four tiles at once, see `device_limits.has_room`.
    """
    stop = tl.minimum(start + TILE, last_position + 1)
    own_start = tl.maximum(start, prefix_len // GRAIN * GRAIN)
    # Columns of a row: a power of two of groups.
    width = tl.where(
        stop - own_start <= GRAIN, GRAIN, tl.where(stop - own_start <= 2 * GRAIN, 2 * GRAIN, TILE)
    )
    step = OWN // width
    keys = start + tl.arange(0, TILE)
    is_shared = keys < own_start
    pages = load_pages(table, keys, own_start, PAGE_SIZE)
    key_slots = pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
    column = tl.arange(0, OWN)
    first_tail = prefix_len // TILE * TILE
    ones = tl.full([TILE, 16], 1.0, q.dtype)
    own_ones = tl.full([OWN, 16], 1.0, q.dtype)
    for first in tl.range(begin_leaf, end_leaf, step, num_stages=1):
        leaf = first + column // width
        place = own_start + column % width
        at = (first_row + leaf).to(tl.int64)
        last = tl.load(leaf_ends + at, mask=leaf < end_leaf, other=-1)
        is_there = (place <= last) & (place < stop)
        slots = tl.load(
            leaf_slots + at * (TILES * TILE) + place - first_tail, mask=is_there, other=0
        ).to(tl.int64)
        k = load_rows(k_ptr, key_slots, is_shared, HEAD_DIM, BLOCK_D)
        if HAS_ROOM:  # else each is loaded when it is needed
            own_k = load_rows(k_ptr, slots, is_there, HEAD_DIM, BLOCK_D)
            v = load_rows(v_ptr, key_slots, is_shared, HEAD_DIM, BLOCK_D)
            own_v = load_rows(v_ptr, slots, is_there, HEAD_DIM, BLOCK_D)
        is_now = (row_leaf >= first) & (row_leaf < first + step)
        seen = is_now[:, None] & is_shared[None, :] & (keys[None, :] >= oldest[:, None])
        own_seen = (
            (leaf[None, :] == row_leaf[:, None])
            & is_there[None, :]
            & (place[None, :] <= newest[:, None])
            & (place[None, :] >= oldest[:, None])
        )
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        scores = tl.where(seen, scores, float("-inf"))
        if not HAS_ROOM:
            own_k = load_rows(k_ptr, slots, is_there, HEAD_DIM, BLOCK_D)
        own_scores = tl.dot(q, tl.trans(own_k.to(q.dtype)), input_precision=PRECISION)
        own_scores = tl.where(own_seen, own_scores, float("-inf"))
        highest = tl.maximum(tl.max(scores, 1), tl.max(own_scores, 1))
        new_best = tl.maximum(best, highest * scale)
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(tl.fma(scores, scale, -base[:, None])).to(q.dtype)
        own_weights = tl.exp2(tl.fma(own_scores, scale, -base[:, None])).to(q.dtype)
        shrink = tl.exp2(best - base)
        sums = tl.dot(weights, ones, input_precision=PRECISION)
        sums = tl.max(tl.dot(own_weights, own_ones, sums, input_precision=PRECISION), 1)
        if not HAS_ROOM:
            v = load_rows(v_ptr, key_slots, is_shared, HEAD_DIM, BLOCK_D)
        acc = tl.dot(weights, v.to(q.dtype), acc * shrink[:, None], input_precision=PRECISION)
        if not HAS_ROOM:
            own_v = load_rows(v_ptr, slots, is_there, HEAD_DIM, BLOCK_D)
        acc = tl.dot(own_weights, own_v.to(q.dtype), acc, input_precision=PRECISION)
        total = tl.fma(total, shrink, sums)
        best = new_best
    return best, total, acc


# Numbers of sequences and pages, and alignments, must not select kernel variants: compiling one
# delays a step by a second.
@triton.jit(
    do_not_specialize=[
        "first_rows", "nums_rows", "prefix_lens", "table_stride", "row_blocks", "num_splits", "num_slots", "blocks",
        "part_best", "part_total", "window", "limit", "row_leaves", "leaf_ends", "leaf_slots", "shared_keys", "row_index",
    ]
)  # fmt: skip
def attend(
    q_ptr, k_ptr, v_ptr, out_ptr, part_acc, part_best, part_total,
    tables, row_leaves, leaf_ends, leaf_slots, first_rows, nums_rows, prefix_lens, positions, shared_keys,
    scale, v_scale, window, kv_head_stride, q_row_stride, q_head_stride, num_slots, limit,
    blocks, row_blocks, row_index, table_stride, num_splits,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, TOGETHER: tl.constexpr, WINDOWED: tl.constexpr,
    BRANCHED: tl.constexpr, LISTED: tl.constexpr, EIGHT_BIT: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr, OWN: tl.constexpr, GRAIN: tl.constexpr, LEAF_ROWS: tl.constexpr, HAS_ROOM: tl.constexpr,
    AT_ONCE: tl.constexpr, NEAR: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr, SHARED: tl.constexpr, BEHIND: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes attention of one block of a sequence's rows under one KV head.

    Row m of a block is row m // GROUP of the sequence under query head m % GROUP of the group.
    `ExactAttention.attend` launches it in these forms:

    - Without SPLIT one program computes all segments of a sequence, and writes `out_ptr`. If there
      is a `limit`, longer sequences are left to a `SegmentKernel`.
    - With SPLIT `num_splits` programs compute every `num_splits`th segment each, and write sums to
      `part_*`, which `fold` merges. With TOGETHER too, the first of them computes a sequence of at
      most `limit` keys whole.
    - SHARED, before one of the others: only keys that several sequences share. Such a group is the
      "sequence" then: its rows stand in `row_index`, and each sees all of its `prefix_lens` keys.
      The launch after it has BEHIND: it goes on from there, and `limit` counts only keys after
      those.

    Where segments of a tree with branches are distributed, this kernel computes the tiles before
    the tree, and `fold` all else.

    Args:
        row_leaves, leaf_ends, leaf_slots: What `find_paths` has written.
        TOGETHER: Whether one program may compute a sequence whole.
        BRANCHED: Whether there may be trees with branches.
        LISTED: Whether `blocks` says each program's sequence and block.
        TILES, OWN, GRAIN, LEAF_ROWS, HAS_ROOM: See `find_paths` and `add_paths`.
        AT_ONCE: See `merge_parts`.
    """
    kv_head = tl.program_id(1)
    if LISTED:
        sequence = tl.load(blocks + tl.program_id(0))
        block = tl.load(blocks + tl.num_programs(0) + tl.program_id(0))
    else:
        sequence = tl.program_id(0) // row_blocks
        block = row_blocks - 1 - tl.program_id(0) % row_blocks  # the longest first
    num_rows = tl.load(nums_rows + sequence)
    first_row = tl.load(first_rows + sequence)
    prefix_len = tl.load(prefix_lens + sequence)
    behind = 0
    if BEHIND:
        behind = shared_before(shared_keys + sequence, num_slots, NEAR, SMALL, LARGE)
    if SPLIT and TOGETHER:
        together = prefix_len + num_rows - behind <= limit
        if together & (tl.program_id(2) > 0):
            return
    idle = block * BLOCK_M >= num_rows * GROUP
    if not SPLIT:
        idle = idle | ((limit > 0) & (prefix_len + num_rows > limit))
    folded = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row = folded // GROUP
    is_row = row < num_rows
    head = kv_head * GROUP + folded % GROUP
    token = (first_row + row).to(tl.int64)
    if SHARED:
        token = tl.load(row_index + token, mask=is_row, other=0).to(tl.int64)
    newest = prefix_len + row
    last_row = tl.minimum(num_rows - 1, (block * BLOCK_M + BLOCK_M - 1) // GROUP)
    begin, end = behind, prefix_len + last_row + 1
    if SHARED:
        end = tl.minimum(prefix_len, start_of(num_slots, NEAR, SMALL, LARGE))
    branched = False
    if BRANCHED:
        branched = has_branches(positions, first_row, num_rows, prefix_len)
        if branched:
            end = prefix_len // TILE * TILE
    oldest = tl.zeros([BLOCK_M], tl.int32)
    if WINDOWED:
        oldest = tl.load(positions + token, mask=is_row, other=0x3FFFFFFF).to(tl.int32) - window + 1
        begin = tl.maximum(tl.min(oldest, 0), 0) // TILE * TILE
    first, first_segment = begin, 0
    if SPLIT:
        first_segment = segment_of(begin, NEAR, SMALL, LARGE) + tl.program_id(2)
        if SHARED:  # the longest first
            first_segment = num_splits - 1 - tl.program_id(2)
        is_beyond = start_of(first_segment, NEAR, SMALL, LARGE) >= end
        if TOGETHER:
            is_beyond = is_beyond & (not together)
        idle = idle | is_beyond
        first = tl.maximum(start_of(first_segment, NEAR, SMALL, LARGE), begin)
    table = tables + sequence.to(tl.int64) * table_stride
    pages = load_pages(table, first + tl.arange(0, TILE), end, PAGE_SIZE)
    if DEPENDENT:  # all so far is older than the kernel before, which has waited for it itself
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if idle:
        return

    dims = tl.arange(0, BLOCK_D)
    wanted = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = token[:, None] * q_row_stride + head[:, None] * q_head_stride + dims[None, :]
    q = load_query(q_ptr, offsets, wanted, EIGHT_BIT)
    k_ptr += kv_head.to(tl.int64) * kv_head_stride
    v_ptr += kv_head.to(tl.int64) * kv_head_stride
    line = token * (KV_HEADS * GROUP) + head

    if SPLIT:
        is_apart = True
        if TOGETHER:
            is_apart = not together
        if is_apart:
            end_segment = segment_of(end - 1, NEAR, SMALL, LARGE) + 1
            num_tiles = 0
            for segment in range(first_segment, end_segment, num_splits):
                segment_end = tl.minimum(start_of(segment + 1, NEAR, SMALL, LARGE), end)
                segment_begin = tl.maximum(start_of(segment, NEAR, SMALL, LARGE), begin)
                num_tiles += tl.cdiv(segment_end - segment_begin, TILE)
            best, total, acc = empty(BLOCK_M, BLOCK_D)
            if BEHIND:  # the first segment's first tiles may be shared ones
                part = line * num_slots + first_segment
                goes_on = is_row & (start_of(first_segment, NEAR, SMALL, LARGE) < behind)
                best, total, acc = load_sums(
                    part_best, part_total, part_acc, part, goes_on, HEAD_DIM, BLOCK_D
                )
            segment, start = first_segment, first
            last = tl.minimum(start_of(segment + 1, NEAR, SMALL, LARGE), end)
            # One loop over the tiles of all segments, so that loads go on from one to the next.
            for _ in tl.range(0, num_tiles):
                keys = start + tl.arange(0, TILE)
                seen = (keys[None, :] <= newest[:, None]) & (keys[None, :] >= oldest[:, None])
                slots = pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
                in_segment = keys < last
                is_end = start + TILE >= last
                next_segment = segment + tl.where(is_end, num_splits, 0)
                start = tl.where(is_end, start_of(next_segment, NEAR, SMALL, LARGE), start + TILE)
                last = tl.minimum(start_of(next_segment + 1, NEAR, SMALL, LARGE), end)
                # Pages of keys are loaded one tile ahead: the compiler then keeps its stages for
                # keys and values.
                pages = load_pages(table, start + tl.arange(0, TILE), last, PAGE_SIZE)
                k = load_rows(k_ptr, slots, in_segment, HEAD_DIM, BLOCK_D)
                v = load_rows(v_ptr, slots, in_segment, HEAD_DIM, BLOCK_D)
                best, total, acc = add_tile(q, k, v, seen, best, total, acc, scale, TILE, PRECISION)
                if is_end:
                    # Computed late: it would take registers while tiles are added.
                    part = line * num_slots + segment
                    tl.store(part_best + part, best, mask=is_row)
                    tl.store(part_total + part, total, mask=is_row)
                    tl.store(part_acc + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=wanted)
                    best, total, acc = empty(BLOCK_M, BLOCK_D)
                segment = next_segment
            return
    if TOGETHER:
        best, total, acc = empty(BLOCK_M, BLOCK_D)
        all_best, all_total, all_acc = empty(BLOCK_M, BLOCK_D)
        if BEHIND:
            part = line * num_slots
            last_shared = segment_of(tl.maximum(behind - 1, 0), NEAR, SMALL, LARGE)
            all_best, all_total, all_acc = merge_parts(
                part_best, part_total, part_acc, part, last_shared, is_row,
                BLOCK_M, HEAD_DIM, BLOCK_D, AT_ONCE,
            )  # fmt: skip
            best, total, acc = load_sums(
                part_best, part_total, part_acc, part + last_shared, is_row & (behind > 0), HEAD_DIM, BLOCK_D
            )  # fmt: skip
        if BLOCK_M == 128:
            # Blocks of prompts: scores of a tile are computed beside the sums of the tile before,
            # and tiles that all rows see are not masked. The bits are the same.
            sums = best, total, acc, all_best, all_total, all_acc
            whole_end = begin
            if not WINDOWED:  # up to here every row of the block sees every key
                seen_by_all = prefix_len + block * BLOCK_M // GROUP + 1
                whole_end = tl.minimum(seen_by_all, end) // TILE * TILE
            keys = begin + tl.arange(0, TILE)
            slots = pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
            k = load_rows(k_ptr, slots, keys < end, HEAD_DIM, BLOCK_D)
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
            pages = load_pages(table, keys + TILE, end, PAGE_SIZE)
            scores, slots, pages, sums = add_tiles(
                q, k_ptr, v_ptr, table, scores, slots, pages, begin, whole_end, end, newest, oldest, sums, scale,
                HEAD_DIM, BLOCK_M, BLOCK_D, PAGE_SIZE, PRECISION, TILE, NEAR, SMALL, LARGE, False,
            )  # fmt: skip
            scores, slots, pages, sums = add_tiles(
                q, k_ptr, v_ptr, table, scores, slots, pages, whole_end, end, end, newest, oldest, sums, scale,
                HEAD_DIM, BLOCK_M, BLOCK_D, PAGE_SIZE, PRECISION, TILE, NEAR, SMALL, LARGE, True,
            )  # fmt: skip
            best, total, acc, all_best, all_total, all_acc = sums
        else:
            for start in tl.range(begin, end, TILE):
                if is_start(start, NEAR, SMALL, LARGE):
                    all_best, all_total, all_acc = merge(
                        all_best, all_total, all_acc, best, total, acc
                    )
                    best, total, acc = empty(BLOCK_M, BLOCK_D)
                keys = start + tl.arange(0, TILE)
                seen = (keys[None, :] <= newest[:, None]) & (keys[None, :] >= oldest[:, None])
                slots = pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
                pages = load_pages(table, keys + TILE, end, PAGE_SIZE)
                k = load_rows(k_ptr, slots, keys < end, HEAD_DIM, BLOCK_D)
                v = load_rows(v_ptr, slots, keys < end, HEAD_DIM, BLOCK_D)
                best, total, acc = add_tile(q, k, v, seen, best, total, acc, scale, TILE, PRECISION)
        if BRANCHED and branched:
            newest = tl.load(positions + token, mask=is_row, other=-1).to(tl.int32)
            row_leaf = tl.load(row_leaves + token, mask=is_row, other=-1)
            last = tl.max(newest, 0)
            first_leaf = block * BLOCK_M // GROUP // LEAF_ROWS * LEAF_ROWS
            end_leaf = tl.max(row_leaf, 0) + 1
            for start in range(end, last + 1, TILE):
                if is_start(start, NEAR, SMALL, LARGE):
                    all_best, all_total, all_acc = merge(
                        all_best, all_total, all_acc, best, total, acc
                    )
                    best, total, acc = empty(BLOCK_M, BLOCK_D)
                best, total, acc = add_paths(
                    q, k_ptr, v_ptr, leaf_ends, leaf_slots, first_row, prefix_len, table, start, last, row_leaf,
                    first_leaf, end_leaf, newest, oldest, best, total, acc, scale,
                    HEAD_DIM, BLOCK_D, PAGE_SIZE, TILE, TILES, OWN, GRAIN, HAS_ROOM, PRECISION,
                )  # fmt: skip
        all_best, all_total, all_acc = merge(all_best, all_total, all_acc, best, total, acc)
        if EIGHT_BIT:
            all_acc = all_acc * v_scale
        result = (all_acc / all_total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + line[:, None] * HEAD_DIM + dims[None, :], result, mask=wanted)
