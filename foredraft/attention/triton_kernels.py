"""Flash-decoding over KV pages in Triton (Dao et al. 2023), with all lengths in device memory.

No length is read by the host.
"""

# mypy: ignore-errors
# ruff: noqa: SIM108 (what the compiler decides stays a statement)
import triton
import triton.language as tl

from foredraft.attention.page_kernels import load_pages, load_rows
from foredraft.attention.split_kv_kernels import (
    BEGIN,
    BLOCK,
    COLUMNS,
    END,
    FIRST_PART,
    FIRST_ROW,
    NUM_ROWS,
    PARTS,
    PREFIX_LEN,
    SEQUENCE,
)


@triton.jit
def _byte(words, index: tl.constexpr, KEPT: tl.constexpr, dtype: tl.constexpr):
    """Converts one of the four 8-bit floats of each word."""
    byte = ((words >> (8 * index)) & 0xFF).to(tl.uint8)
    return byte.to(KEPT, bitcast=True).to(dtype)


@triton.jit
def _weights(best, total, q, k, in_range, seen, scale, PRECISION: tl.constexpr):
    """Computes the online softmax over one tile of keys; `scale` includes log2(e).

    Returns:
        Weights of the keys, the factor for earlier sums, the new maximum and the new total.
    """
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * scale
    scores = tl.where(seen & in_range[None, :], scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    # The maximum of a row without keys is minus infinity, which must not be subtracted from
    # itself.
    base = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(best - base)
    return weights.to(q.dtype), shrink, new_best, total * shrink + tl.sum(weights, 1)


@triton.jit
def _add_up(
    part_acc, part_best, part_total, first, stride, num_parts, is_line,
    LINES: tl.constexpr, CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds up the parts of some lines [LINES, BLOCK_D], CHUNK parts at a time.

    The parts of one line lie `stride` apart from `first` on.
    """
    dims = tl.arange(0, BLOCK_D)
    best = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    acc = tl.zeros([LINES, BLOCK_D], tl.float32)
    for start in range(0, num_parts, CHUNK):
        index = start + tl.arange(0, CHUNK)
        part = first[:, None] + index[None, :] * stride
        inside = is_line[:, None] & (index < num_parts)[None, :]
        bests = tl.load(part_best + part, mask=inside, other=float("-inf"))
        totals = tl.load(part_total + part, mask=inside, other=0.0)
        sums = tl.load(
            part_acc + part[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=inside[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
        )
        new_best = tl.maximum(best, tl.max(bests, 1))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(bests - base[:, None])
        shrink = tl.exp2(best - base)
        acc = acc * shrink[:, None] + tl.sum(sums * weights[:, :, None], 1)
        total = total * shrink + tl.sum(totals * weights, 1)
        best = new_best
    return acc / total[:, None]


# Numbers of sequences and pages, and alignments, must not select kernel variants: compiling one
# delays a step by a second.
@triton.jit(
    do_not_specialize=[
        "first_rows", "nums_rows", "prefix_starts", "prefix_lens", "write_indexes", "table_stride", "row_blocks", "num_splits",
        "blocks", "items", "counters", "part_best", "part_total", "tail_masks", "is_causal", "tail_positions", "mask_stride",
        "mask_width", "tail_positions_stride",
    ]
)  # fmt: skip
def attend(
    q_ptr, k_ptr, v_ptr, out_ptr, part_acc, part_best, part_total,
    tables, first_rows, nums_rows, prefix_starts, prefix_lens, write_indexes, positions,
    tail_masks, is_causal, tail_positions, blocks, items, counters,
    scale, v_scale, window, kv_head_stride, q_row_stride, q_head_stride, table_stride, mask_stride, mask_width,
    tail_positions_stride, row_blocks, num_splits,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr, MASKED: tl.constexpr, MIXED: tl.constexpr,
    PLACED: tl.constexpr, LISTED: tl.constexpr, WORK_LIST: tl.constexpr, JOINS: tl.constexpr,
    EIGHT_BIT: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes attention of one block of a sequence's rows, under one KV head and its query heads,
    over one part of the keys.

    Row m of a block is row m // GROUP of the sequence under query head m % GROUP of the group. Keys
    of 8 bits have their scale in `scale`. With LISTED a list assigns a sequence and a block to each
    program. With WORK_LIST a list made on the device also assigns the keys (`split_kv_kernels`);
    partial sums are then stored by item, and with JOINS the program that finishes last adds them
    up. With PACKED four values of 8 bits are read as one word: for the product with the weights a
    thread needs values of several keys side by side, and words come nearer to that than bytes.
    """
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if WORK_LIST:
        kv_head = tl.program_id(0)
        item = items + tl.program_id(1) * COLUMNS
        sequence = tl.load(item + SEQUENCE)
        block = tl.load(item + BLOCK)
    elif LISTED:
        sequence = tl.load(blocks + tl.program_id(0))
        block = tl.load(blocks + tl.num_programs(0) + tl.program_id(0))
    else:
        sequence = tl.program_id(0) // row_blocks
        block = row_blocks - 1 - tl.program_id(0) % row_blocks  # the longest causal block first
    # All lengths are loaded together: one load takes as long as all of them.
    causal = True
    if MASKED:
        causal = False
    if WORK_LIST:
        begin = tl.load(item + BEGIN)
        end = tl.load(item + END)
        first_row = tl.load(item + FIRST_ROW)
        num_rows = tl.load(item + NUM_ROWS)
        prefix_len = tl.load(item + PREFIX_LEN)
        num_parts = tl.load(item + PARTS)
        first_part = tl.load(item + FIRST_PART)
    else:
        num_rows = tl.load(nums_rows + sequence)
        first_row = tl.load(first_rows + sequence)
        prefix_len = tl.load(prefix_lens + sequence)
        begin = tl.load(prefix_starts + sequence)
        write_index = prefix_len
        if MASKED:
            write_index = tl.load(write_indexes + sequence)
            if MIXED:
                causal = tl.load(is_causal + sequence) != 0
    if DEPENDENT:  # lengths are older than the kernel before, which has waited for them itself
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if WORK_LIST:
        if num_parts == 0:
            return
    elif block * BLOCK_M >= num_rows * GROUP:
        return

    folded = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row = folded // GROUP
    is_row = row < num_rows
    head = kv_head * GROUP + folded % GROUP
    token = (first_row + row).to(tl.int64)

    oldest = tl.zeros([BLOCK_M], tl.int32)
    if WINDOWED:
        oldest = tl.load(positions + token, mask=is_row, other=0x3FFFFFFF).to(tl.int32) - window + 1
    if not WORK_LIST:
        last_row = tl.minimum(num_rows - 1, (block * BLOCK_M + BLOCK_M - 1) // GROUP)
        end = prefix_len + last_row + 1
        if MASKED and not causal:
            end = write_index + num_rows
        if WINDOWED:
            begin = tl.maximum(begin, tl.min(oldest, 0))
            if MASKED:  # the tail may have any positions
                begin = tl.minimum(begin, prefix_len)
        if SPLIT:
            length = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), num_splits) * BLOCK_N
            begin = begin + split * length
            end = tl.minimum(end, begin + length)

    dims = tl.arange(0, BLOCK_D)
    wanted = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = token[:, None] * q_row_stride + head[:, None] * q_head_stride + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=wanted, other=0.0)
    if EIGHT_BIT and q_ptr.dtype.element_ty == tl.bfloat16:
        # float16 holds every 8-bit float, and one instruction converts two of them; bfloat16 takes
        # five instructions.
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    k_ptr += kv_head.to(tl.int64) * kv_head_stride
    v_ptr += kv_head.to(tl.int64) * kv_head_stride
    table = tables + sequence.to(tl.int64) * table_stride
    if PACKED:
        WORDS: tl.constexpr = HEAD_DIM // 4
        BLOCK_W: tl.constexpr = BLOCK_D // 4
        v_words = v_ptr.to(tl.pointer_type(tl.int32))
        acc_0 = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
        acc_1 = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
        acc_2 = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
        acc_3 = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    # Pages of keys are loaded one tile ahead: the compiler then keeps all its stages for keys and
    # values.
    pages = load_pages(table, begin + tl.arange(0, BLOCK_N), end, PAGE_SIZE)
    for start in tl.range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        seen = is_row[:, None] & (keys < end)[None, :]
        tail = keys - prefix_len
        if start + BLOCK_N > prefix_len:
            allowed = tail[None, :] <= row[:, None]
            if MASKED:
                in_mask = is_row[:, None] & ((tail >= 0) & (tail < mask_width))[None, :]
                if MIXED:
                    in_mask = in_mask & (not causal)
                offsets = token[:, None] * mask_stride + tail[None, :]
                masked = tl.load(tail_masks + offsets, mask=in_mask, other=0) != 0
                if MIXED:
                    allowed = (allowed & causal) | masked
                else:
                    allowed = masked
                allowed = allowed | (tail < 0)[None, :]
            seen = seen & allowed
        if WINDOWED:
            places = keys
            if PLACED:
                at = tail_positions + sequence.to(tl.int64) * tail_positions_stride + tail
                placed = (tail >= 0) & (tail < mask_width)
                if MIXED:
                    placed = placed & (not causal)
                places = tl.where(placed, tl.load(at, mask=placed, other=0), keys)
            seen = seen & (places[None, :] >= oldest[:, None])
        slots = pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
        pages = load_pages(table, keys + BLOCK_N, end, PAGE_SIZE)
        in_range = keys < end
        # Both loads start before either result is needed.
        k = load_rows(k_ptr, slots, in_range, HEAD_DIM, BLOCK_D)
        if PACKED:
            v = load_rows(v_words, slots, in_range, WORDS, BLOCK_W)
        else:
            v = load_rows(v_ptr, slots, in_range, HEAD_DIM, BLOCK_D)
        weights, shrink, best, total = _weights(best, total, q, k, in_range, seen, scale, PRECISION)
        if PACKED:
            kept: tl.constexpr = v_ptr.dtype.element_ty
            acc_0 = tl.dot(weights, _byte(v, 0, kept, q.dtype), acc_0 * shrink[:, None])
            acc_1 = tl.dot(weights, _byte(v, 1, kept, q.dtype), acc_1 * shrink[:, None])
            acc_2 = tl.dot(weights, _byte(v, 2, kept, q.dtype), acc_2 * shrink[:, None])
            acc_3 = tl.dot(weights, _byte(v, 3, kept, q.dtype), acc_3 * shrink[:, None])
        else:
            weighted = tl.dot(weights, v.to(q.dtype), input_precision=PRECISION)
            acc = acc * shrink[:, None] + weighted

    line = token * (KV_HEADS * GROUP) + head
    if PACKED:
        # A join adds a last dimension, which changes fastest.
        acc = tl.join(tl.join(acc_0, acc_2), tl.join(acc_1, acc_3))
        acc = tl.reshape(acc, [BLOCK_M, BLOCK_D])
    if EIGHT_BIT:
        acc = acc * v_scale
    if WORK_LIST:
        if num_parts == 1:
            result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + line[:, None] * HEAD_DIM + dims[None, :], result, mask=wanted)
        else:
            m = tl.arange(0, BLOCK_M)
            part = (tl.program_id(1) * KV_HEADS + kv_head) * BLOCK_M + m
            tl.store(part_best + part, best, mask=is_row)
            tl.store(part_total + part, total, mask=is_row)
            tl.store(part_acc + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=wanted)
            if JOINS:
                # All threads' stores are complete before the counter is raised.
                tl.debug_barrier()
                counter = counters + first_part * KV_HEADS + kv_head
                if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
                    tl.store(counter, 0)  # for the next layer
                    first = (first_part * KV_HEADS + kv_head) * BLOCK_M + m
                    CHUNK: tl.constexpr = (
                        32 // BLOCK_M if BLOCK_M < 32 else 1
                    )  # fits the registers that keys have occupied
                    result = _add_up(
                        part_acc, part_best, part_total, first, KV_HEADS * BLOCK_M, num_parts, is_row,
                        BLOCK_M, CHUNK, HEAD_DIM, BLOCK_D,
                    )  # fmt: skip
                    result = result.to(out_ptr.dtype.element_ty)
                    tl.store(
                        out_ptr + line[:, None] * HEAD_DIM + dims[None, :], result, mask=wanted
                    )
    elif not SPLIT:
        acc = acc / total[:, None]
        result = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + line[:, None] * HEAD_DIM + dims[None, :], result, mask=wanted)
    else:
        part = line * num_splits + split
        tl.store(part_best + part, best, mask=is_row)
        tl.store(part_total + part, total, mask=is_row)
        tl.store(part_acc + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=wanted)


