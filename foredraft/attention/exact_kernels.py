"""Attention whose result for a row depends on that row's own keys alone, in Triton.

Keys are read in the order of their positions, in tiles of TILE that begin at multiples of TILE,
inside segments that begin at fixed positions: of SMALL keys up to position NEAR, then of LARGE.
Within a segment a softmax is carried from tile to tile; segments are merged from the first to the
last. Every program that computes a part of this, beside whatever other rows, does the same
operations on the same numbers:

- a tile's sums over keys are made by the matrix units alone, whose order does not depend on the
  size of a block;
- additions that could be fused with a multiplication say whether they are;
- a tile or a segment that a row sees no key of changes nothing.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def _segment_of(key, NEAR: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr):
    return tl.where(key < NEAR, key // SMALL, NEAR // SMALL + (key - NEAR) // LARGE)


@triton.jit
def _start_of(segment, NEAR: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr):
    return tl.where(
        segment < NEAR // SMALL, segment * SMALL, NEAR + (segment - NEAR // SMALL) * LARGE
    )


@triton.jit
def _is_start(key, NEAR: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr):
    return key % tl.where(key < NEAR, SMALL, LARGE) == 0


@triton.jit
def _pages(table, keys, end, PAGE_SIZE: tl.constexpr):
    """Loads the pages of the keys before `end`."""
    return tl.load(table + keys // PAGE_SIZE, mask=keys < end, other=0)


@triton.jit
def _rows(ptr, slots, in_range, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Loads rows of WIDTH elements [slots, BLOCK], with zeros outside of the range."""
    columns = tl.arange(0, BLOCK)
    wanted = in_range[:, None] & (columns < WIDTH)[None, :]
    return tl.load(ptr + slots[:, None] * WIDTH + columns[None, :], mask=wanted, other=0.0)


