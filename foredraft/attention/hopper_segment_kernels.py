"""The kernel of attention of few rows after many keys on Hopper cards, in Gluon.

Its arithmetic is that of `exact_tile_kernels`, number by number. Programs take segments of keys in
turns. A program has a warp that copies tiles of keys and values to shared memory, page by page, and
one or two groups of warps that add them to 64 lines each: a line is a row under one query head.
`fold` merges the segments.
"""

# mypy: ignore-errors
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from foredraft.attention.hopper_prompt_kernels import soften
from foredraft.attention.segment_list_kernels import FIELDS

_FIELDS = gl.constexpr(FIELDS)


@gluon.jit
def _wait_for_kernel_before(loaded):
    """Waits for the kernel before, once a number has been loaded that is older, and lets the next
    one start.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0 $1", "=r,r", [loaded], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _record(records, item, KV_HEADS: gl.constexpr):
    """Returns what `list_segments` has written of an item: a segment under one KV head.

    Called in each turn anew: of a record that was loaded one turn ahead Triton 3.6 lost a number.
    """
    place = records + _FIELDS * (item // KV_HEADS)
    fields = ()
    for field in gl.static_range(_FIELDS):
        fields += (gl.load(place + field),)
    return fields


@gluon.jit
def _copy_tile(
    desc, pieces, ready, stage, numbers, head_row,
    TILE: gl.constexpr, PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    PAGES: gl.constexpr = TILE // PAGE_SIZE
    HALVES: gl.constexpr = HEAD_DIM // 64
    PIECES: gl.constexpr = PAGES * HALVES
    mbarrier.expect(ready.index(stage), TILE * HEAD_DIM * 2)
    for page in gl.static_range(PAGES):
        for half in gl.static_range(HALVES):
            tma.async_copy_global_to_shared(
                desc, [head_row + numbers[page] * PAGE_SIZE, half * 64], ready.index(stage),
                pieces.index(stage * PIECES + half * PAGES + page),
            )  # fmt: skip


@gluon.jit
def _numbers(table, key, end, TILE: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Returns the pages of a tile. Behind the last key the last page is copied again."""
    numbers = ()
    for page in gl.static_range(TILE // PAGE_SIZE):
        at = gl.minimum(key + page * PAGE_SIZE, end - 1) // PAGE_SIZE
        numbers += (gl.load(table + at),)
    return numbers


@gluon.jit
def _copy_tiles(
    k_desc, v_desc, k_shared, v_shared, k_ready, k_free, v_ready, v_free, tables, table_stride, num_slots, records,
    num_records,
    KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    PIECES: gl.constexpr = STAGES * (TILE // PAGE_SIZE) * (HEAD_DIM // 64)
    k_pieces = k_shared._reinterpret(k_desc.dtype, [PIECES, PAGE_SIZE, 64], k_desc.layout)
    v_pieces = v_shared._reinterpret(v_desc.dtype, [PIECES, PAGE_SIZE, 64], v_desc.layout)
    num_items = gl.load(num_records) * KV_HEADS
    item = gl.program_id(0)
    if DEPENDENT:
        sequence = gl.load(records + _FIELDS * (item // KV_HEADS), mask=item < num_items, other=0)
        page = gl.load(tables + sequence.to(gl.int64) * table_stride)
        _wait_for_kernel_before(page)
    count = 0
    for _turn in range(gl.cdiv(num_items - item, gl.num_programs(0))):
        sequence, _segment, begin, end, num_tiles, _row, _rows, _prefix = _record(
            records, item, KV_HEADS
        )
        head_row = item % KV_HEADS * num_slots
        item += gl.num_programs(0)
        table = tables + sequence.to(gl.int64) * table_stride
        for tile in range(num_tiles):
            stage = count % STAGES
            phase = (count // STAGES + 1) & 1
            count += 1
            numbers = _numbers(table, begin + tile * TILE, end, TILE, PAGE_SIZE)
            mbarrier.wait(k_free.index(stage), phase)
            _copy_tile(
                k_desc, k_pieces, k_ready, stage, numbers, head_row, TILE, PAGE_SIZE, HEAD_DIM
            )
            mbarrier.wait(v_free.index(stage), phase)
            _copy_tile(
                v_desc, v_pieces, v_ready, stage, numbers, head_row, TILE, PAGE_SIZE, HEAD_DIM
            )


@gluon.jit
def _add_tiles(
    q_ptr, part_acc, part_best, part_total, k_shared, v_shared, ones, k_ready, k_free, v_ready, v_free, records,
    num_records, scale, q_row_stride, q_head_stride, num_parts,
    PART: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Adds the tiles of segments to 64 lines of their sequence."""
    LINES: gl.constexpr = 64
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    OF_SCORES: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    OF_SUMS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    COLUMN: gl.constexpr = gl.SliceLayout(1, ACC)
    WIDE: gl.constexpr = HEAD_DIM // 8
    IN_ORDER: gl.constexpr = gl.BlockedLayout([1, 8], [32 // WIDE, WIDE], [4, 1], [1, 0])
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, IN_ORDER))
    acc_dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, ACC))
    keys = gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
    none = gl.full([LINES], float("-inf"), gl.float32, layout=ROW)
    no_scores = gl.zeros([LINES, TILE], gl.float32, layout=SCORES)
    no_sums = gl.zeros([LINES, 8], gl.float32, layout=SUMS)
    num_items = gl.load(num_records) * KV_HEADS
    item = gl.program_id(0)
    if DEPENDENT:
        _wait_for_kernel_before(
            gl.load(records + _FIELDS * (item // KV_HEADS), mask=item < num_items, other=0)
        )
    count = 0  # tiles of earlier segments
    for _turn in range(gl.cdiv(num_items - item, gl.num_programs(0))):
        _, segment, begin, end, num_tiles, first_row, num_rows, prefix_len = _record(
            records, item, KV_HEADS
        )
        kv_head = item % KV_HEADS
        item += gl.num_programs(0)
        line = PART * LINES + gl.arange(0, LINES, layout=gl.SliceLayout(1, IN_ORDER))
        row = line // GROUP
        head = kv_head * GROUP + line % GROUP
        token = (first_row + row).to(gl.int64)
        q = gl.load(
            q_ptr + token[:, None] * q_row_stride + head[:, None] * q_head_stride + dims[None, :],
            mask=(row < num_rows)[:, None], other=0.0,
        )  # fmt: skip
        q = gl.convert_layout(q, OF_SCORES)
        newest = prefix_len + (PART * LINES + gl.arange(0, LINES, layout=ROW)) // GROUP
        whole_end = gl.minimum(prefix_len + 1, end) // TILE * TILE
        total = gl.zeros([LINES], gl.float32, layout=ROW)
        acc = gl.zeros([LINES, HEAD_DIM], gl.float32, layout=ACC)
        stage, phase = count % STAGES, (count // STAGES) & 1
        mbarrier.wait(k_ready.index(stage), phase)
        k = k_shared.index(stage).permute([1, 0])
        scores = warpgroup_mma(q, k, no_scores, use_acc=False)
        mbarrier.arrive(k_free.index(stage), count=1)
        best, shrink, weights = soften(scores, begin, none, newest, whole_end, scale, keys, DTYPE)
        for tile in range(num_tiles - 1):
            stage, phase = count % STAGES, (count // STAGES) & 1
            count += 1
            next_stage, next_phase = count % STAGES, (count // STAGES) & 1
            mbarrier.wait(k_ready.index(next_stage), next_phase)
            k = k_shared.index(next_stage).permute([1, 0])
            scores = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
            mbarrier.wait(v_ready.index(stage), phase)
            operand = gl.convert_layout(weights, OPERAND)
            acc = warpgroup_mma(operand, v_shared.index(stage), acc, is_async=True)
            sums = warpgroup_mma(
                gl.convert_layout(weights, OF_SUMS), ones.permute([1, 0]), no_sums, use_acc=False, is_async=True
            )  # fmt: skip
            scores, acc, sums, operand = warpgroup_mma_wait(2, deps=[scores, acc, sums, operand])
            mbarrier.arrive(k_free.index(next_stage), count=1)
            best, next_shrink, weights = soften(
                scores, begin + (tile + 1) * TILE, best, newest, whole_end, scale, keys, DTYPE
            )
            acc, sums, operand = warpgroup_mma_wait(0, deps=[acc, sums, operand])
            mbarrier.arrive(v_free.index(stage), count=1)
            total = gl.fma(total, shrink, gl.convert_layout(gl.max(sums, 1), ROW))
            acc = acc * gl.convert_layout(next_shrink, COLUMN)[:, None]
            shrink = next_shrink
        stage, phase = count % STAGES, (count // STAGES) & 1
        count += 1
        mbarrier.wait(v_ready.index(stage), phase)
        start = begin + (num_tiles - 1) * TILE
        if start + TILE > end:  # behind the last key may be anything
            place = start + gl.arange(0, TILE, layout=gl.SliceLayout(1, IN_ORDER))
            v = v_shared.index(stage).load(IN_ORDER)
            v_shared.index(stage).store(gl.where((place < end)[:, None], v, 0.0).to(DTYPE))
            fence_async_shared()
            gl.thread_barrier()
        operand = gl.convert_layout(weights, OPERAND)
        acc = warpgroup_mma(operand, v_shared.index(stage), acc, is_async=True)
        sums = warpgroup_mma(
            gl.convert_layout(weights, OF_SUMS), ones.permute([1, 0]), no_sums, use_acc=False, is_async=True
        )  # fmt: skip
        acc, sums, operand = warpgroup_mma_wait(0, deps=[acc, sums, operand])
        mbarrier.arrive(v_free.index(stage), count=1)
        total = gl.fma(total, shrink, gl.convert_layout(gl.max(sums, 1), ROW))
        own = PART * LINES + gl.arange(0, LINES, layout=ROW)
        place = (
            (first_row + own // GROUP).to(gl.int64) * (KV_HEADS * GROUP)
            + kv_head * GROUP
            + own % GROUP
        )
        place = place * num_parts + segment
        is_line = own < num_rows * GROUP
        gl.store(part_best + place, best, mask=is_line)
        gl.store(part_total + place, total, mask=is_line)
        place = gl.convert_layout(place, COLUMN)
        is_line = gl.convert_layout(is_line, COLUMN)
        gl.store(
            part_acc + place[:, None] * HEAD_DIM + acc_dims[None, :], acc, mask=is_line[:, None]
        )


_UNSPECIALIZED = (
    "num_slots", "table_stride", "tables", "records", "num_records", "num_parts", "part_best", "part_total",
)  # fmt: skip


@gluon.jit(do_not_specialize=_UNSPECIALIZED)
def attend_segments(
    q_ptr, k_desc, v_desc, part_acc, part_best, part_total, tables, records, num_records, scale, q_row_stride,
    q_head_stride, num_slots, table_stride, num_parts,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, PARTS: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Computes the sums of segments of keys.

    Line m of a sequence is its row m // GROUP under query head m % GROUP of the group; there are at
    most 64 * PARTS.
    """
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_shared = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, HEAD_DIM], SHARED)
    v_shared = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, HEAD_DIM], SHARED)
    # The matrix units add up weights, as products with ones.
    EVEN: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ones = gl.allocate_shared_memory(DTYPE, [8, TILE], SHARED)
    ones.store(gl.full([8, TILE], 1.0, DTYPE, layout=EVEN))
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=PARTS)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_free.index(i), count=PARTS)
    fence_async_shared()
    gl.thread_barrier()
    # Behind each list: warps of the parts behind the first, and registers of their threads.
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_add_tiles, (
                    q_ptr, part_acc, part_best, part_total, k_shared, v_shared, ones, k_ready, k_free, v_ready, v_free,
                    records, num_records, scale, q_row_stride, q_head_stride, num_parts,
                    gl.constexpr(0), GROUP, KV_HEADS, HEAD_DIM, TILE, STAGES, DEPENDENT,
                )),
                (_copy_tiles, (
                    k_desc, v_desc, k_shared, v_shared, k_ready, k_free, v_ready, v_free, tables, table_stride,
                    num_slots, records, num_records, KV_HEADS, HEAD_DIM, PAGE_SIZE, TILE, STAGES, DEPENDENT,
                )),
            ],
            [1], [40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_add_tiles, (
                    q_ptr, part_acc, part_best, part_total, k_shared, v_shared, ones, k_ready, k_free, v_ready, v_free,
                    records, num_records, scale, q_row_stride, q_head_stride, num_parts,
                    gl.constexpr(0), GROUP, KV_HEADS, HEAD_DIM, TILE, STAGES, DEPENDENT,
                )),
                (_add_tiles, (
                    q_ptr, part_acc, part_best, part_total, k_shared, v_shared, ones, k_ready, k_free, v_ready, v_free,
                    records, num_records, scale, q_row_stride, q_head_stride, num_parts,
                    gl.constexpr(1), GROUP, KV_HEADS, HEAD_DIM, TILE, STAGES, DEPENDENT,
                )),
                (_copy_tiles, (
                    k_desc, v_desc, k_shared, v_shared, k_ready, k_free, v_ready, v_free, tables, table_stride,
                    num_slots, records, num_records, KV_HEADS, HEAD_DIM, PAGE_SIZE, TILE, STAGES, DEPENDENT,
                )),
            ],
            [4, 1], [192, 40],
        )  # fmt: skip
