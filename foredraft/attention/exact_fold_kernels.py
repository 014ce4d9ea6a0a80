"""Triton kernels around `exact_kernels.attend`: `find_paths` finds the keys of each path of a tree,
and `fold` merges the segments that several programs have computed.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from foredraft.attention.exact_tile_kernels import (
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
)
from foredraft.attention.page_kernels import load_rows


@triton.jit
def _row_of(
    blocks, row_blocks, BLOCK_M: tl.constexpr, GROUP: tl.constexpr, LISTED: tl.constexpr
):  # fmt: skip
    """Returns the sequence and the row of a program that enumerates `attend`'s blocks of rows.

    The row is num_rows or more where there is none.
    """
    PER_BLOCK: tl.constexpr = BLOCK_M // GROUP + 1
    pair = tl.program_id(0) // PER_BLOCK
    if LISTED:
        sequence = tl.load(blocks + pair)
        block = tl.load(blocks + tl.num_programs(0) // PER_BLOCK + pair)
    else:
        sequence = pair // row_blocks
        block = pair % row_blocks
    row = tl.cdiv(block * BLOCK_M, GROUP) + tl.program_id(0) % PER_BLOCK
    # A row that lies in two blocks belongs to the first.
    is_other = row >= tl.cdiv((block + 1) * BLOCK_M, GROUP)
    return sequence, tl.where(is_other, 0x3FFFFFFF, row)


@triton.jit(
    do_not_specialize=[
        "first_rows", "nums_rows", "prefix_lens", "positions", "blocks", "table_stride", "row_blocks", "tail_masks",
        "mask_stride", "mask_width", "tail_positions", "tail_stride", "page_size", "row_leaves", "leaf_ends", "leaf_slots",
    ]
)  # fmt: skip
def find_paths(
    slots_ptr, row_leaves, leaf_ends, leaf_slots, tables, first_rows, nums_rows, prefix_lens, positions, blocks, tail_masks, tail_positions,
    row_blocks, table_stride, mask_stride, mask_width, tail_stride, page_size,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, LISTED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    NODES: tl.constexpr, LEAF_ROWS: tl.constexpr,
):  # fmt: skip
    """Finds the keys that one row of a tree sees from the last whole tile before the tree on.

    They are the keys of the row's own path, each stored at the index of its position. Of every
    LEAF_ROWS rows some are leaves: none of the others is below them. The path of a leaf holds the
    paths of the rows above it.

    Args:
        slots_ptr: int32 [rows, TILES * TILE], KV slots, written up to the row's own position.
        row_leaves: int32 [rows]: the place of a leaf below the row, or of the row itself.
        leaf_ends: int32 [rows]: position of the leaf at each place. Those of LEAF_ROWS rows take
            the first of their places; the other places have -1.
        leaf_slots: int32 [rows, TILES * TILE], slots of the leaf at each place.
        NODES: Number of tree rows that are read at a time.
    """
    sequence, row = _row_of(blocks, row_blocks, BLOCK_M, GROUP, LISTED)
    num_rows = tl.load(nums_rows + sequence)
    first_row = tl.load(first_rows + sequence)
    prefix_len = tl.load(prefix_lens + sequence)
    if row >= num_rows:
        return
    first = first_row.to(tl.int64)
    table = tables + sequence.to(tl.int64) * table_stride
    tail_positions += sequence.to(tl.int64) * tail_stride
    newest = tl.load(positions + first + row).to(tl.int32)
    _store_path(
        slots_ptr + (first + row) * (TILES * TILE), table, newest, prefix_len,
        tail_masks + (first + row) * mask_stride, mask_width, tail_positions, page_size, TILE, TILES, NODES,
    )  # fmt: skip

    first_leaf = row // LEAF_ROWS * LEAF_ROWS
    among = first_leaf + tl.arange(0, LEAF_ROWS)
    lower, upper = among[:, None], among[None, :]
    masks_at = tail_masks + (first + lower) * mask_stride + upper
    is_below = tl.load(masks_at, mask=(lower < num_rows) & (upper < num_rows), other=0) != 0
    lowest = tl.max(tl.where(is_below, lower, -1), 0)
    is_leaf = lowest == among
    places = first_leaf + tl.cumsum(is_leaf.to(tl.int32), 0) - 1
    own_lowest = tl.max(tl.where(among == row, lowest, -1), 0)
    tl.store(row_leaves + first + row, tl.max(tl.where(among == own_lowest, places, -1), 0))
    leaf = tl.max(tl.where(is_leaf & (places == row), among, -1), 0)
    end = tl.load(positions + first + leaf, mask=leaf >= 0, other=-1).to(tl.int32)
    tl.store(leaf_ends + first + row, end)
    _store_path(
        leaf_slots + (first + row) * (TILES * TILE), table, end, prefix_len,
        tail_masks + (first + leaf) * mask_stride, mask_width, tail_positions, page_size, TILE, TILES, NODES,
    )  # fmt: skip


@triton.jit
def _store_path(
    slots_at, table, newest, prefix_len, tail_mask, mask_width, tail_positions, page_size,
    TILE: tl.constexpr, TILES: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """Stores the slots of the keys of a row's path up to its position `newest`; none if it is -1."""
    first = prefix_len // TILE * TILE
    for tile in tl.static_range(TILES):
        places = first + tile * TILE + tl.arange(0, TILE)
        nodes = tl.zeros([TILE], tl.int32)
        for start in range(0, mask_width, NODES):
            node = start + tl.arange(0, NODES)
            inside = (node < mask_width) & (newest >= 0)
            on_path = tl.load(tail_mask + node, mask=inside, other=0) != 0
            stands = tl.load(tail_positions + node, mask=inside & on_path, other=-1)
            is_there = (stands[None, :] == places[:, None]) & on_path[None, :]
            nodes += tl.sum(tl.where(is_there, node[None, :], 0), 1)
        keys = tl.where(places < prefix_len, places, prefix_len + nodes)
        pages = tl.load(table + keys // page_size, mask=places <= newest, other=0)
        slots = pages * page_size + keys % page_size
        tl.store(slots_at + tile * TILE + tl.arange(0, TILE), slots, mask=places <= newest)


@triton.jit(
    do_not_specialize=[
        "first_rows", "nums_rows", "prefix_lens", "max_rows", "num_slots", "part_best", "part_total", "window", "limit",
        "tails", "shared_keys",
    ]
)  # fmt: skip
def fold(
    q_ptr, k_ptr, v_ptr, out_ptr, part_acc, part_best, part_total,
    tails, first_rows, nums_rows, prefix_lens, positions, shared_keys,
    scale, v_scale, window, kv_head_stride, q_row_stride, q_head_stride, num_slots, limit, max_rows,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr, HEADS: tl.constexpr, WINDOWED: tl.constexpr,
    BRANCHED: tl.constexpr, EIGHT_BIT: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr, AHEAD: tl.constexpr, AT_ONCE: tl.constexpr, NEAR: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr, BEHIND: tl.constexpr,
    EARLY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Merges the segments that `attend` has left, for some query heads of one KV head in one row.

    A row of a tree with branches continues here from the last whole tile before the tree. The keys
    of its own path are read at the positions that they have once they are accepted, so no two rows
    need to have a tile in common.

    Args:
        tails: Slots that `find_paths` has written.
        AHEAD: Whether the row's own first keys are read before `attend` has ended, which takes
            registers.
        AT_ONCE: See `merge_parts`.
        BEHIND: As in `attend`.
        HEADS: Number of heads of a program, padded to BLOCK_H.
        EARLY: Whether the next kernel may start before this one has waited.
    """
    if DEPENDENT and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    sequence, row = tl.program_id(0) // max_rows, tl.program_id(0) % max_rows
    num_rows = tl.load(nums_rows + sequence)
    first_row = tl.load(first_rows + sequence)
    prefix_len = tl.load(prefix_lens + sequence)
    num_keys = prefix_len + num_rows
    if BEHIND:
        num_keys -= shared_before(shared_keys + sequence, num_slots, NEAR, SMALL, LARGE)
    if num_keys <= limit:  # `attend` has computed all
        if DEPENDENT and tl.program_id(0) == 0:  # this kernel must not end before `attend`
            tl.extra.cuda.gdc_wait()
        return
    if row >= num_rows:
        return
    branched = False
    if BRANCHED:
        branched = has_branches(positions, first_row, num_rows, prefix_len)

    token = (first_row + row).to(tl.int64)
    own = tl.program_id(1) * HEADS + tl.arange(0, BLOCK_H)  # indexes among all heads
    is_head = tl.arange(0, BLOCK_H) < HEADS
    kv_head = tl.program_id(1) * HEADS // GROUP
    dims = tl.arange(0, BLOCK_D)
    wanted = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    line = token * (KV_HEADS * GROUP) + own
    newest = prefix_len + row
    begin, shared_end = 0, newest + 1
    oldest = 0
    if BRANCHED:
        newest = tl.load(positions + token).to(tl.int32)
        if branched:
            shared_end = prefix_len // TILE * TILE
        offsets = token * q_row_stride + own[:, None] * q_head_stride + dims[None, :]
        q = load_query(q_ptr, offsets, wanted & branched, EIGHT_BIT)
        k_ptr += kv_head.to(tl.int64) * kv_head_stride
        v_ptr += kv_head.to(tl.int64) * kv_head_stride
        tails += token * (TILES * TILE) + tl.arange(0, TILE)
        if AHEAD:
            places = shared_end + tl.arange(0, TILE)
            there = (places <= newest) & branched
            slots = tl.load(tails, mask=there, other=0).to(tl.int64)
            k = load_rows(k_ptr, slots, there, HEAD_DIM, BLOCK_D)
            v = load_rows(v_ptr, slots, there, HEAD_DIM, BLOCK_D)
    if WINDOWED:
        oldest = tl.load(positions + token).to(tl.int32) - window + 1
        begin = tl.maximum(oldest, 0) // TILE * TILE
    if DEPENDENT:  # only `attend`'s sums are newer than the kernel before the previous one
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # Whole segments; for a row without branches also the last one.
    num_whole = segment_of(tl.maximum(shared_end - 1, 0), NEAR, SMALL, LARGE) + 1
    if BRANCHED:
        in_shared = segment_of(shared_end, NEAR, SMALL, LARGE)
        num_whole = tl.where(branched, in_shared, num_whole)
    first_whole = tl.minimum(segment_of(begin, NEAR, SMALL, LARGE), num_whole)
    part = line * num_slots + first_whole
    best, total, acc = merge_parts(
        part_best, part_total, part_acc, part, num_whole - first_whole, is_head,
        BLOCK_H, HEAD_DIM, BLOCK_D, AT_ONCE,
    )  # fmt: skip

    if BRANCHED:
        slot = line * num_slots + num_whole
        goes_on = branched & (not is_start(shared_end, NEAR, SMALL, LARGE)) & (begin < shared_end)
        own_best, own_total, own_acc = load_sums(
            part_best, part_total, part_acc, slot, is_head & goes_on, HEAD_DIM, BLOCK_D
        )
        if AHEAD and branched:
            if is_start(shared_end, NEAR, SMALL, LARGE):
                best, total, acc = merge(best, total, acc, own_best, own_total, own_acc)
                own_best, own_total, own_acc = empty(BLOCK_H, BLOCK_D)
            seen = (places <= newest) & (places >= oldest)
            own_best, own_total, own_acc = add_tile(
                q, k, v, seen[None, :] & is_head[:, None], own_best, own_total, own_acc, scale, TILE, PRECISION
            )  # fmt: skip
        first = shared_end + TILE if AHEAD else shared_end
        end = tl.where(branched, newest + 1, 0)
        for start in tl.range(first, end, TILE):
            if is_start(start, NEAR, SMALL, LARGE):
                best, total, acc = merge(best, total, acc, own_best, own_total, own_acc)
                own_best, own_total, own_acc = empty(BLOCK_H, BLOCK_D)
            keys = start + tl.arange(0, TILE)
            slot_at = tails + (start - shared_end)
            key_slots = tl.load(slot_at, mask=keys <= newest, other=0).to(tl.int64)
            key_rows = load_rows(k_ptr, key_slots, keys <= newest, HEAD_DIM, BLOCK_D)
            value_rows = load_rows(v_ptr, key_slots, keys <= newest, HEAD_DIM, BLOCK_D)
            seen_keys = (keys <= newest) & (keys >= oldest)
            own_best, own_total, own_acc = add_tile(
                q, key_rows, value_rows, seen_keys[None, :] & is_head[:, None], own_best, own_total, own_acc, scale,
                TILE, PRECISION,
            )  # fmt: skip
        best, total, acc = merge(best, total, acc, own_best, own_total, own_acc)

    if EIGHT_BIT:
        acc = acc * v_scale
    result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + line[:, None] * HEAD_DIM + dims[None, :], result, mask=wanted)