@triton.jit
def _tile(q, k, v, seen, best, total, acc, scale, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """Adds one tile of keys to the earlier ones of their segment; `scale` includes log2(e)."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
    scores = tl.where(seen, scores * scale, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    # The maximum of a row without keys is minus infinity, which must not be subtracted from
    # itself.
    base = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores - base[:, None]).to(q.dtype)
    shrink = tl.exp2(best - base)
    # The matrix units add up, since the order of `tl.sum` follows the layout. All columns are
    # equal.
    ones = tl.full([TILE, 16], 1.0, q.dtype)
    sums = tl.max(tl.dot(weights, ones, input_precision=PRECISION), 1)
    acc = tl.dot(weights, v.to(q.dtype), acc * shrink[:, None], input_precision=PRECISION)
    return new_best, tl.fma(total, shrink, sums), acc


@triton.jit
def _merge(best, total, acc, new_best, new_total, new_acc):
    """Adds the next segment to the earlier ones."""
    top = tl.maximum(best, new_best)
    base = tl.where(top == float("-inf"), 0.0, top)
    old, new = tl.exp2(best - base), tl.exp2(new_best - base)
    total = tl.fma(total, old, new_total * new)
    return top, total, tl.fma(acc, old[:, None], new_acc * new[:, None])


@triton.jit
def _query(q_ptr, offsets, wanted, EIGHT_BIT: tl.constexpr):
    q = tl.load(q_ptr + offsets, mask=wanted, other=0.0)
    if EIGHT_BIT and q_ptr.dtype.element_ty == tl.bfloat16:
        # float16 holds every 8-bit float, and one instruction converts two of them; bfloat16 takes
        # five instructions.
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return q


@triton.jit
def _has_branches(positions, first_row, num_rows, prefix_len):
    """Returns whether the rows are a tree with branches.

    The last row of a chain is as many positions behind the root as there are rows before it; the
    last row of a tree with branches is not.
    """
    last = tl.load(positions + first_row + num_rows - 1).to(tl.int32)
    return last - prefix_len != num_rows - 1


@triton.jit
def _empty(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return best, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)


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


# Numbers of sequences and pages, and alignments, must not select kernel variants: compiling one
# delays a step by a second.
@triton.jit(
    do_not_specialize=[
        "first_rows", "nums_rows", "prefix_lens", "table_stride", "row_blocks", "num_splits", "num_slots", "blocks",
        "part_best", "part_total", "window", "limit",
    ]
)  # fmt: skip
def attend(
    q_ptr, k_ptr, v_ptr, out_ptr, part_acc, part_best, part_total,
    tables, first_rows, nums_rows, prefix_lens, positions, blocks,
    scale, v_scale, window, kv_head_stride, q_row_stride, q_head_stride, row_blocks, num_slots, limit,
    table_stride, num_splits,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, TOGETHER: tl.constexpr, WINDOWED: tl.constexpr,
    BRANCHED: tl.constexpr, LISTED: tl.constexpr, EIGHT_BIT: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr,
    NEAR: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes all segments, or every `num_splits`th, of one block of a sequence's rows under one
    KV head.

    Row m of a block is row m // GROUP of the sequence under query head m % GROUP of the group. For
    a tree with branches this kernel computes the tiles before the tree, and `fold` all else.

    Args:
        SPLIT: Whether the segments of a sequence of more than `limit` keys are distributed to
            several programs; `fold` merges them.
        TOGETHER: Whether there may be sequences of fewer keys.
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
    if DEPENDENT:  # lengths are older than the kernel before, which has waited for them itself
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if block * BLOCK_M >= num_rows * GROUP:
        return

    folded = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row = folded // GROUP
    is_row = row < num_rows
    head = kv_head * GROUP + folded % GROUP
    token = (first_row + row).to(tl.int64)
    newest = prefix_len + row
    last_row = tl.minimum(num_rows - 1, (block * BLOCK_M + BLOCK_M - 1) // GROUP)
    begin, end = 0, prefix_len + last_row + 1
    branched = False
    if BRANCHED:
        branched = _has_branches(positions, first_row, num_rows, prefix_len)
        if branched:
            end = prefix_len // TILE * TILE
    oldest = tl.zeros([BLOCK_M], tl.int32)
    if WINDOWED:
        oldest = tl.load(positions + token, mask=is_row, other=0x3FFFFFFF).to(tl.int32) - window + 1
        begin = tl.maximum(tl.min(oldest, 0), 0) // TILE * TILE
    first_segment = 0
    if SPLIT:
        first_segment = _segment_of(begin, NEAR, SMALL, LARGE) + tl.program_id(2)
        idle = _start_of(first_segment, NEAR, SMALL, LARGE) >= end
        if TOGETHER:
            together = prefix_len + num_rows <= limit
            idle = tl.where(together, tl.program_id(2) > 0, idle)
        if idle:
            return

    dims = tl.arange(0, BLOCK_D)
    wanted = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = token[:, None] * q_row_stride + head[:, None] * q_head_stride + dims[None, :]
    q = _query(q_ptr, offsets, wanted, EIGHT_BIT)
    k_ptr += kv_head.to(tl.int64) * kv_head_stride
    v_ptr += kv_head.to(tl.int64) * kv_head_stride
    table = tables + sequence.to(tl.int64) * table_stride
    line = token * (KV_HEADS * GROUP) + head

    if SPLIT:
        is_apart = True
        if TOGETHER:
            is_apart = not together
        if is_apart:
            end_segment = _segment_of(end - 1, NEAR, SMALL, LARGE) + 1
            for segment in range(first_segment, end_segment, num_splits):
                first = tl.maximum(_start_of(segment, NEAR, SMALL, LARGE), begin)
                last = tl.minimum(_start_of(segment + 1, NEAR, SMALL, LARGE), end)
                best, total, acc = _empty(BLOCK_M, BLOCK_D)
                pages = _pages(table, first + tl.arange(0, TILE), last, PAGE_SIZE)
                for start in tl.range(first, last, TILE):
                    keys = start + tl.arange(0, TILE)
                    seen = (keys[None, :] <= newest[:, None]) & (keys[None, :] >= oldest[:, None])
                    slots = pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
                    # Pages of keys are loaded one tile ahead: the compiler then keeps its stages
                    # for keys and values.
                    pages = _pages(table, keys + TILE, last, PAGE_SIZE)
                    k = _rows(k_ptr, slots, keys < last, HEAD_DIM, BLOCK_D)
                    v = _rows(v_ptr, slots, keys < last, HEAD_DIM, BLOCK_D)
                    best, total, acc = _tile(
                        q, k, v, seen, best, total, acc, scale, TILE, PRECISION
                    )
                part = line * num_slots + segment
                tl.store(part_best + part, best, mask=is_row)
                tl.store(part_total + part, total, mask=is_row)
                tl.store(part_acc + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=wanted)
            return
    if TOGETHER:
        best, total, acc = _empty(BLOCK_M, BLOCK_D)
        all_best, all_total, all_acc = _empty(BLOCK_M, BLOCK_D)
        pages = _pages(table, begin + tl.arange(0, TILE), end, PAGE_SIZE)
        for start in tl.range(begin, end, TILE):
            if _is_start(start, NEAR, SMALL, LARGE):
                all_best, all_total, all_acc = _merge(
                    all_best, all_total, all_acc, best, total, acc
                )
                best, total, acc = _empty(BLOCK_M, BLOCK_D)
            keys = start + tl.arange(0, TILE)
            seen = (keys[None, :] <= newest[:, None]) & (keys[None, :] >= oldest[:, None])
            slots = pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
            pages = _pages(table, keys + TILE, end, PAGE_SIZE)
            k = _rows(k_ptr, slots, keys < end, HEAD_DIM, BLOCK_D)
            v = _rows(v_ptr, slots, keys < end, HEAD_DIM, BLOCK_D)
            best, total, acc = _tile(q, k, v, seen, best, total, acc, scale, TILE, PRECISION)
        if BRANCHED and branched:
            # Whole segments, and the one that continues in the tree.
            part = line * num_slots
            at_whole = part_acc + part[:, None] * HEAD_DIM + dims[None, :]
            if _is_start(end, NEAR, SMALL, LARGE):
                all_best, all_total, all_acc = _merge(
                    all_best, all_total, all_acc, best, total, acc
                )
            else:
                tl.store(part_best + part + 1, best, mask=is_row)
                tl.store(part_total + part + 1, total, mask=is_row)
                tl.store(at_whole + HEAD_DIM, acc, mask=wanted)
            tl.store(part_best + part, all_best, mask=is_row)
            tl.store(part_total + part, all_total, mask=is_row)
            tl.store(at_whole, all_acc, mask=wanted)
        else:
            all_best, all_total, all_acc = _merge(all_best, all_total, all_acc, best, total, acc)
            if EIGHT_BIT:
                all_acc = all_acc * v_scale
            result = (all_acc / all_total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + line[:, None] * HEAD_DIM + dims[None, :], result, mask=wanted)


@triton.jit(
    do_not_specialize=[
        "first_rows", "nums_rows", "prefix_lens", "positions", "blocks", "table_stride", "row_blocks", "tail_masks",
        "mask_stride", "mask_width", "tail_positions", "tail_stride", "page_size",
    ]
)  # fmt: skip
def find_tails(
    slots_ptr, tables, first_rows, nums_rows, prefix_lens, positions, blocks, tail_masks, tail_positions,
    row_blocks, table_stride, mask_stride, mask_width, tail_stride, page_size,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, LISTED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    NODES: tl.constexpr,
):  # fmt: skip
    """Finds the keys that one row of a tree sees from the last whole tile before the tree on.

    They are the keys of the row's own path, each stored at the index of its position.

    Args:
        slots_ptr: int32 [rows, TILES * TILE], KV slots, written up to the row's own position.
        NODES: Number of tree rows that are read at a time.
    """
    sequence, row = _row_of(blocks, row_blocks, BLOCK_M, GROUP, LISTED)
    num_rows = tl.load(nums_rows + sequence)
    first_row = tl.load(first_rows + sequence)
    prefix_len = tl.load(prefix_lens + sequence)
    if row >= num_rows:
        return
    token = (first_row + row).to(tl.int64)
    newest = tl.load(positions + token).to(tl.int32)
    first = prefix_len // TILE * TILE
    table = tables + sequence.to(tl.int64) * table_stride
    for tile in tl.static_range(TILES):
        places = first + tile * TILE + tl.arange(0, TILE)
        nodes = tl.zeros([TILE], tl.int32)
        for start in range(0, mask_width, NODES):
            node = start + tl.arange(0, NODES)
            inside = node < mask_width
            on_path = tl.load(tail_masks + token * mask_stride + node, mask=inside, other=0) != 0
            positions_at = tail_positions + sequence.to(tl.int64) * tail_stride + node
            stands = tl.load(positions_at, mask=inside & on_path, other=-1)
            is_there = (stands[None, :] == places[:, None]) & on_path[None, :]
            nodes += tl.sum(tl.where(is_there, node[None, :], 0), 1)
        keys = tl.where(places < prefix_len, places, prefix_len + nodes)
        pages = tl.load(table + keys // page_size, mask=places <= newest, other=0)
        slots_at = slots_ptr + token * (TILES * TILE) + tile * TILE + tl.arange(0, TILE)
        tl.store(slots_at, pages * page_size + keys % page_size, mask=places <= newest)


@triton.jit(
    do_not_specialize=[
        "first_rows", "nums_rows", "prefix_lens", "row_blocks", "num_slots", "blocks", "part_best", "part_total", "window",
        "limit", "tails",
    ]
)  # fmt: skip
def fold(
    q_ptr, k_ptr, v_ptr, out_ptr, part_acc, part_best, part_total,
    tails, first_rows, nums_rows, prefix_lens, positions, blocks,
    scale, v_scale, window, kv_head_stride, q_row_stride, q_head_stride, row_blocks, num_slots, limit,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr, HEADS: tl.constexpr, SPLIT: tl.constexpr, TOGETHER: tl.constexpr, WINDOWED: tl.constexpr,
    BRANCHED: tl.constexpr, LISTED: tl.constexpr, EIGHT_BIT: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr, AHEAD: tl.constexpr, NEAR: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Merges the segments that `attend` has left, for some query heads of one KV head in one row.

    A row of a tree with branches continues here from the last whole tile before the tree. The keys
    of its own path are read at the positions that they have once they are accepted, so no two rows
    need to have a tile in common.

    Args:
        tails: Slots that `find_tails` has written.
        AHEAD: Whether the row's own first keys are read before `attend` has ended, which takes
            registers.
        BLOCK_M: Block size of `attend`, whose blocks of rows the programs enumerate.
        HEADS: Number of heads of a program, padded to BLOCK_H.
    """
    sequence, row = _row_of(blocks, row_blocks, BLOCK_M, GROUP, LISTED)
    num_rows = tl.load(nums_rows + sequence)
    first_row = tl.load(first_rows + sequence)
    prefix_len = tl.load(prefix_lens + sequence)
    if row >= num_rows:
        return
    branched = False
    if BRANCHED:
        branched = _has_branches(positions, first_row, num_rows, prefix_len)
    together = (prefix_len + num_rows <= limit) | (not SPLIT)
    done = together
    if BRANCHED:
        done = together & (not branched)
    if done:
        return

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
        q = _query(q_ptr, offsets, wanted & branched, EIGHT_BIT)
        k_ptr += kv_head.to(tl.int64) * kv_head_stride
        v_ptr += kv_head.to(tl.int64) * kv_head_stride
        tails += token * (TILES * TILE) + tl.arange(0, TILE)
        if AHEAD:
            places = shared_end + tl.arange(0, TILE)
            there = (places <= newest) & branched
            slots = tl.load(tails, mask=there, other=0).to(tl.int64)
            k = _rows(k_ptr, slots, there, HEAD_DIM, BLOCK_D)
            v = _rows(v_ptr, slots, there, HEAD_DIM, BLOCK_D)
    if WINDOWED:
        oldest = tl.load(positions + token).to(tl.int32) - window + 1
        begin = tl.maximum(oldest, 0) // TILE * TILE
    if DEPENDENT:  # only `attend`'s sums are newer than the kernel before the previous one
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # Whole segments; for a row without branches also the last one.
    num_whole = _segment_of(tl.maximum(shared_end - 1, 0), NEAR, SMALL, LARGE) + 1
    if BRANCHED:
        in_shared = _segment_of(shared_end, NEAR, SMALL, LARGE)
        num_whole = tl.where(branched, in_shared, num_whole)
    first_whole = tl.minimum(_segment_of(begin, NEAR, SMALL, LARGE), num_whole)
    count = num_whole - first_whole
    count = tl.where(together, tl.minimum(count, 1), count)
    part = line * num_slots + tl.where(together, 0, first_whole)
    best, total, acc = _empty(BLOCK_H, BLOCK_D)
    for index in tl.range(0, count):
        at = part_acc + (part + index)[:, None] * HEAD_DIM + dims[None, :]
        sums = tl.load(at, mask=wanted, other=0.0)
        bests = tl.load(part_best + part + index, mask=is_head, other=float("-inf"))
        totals = tl.load(part_total + part + index, mask=is_head, other=0.0)
        best, total, acc = _merge(best, total, acc, bests, totals, sums)

    if BRANCHED:
        slot = line * num_slots + tl.where(together, 1, num_whole)
        goes_on = branched & (not _is_start(shared_end, NEAR, SMALL, LARGE)) & (begin < shared_end)
        own_best = tl.load(part_best + slot, mask=is_head & goes_on, other=float("-inf"))
        own_total = tl.load(part_total + slot, mask=is_head & goes_on, other=0.0)
        at = part_acc + slot[:, None] * HEAD_DIM + dims[None, :]
        own_acc = tl.load(at, mask=wanted & goes_on, other=0.0)
        if AHEAD and branched:
            if _is_start(shared_end, NEAR, SMALL, LARGE):
                best, total, acc = _merge(best, total, acc, own_best, own_total, own_acc)
                own_best, own_total, own_acc = _empty(BLOCK_H, BLOCK_D)
            seen = (places <= newest) & (places >= oldest)
            own_best, own_total, own_acc = _tile(
                q, k, v, seen[None, :] & is_head[:, None], own_best, own_total, own_acc, scale, TILE, PRECISION
            )  # fmt: skip
        first = shared_end + TILE if AHEAD else shared_end
        end = tl.where(branched, newest + 1, 0)
        for start in tl.range(first, end, TILE):
            if _is_start(start, NEAR, SMALL, LARGE):
                best, total, acc = _merge(best, total, acc, own_best, own_total, own_acc)
                own_best, own_total, own_acc = _empty(BLOCK_H, BLOCK_D)
            keys = start + tl.arange(0, TILE)
            slot_at = tails + (start - shared_end)
            key_slots = tl.load(slot_at, mask=keys <= newest, other=0).to(tl.int64)
            key_rows = _rows(k_ptr, key_slots, keys <= newest, HEAD_DIM, BLOCK_D)
            value_rows = _rows(v_ptr, key_slots, keys <= newest, HEAD_DIM, BLOCK_D)
            seen_keys = (keys <= newest) & (keys >= oldest)
            own_best, own_total, own_acc = _tile(
                q, key_rows, value_rows, seen_keys[None, :] & is_head[:, None], own_best, own_total, own_acc, scale,
                TILE, PRECISION,
            )  # fmt: skip
        best, total, acc = _merge(best, total, acc, own_best, own_total, own_acc)

    if EIGHT_BIT:
        acc = acc * v_scale
    result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + line[:, None] * HEAD_DIM + dims[None, :], result, mask=wanted)