@triton.jit(do_not_specialize=["part_best", "part_total", "num_splits"])
def combine(
    out_ptr, part_acc, part_best, part_total, num_splits,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, WHOLE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Adds up the parts of one row under some heads: at most CHUNK parts, with WHOLE exactly CHUNK."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    line = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1) * BLOCK_H
    line += tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    index = tl.arange(0, CHUNK)
    # Without a run-time mask, and without the loop of `_add_up`, 4 rows take 5.2 us instead of 7.
    if WHOLE:
        part = line[:, None] * CHUNK + index[None, :]
        inside = tl.full([BLOCK_H, CHUNK], True, tl.int1)
    else:
        part = line[:, None] * num_splits + index[None, :]
        inside = (line >= 0)[:, None] & (index < num_splits)[None, :]
    best = tl.load(part_best + part, mask=inside, other=float("-inf"))
    total = tl.load(part_total + part, mask=inside, other=0.0)
    parts = tl.load(
        part_acc + part[:, :, None] * HEAD_DIM + dims[None, None, :],
        mask=inside[:, :, None] & (dims < HEAD_DIM)[None, None, :],
        other=0.0,
    )
    weight = tl.where(total > 0, tl.exp2(best - tl.max(best, 1)[:, None]), 0.0)
    result = tl.sum(parts * weight[:, :, None], 1) / tl.sum(total * weight, 1)[:, None]
    tl.store(
        out_ptr + line[:, None] * HEAD_DIM + dims[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=(dims < HEAD_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["items", "pairs", "part_best", "part_total"])
def combine_items(
    out_ptr, part_acc, part_best, part_total, items, pairs,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    LINES: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Adds up the parts of some lines of one sequence's block of rows and one KV head, where the
    keys of the block were cut into several items.
    """
    kv_head = tl.program_id(1)
    num_parts = tl.load(pairs + 2 * tl.program_id(0))
    first_part = tl.load(pairs + 2 * tl.program_id(0) + 1)
    # With fewer than 2 parts this may be another pair's item; the program returns below then.
    item = items + first_part * COLUMNS
    block = tl.load(item + BLOCK)
    first_row = tl.load(item + FIRST_ROW)
    num_rows = tl.load(item + NUM_ROWS)
    if DEPENDENT:  # the list was complete before the kernel before this one
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if num_parts < 2:
        return
    m = tl.program_id(2) * LINES + tl.arange(0, LINES)
    folded = block * BLOCK_M + m
    row = folded // GROUP
    is_line = (m < BLOCK_M) & (row < num_rows)
    first = (first_part * KV_HEADS + kv_head) * BLOCK_M + m
    result = _add_up(
        part_acc, part_best, part_total, first, KV_HEADS * BLOCK_M, num_parts, is_line,
        LINES, CHUNK, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    line = (first_row + row).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + folded % GROUP
    dims = tl.arange(0, BLOCK_D)
    tl.store(
        out_ptr + line[:, None] * HEAD_DIM + dims[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=is_line[:, None] & (dims < HEAD_DIM)[None, :],
    )
