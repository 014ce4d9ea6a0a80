"""The kernel of attention of prompts on Hopper cards, in Gluon.

Its arithmetic is that of `exact_tile_kernels`, number by number. A program has three parts that run
side by side: a warp that copies tiles of keys and values to shared memory, page by page, and two
groups of warps that compute half of the rows each, so that one's products fill the matrix units
while the other computes exponentials. Programs take blocks of rows in turns.
"""

# mypy: ignore-errors
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Layout of rows of 64 numbers of 16 bits as the matrix units read them.
_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def pages_of(stored: torch.Tensor, page_size: int) -> TensorDescriptor:
    """Describes a layer's keys or values, [KV heads, slots, head_dim], as halves of pages."""
    rows = stored.reshape(-1, stored.shape[-1])
    return TensorDescriptor.from_tensor(rows, [page_size, 64], _SHARED)


@gluon.jit
def _is_start(key, NEAR: gl.constexpr, SMALL: gl.constexpr, LARGE: gl.constexpr):
    return key % gl.where(key < NEAR, SMALL, LARGE) == 0


@gluon.jit
def _block_of(
    lists, item, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_M: gl.constexpr, TILE: gl.constexpr
):  # fmt: skip
    """Returns KV head, sequence, first line, rows, first row, keys before them, keys and tiles."""
    first_rows, nums_rows, prefix_lens, blocks, num_blocks = lists
    kv_head = item % KV_HEADS
    sequence = gl.load(blocks + item // KV_HEADS)
    first_line = gl.load(blocks + num_blocks + item // KV_HEADS) * BLOCK_M
    num_rows = gl.load(nums_rows + sequence)
    first_row = gl.load(first_rows + sequence)
    prefix_len = gl.load(prefix_lens + sequence)
    last_row = gl.minimum(num_rows - 1, (first_line + BLOCK_M - 1) // GROUP)
    end = prefix_len + last_row + 1
    num_tiles = (end + TILE - 1) // TILE
    return kv_head, sequence, first_line, num_rows, first_row, prefix_len, end, num_tiles


@gluon.jit
def _copy_tile(
    desc, pieces, ready, stage, table, tile, end, head_row,
    TILE: gl.constexpr, PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Copies one tile to shared memory. Behind the last key the last page is copied again."""
    PAGES: gl.constexpr = TILE // PAGE_SIZE
    HALVES: gl.constexpr = HEAD_DIM // 64
    PIECES: gl.constexpr = PAGES * HALVES
    mbarrier.expect(ready.index(stage), TILE * HEAD_DIM * 2)
    for page in gl.static_range(PAGES):
        key = tile * TILE + page * PAGE_SIZE
        number = gl.load(table + gl.minimum(key, end - 1) // PAGE_SIZE)
        for half in gl.static_range(HALVES):
            tma.async_copy_global_to_shared(
                desc, [head_row + number * PAGE_SIZE, half * 64], ready.index(stage),
                pieces.index(stage * PIECES + half * PAGES + page),
            )  # fmt: skip


@gluon.jit
def _copy_tiles(
    k_desc, v_desc, k_shared, v_shared, k_ready, k_free, v_ready, v_free, tables, table_stride, num_slots, lists,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_M: gl.constexpr, TILE: gl.constexpr, PAGE_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    PIECES: gl.constexpr = STAGES * (TILE // PAGE_SIZE) * (HEAD_DIM // 64)
    k_pieces = k_shared._reinterpret(k_desc.dtype, [PIECES, PAGE_SIZE, 64], k_desc.layout)
    v_pieces = v_shared._reinterpret(v_desc.dtype, [PIECES, PAGE_SIZE, 64], v_desc.layout)
    num_items = lists[4] * KV_HEADS
    count = 0
    for turn in range(gl.cdiv(num_items, gl.num_programs(0))):
        item = gl.program_id(0) + turn * gl.num_programs(0)
        if item < num_items:
            kv_head, sequence, _, _, _, _, end, num_tiles = _block_of(
                lists, item, GROUP, KV_HEADS, BLOCK_M, TILE
            )
            table = tables + sequence.to(gl.int64) * table_stride
            head_row = kv_head * num_slots
            for tile in range(num_tiles):
                stage = count % STAGES
                phase = (count // STAGES + 1) & 1
                count += 1
                mbarrier.wait(k_free.index(stage), phase)
                _copy_tile(
                    k_desc, k_pieces, k_ready, stage, table, tile, end, head_row, TILE, PAGE_SIZE, HEAD_DIM
                )  # fmt: skip
                mbarrier.wait(v_free.index(stage), phase)
                _copy_tile(
                    v_desc, v_pieces, v_ready, stage, table, tile, end, head_row, TILE, PAGE_SIZE, HEAD_DIM
                )  # fmt: skip


@gluon.jit
def soften(scores, start, best, newest, whole_end, scale, keys, DTYPE: gl.constexpr):
    """Returns the largest score, the factor of what was summed before, and the tile's weights.

    Tiles before `whole_end` have no key that a row does not see.
    """
    if start >= whole_end:
        scores = gl.where((start + keys)[None, :] <= newest[:, None], scores, float("-inf"))
    new_best = gl.maximum(best, gl.max(scores, 1) * scale)
    base = gl.where(new_best == float("-inf"), 0.0, new_best)
    weights = gl.exp2(gl.fma(scores, scale, -base[:, None])).to(DTYPE)
    shrink = gl.exp2(best - base)
    return new_best, shrink, weights


@gluon.jit
def _merge(best, total, acc, new_best, new_total, new_acc, COLUMN: gl.constexpr):
    top = gl.maximum(best, new_best)
    base = gl.where(top == float("-inf"), 0.0, top)
    old, new = gl.exp2(best - base), gl.exp2(new_best - base)
    total = gl.fma(total, old, new_total * new)
    old, new = gl.convert_layout(old, COLUMN), gl.convert_layout(new, COLUMN)
    return top, total, gl.fma(acc, old[:, None], new_acc * new[:, None])


@gluon.jit
def _compute(
    PART: gl.constexpr, q_ptr, out_ptr, q_shared, k_shared, v_shared, ones, k_ready, k_free, v_ready, v_free, lists,
    scale, q_row_stride, q_head_stride,
    LINES: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, NEAR: gl.constexpr, SMALL: gl.constexpr, LARGE: gl.constexpr,
):  # fmt: skip
    """Computes one half of the lines of each block."""
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    OF_SUMS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    COLUMN: gl.constexpr = gl.SliceLayout(1, ACC)
    WIDE: gl.constexpr = HEAD_DIM // 8
    IN_ORDER: gl.constexpr = gl.BlockedLayout([1, 8], [32 // WIDE, WIDE], [4, 1], [1, 0])
    q_shared = q_shared.index(PART)
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, IN_ORDER))
    keys = gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
    none = gl.full([LINES], float("-inf"), gl.float32, layout=ROW)
    no_scores = gl.zeros([LINES, TILE], gl.float32, layout=SCORES)
    no_sums = gl.zeros([LINES, 8], gl.float32, layout=SUMS)
    num_items = lists[4] * KV_HEADS
    count = 0  # tiles of earlier blocks
    for turn in range(gl.cdiv(num_items, gl.num_programs(0))):
        item = gl.program_id(0) + turn * gl.num_programs(0)
        if item < num_items:
            kv_head, _, first_line, num_rows, first_row, prefix_len, end, num_tiles = _block_of(
                lists, item, GROUP, KV_HEADS, 2 * LINES, TILE
            )  # fmt: skip
            first = first_line + PART * LINES
            line = first + gl.arange(0, LINES, layout=gl.SliceLayout(1, IN_ORDER))
            row = line // GROUP
            head = kv_head * GROUP + line % GROUP
            token = (first_row + row).to(gl.int64)
            q = gl.load(
                q_ptr + token[:, None] * q_row_stride + head[:, None] * q_head_stride + dims[None, :],
                mask=(row < num_rows)[:, None], other=0.0,
            )  # fmt: skip
            gl.thread_barrier()  # all have read the results of the block before
            q_shared.store(q)
            fence_async_shared()
            gl.thread_barrier()

            newest = prefix_len + (first + gl.arange(0, LINES, layout=ROW)) // GROUP
            whole_end = gl.minimum(prefix_len + first // GROUP + 1, end) // TILE * TILE
            best, all_best = none, none
            total = gl.zeros([LINES], gl.float32, layout=ROW)
            all_total = total
            acc = gl.zeros([LINES, HEAD_DIM], gl.float32, layout=ACC)
            all_acc = acc

            stage, phase = count % STAGES, (count // STAGES) & 1
            mbarrier.wait(k_ready.index(stage), phase)
            k = k_shared.index(stage).permute([1, 0])
            scores = warpgroup_mma(q_shared, k, no_scores, use_acc=False)
            mbarrier.arrive(k_free.index(stage), count=1)
            best, shrink, weights = soften(scores, 0, best, newest, whole_end, scale, keys, DTYPE)
            goes_on = num_tiles < 0  # whether a tile's sums are added to those of its segment
            for tile in range(0, num_tiles - 1):
                stage, phase = (count + tile) % STAGES, ((count + tile) // STAGES) & 1
                after = tile + 1
                next_stage, next_phase = (count + after) % STAGES, ((count + after) // STAGES) & 1
                mbarrier.wait(k_ready.index(next_stage), next_phase)
                k = k_shared.index(next_stage).permute([1, 0])
                scores = warpgroup_mma(q_shared, k, no_scores, use_acc=False, is_async=True)
                mbarrier.wait(v_ready.index(stage), phase)
                operand = gl.convert_layout(weights, OPERAND)
                acc = warpgroup_mma(
                    operand, v_shared.index(stage), acc, use_acc=goes_on, is_async=True
                )
                sums = warpgroup_mma(
                    gl.convert_layout(weights, OF_SUMS), ones.permute([1, 0]), no_sums, use_acc=False, is_async=True
                )  # fmt: skip
                scores, acc, sums, operand = warpgroup_mma_wait(
                    2, deps=[scores, acc, sums, operand]
                )
                mbarrier.arrive(k_free.index(next_stage), count=1)
                starts = _is_start(after * TILE, NEAR, SMALL, LARGE)
                segment_best = best
                best = gl.where(starts, none, best)
                best, next_shrink, next_weights = soften(
                    scores, after * TILE, best, newest, whole_end, scale, keys, DTYPE
                )
                acc, sums, operand = warpgroup_mma_wait(0, deps=[acc, sums, operand])
                sums = gl.convert_layout(gl.max(sums, 1), ROW)
                mbarrier.arrive(v_free.index(stage), count=1)
                total = gl.fma(total, shrink, sums)
                if starts:
                    all_best, all_total, all_acc = _merge(
                        all_best, all_total, all_acc, segment_best, total, acc, COLUMN
                    )
                    total = gl.zeros([LINES], gl.float32, layout=ROW)
                else:
                    acc = acc * gl.convert_layout(next_shrink, COLUMN)[:, None]
                goes_on = after * TILE % SMALL != 0
                if after * TILE >= NEAR:
                    goes_on = after * TILE % LARGE != 0
                weights = next_weights
                shrink = next_shrink
            tile = num_tiles - 1
            stage, phase = (count + tile) % STAGES, ((count + tile) // STAGES) & 1
            mbarrier.wait(v_ready.index(stage), phase)
            if num_tiles * TILE > end:  # behind the last key may be anything
                place = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, IN_ORDER))
                v = v_shared.index(stage).load(IN_ORDER)
                v_shared.index(stage).store(gl.where((place < end)[:, None], v, 0.0).to(DTYPE))
                fence_async_shared()
                gl.thread_barrier()
            operand = gl.convert_layout(weights, OPERAND)
            acc = warpgroup_mma(operand, v_shared.index(stage), acc, use_acc=goes_on, is_async=True)
            sums = warpgroup_mma(
                gl.convert_layout(weights, OF_SUMS), ones.permute([1, 0]), no_sums, use_acc=False, is_async=True
            )  # fmt: skip
            acc, sums = warpgroup_mma_wait(0, deps=[acc, sums])
            sums = gl.convert_layout(gl.max(sums, 1), ROW)
            mbarrier.arrive(v_free.index(stage), count=1)
            total = gl.fma(total, shrink, sums)
            all_best, all_total, all_acc = _merge(
                all_best, all_total, all_acc, best, total, acc, COLUMN
            )
            # Queries make room for results, which leave in the order of memory.
            result = (all_acc / gl.convert_layout(all_total, COLUMN)[:, None]).to(DTYPE)
            q_shared.store(result)
            gl.thread_barrier()
            place = (token * (KV_HEADS * GROUP) + head) * HEAD_DIM
            gl.store(
                out_ptr + place[:, None] + dims[None, :], q_shared.load(IN_ORDER), mask=(row < num_rows)[:, None]
            )  # fmt: skip
            count += num_tiles


_UNSPECIALIZED = (
    "num_blocks", "num_slots", "table_stride", "tables", "first_rows", "nums_rows", "prefix_lens", "blocks"
)  # fmt: skip


@gluon.jit(do_not_specialize=_UNSPECIALIZED)
def attend_prompts(
    q_ptr, k_desc, v_desc, out_ptr, tables, first_rows, nums_rows, prefix_lens, blocks, num_blocks,
    scale, q_row_stride, q_head_stride, num_slots, table_stride,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_M: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr, NEAR: gl.constexpr, SMALL: gl.constexpr, LARGE: gl.constexpr,
):  # fmt: skip
    """Computes blocks of causal rows, each under one KV head.

    Line m of a block is row m // GROUP of the sequence under query head m % GROUP of the group.

    Args:
        k_desc, v_desc: See `pages_of`.
        blocks: int32 [2, num_blocks], sequence and block of lines.
        num_slots: Slots of a KV head.
        STAGES: Number of tiles of keys, and of values, in shared memory.
    """
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    LINES: gl.constexpr = BLOCK_M // 2
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_shared = gl.allocate_shared_memory(DTYPE, [2, LINES, HEAD_DIM], SHARED)
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
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()
    gl.thread_barrier()
    lists = (first_rows, nums_rows, prefix_lens, blocks, num_blocks)
    gl.warp_specialize(
        [
            (_compute, (
                gl.constexpr(0), q_ptr, out_ptr, q_shared, k_shared, v_shared, ones, k_ready, k_free, v_ready, v_free,
                lists, scale, q_row_stride, q_head_stride,
                LINES, GROUP, KV_HEADS, HEAD_DIM, TILE, STAGES, NEAR, SMALL, LARGE,
            )),
            (_compute, (
                gl.constexpr(1), q_ptr, out_ptr, q_shared, k_shared, v_shared, ones, k_ready, k_free, v_ready, v_free,
                lists, scale, q_row_stride, q_head_stride,
                LINES, GROUP, KV_HEADS, HEAD_DIM, TILE, STAGES, NEAR, SMALL, LARGE,
            )),
            (_copy_tiles, (
                k_desc, v_desc, k_shared, v_shared, k_ready, k_free, v_ready, v_free, tables, table_stride, num_slots,
                lists, GROUP, KV_HEADS, BLOCK_M, TILE, PAGE_SIZE, HEAD_DIM, STAGES,
            )),
        ],
        [4, 1],  # warps of the second and the third part
        [240, 24],  # registers of their threads; the first part has what is left
    )  # fmt: skip
