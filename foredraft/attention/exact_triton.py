"""Attention on NVIDIA GPUs that gives a row the same bits whatever else is in the step.

`exact_tile_kernels` fixes the arithmetic. A program computes one segment of keys, or with enough
rows all segments of a block of rows. Neither this choice nor the size of a block changes a bit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from foredraft.attention.base import AttentionBackend, Batch, ForwardSizes
from foredraft.attention.segments import (
    LARGE,
    NEAR,
    SMALL,
    TILE,
    PartialSums,
    SegmentKernel,
    segment_of,
)
from foredraft.attention.triton_plan import (
    SharedKeys,
    TreePaths,
    TritonPlan,
    plan_of_spans,
    rows_outside_graphs,
)
from foredraft.device_limits import compute_units, has_room
from foredraft.kernel_launch import VARIANTS, few_variants, overlapped, power_of_two
from foredraft.kvcache.paged_kv import PagedKV

# Maximum number of keys of a sequence whose segments one program computes, where other sequences
# keep the device busy.
_SHORT = 2048
_PROGRAMS_PER_UNIT = 8  # maximum number of programs that segments are distributed to
_MOST_PART_BYTES = 256 << 20  # maximum size of partial sums stored for another kernel
# Maximum number of programs per unit for rows of trees that gain more from many registers than from
# running beside others.
_AHEAD_PER_UNIT = 2
_NODES = 64  # rows of a tree that are read at a time
_AT_ONCE = 4  # number of segments that are loaded for a row of a tree before one is merged
_MOST_AT_ONCE = 64  # number of those times rows of a block, where each row has all heads of a group
_GRAIN = 16  # number of keys that the matrix units add at a time
_OWN = 64  # columns for keys of the paths of a tree
# Rows up to which what reads the result may start before `attend` has ended: products of 4 bits fetch
# weights meanwhile.
_EARLY_ROWS = 4
TREE_LINES = 32  # size of a block where one program computes a tree's paths too


@dataclass(frozen=True, slots=True)
class _Layout:
    """Describes how a step of one shape is cut into programs.

    Attributes:
        block_m: Number of lines of a block: rows times query heads of a KV head.
        row_blocks: Number of blocks of each sequence, where blocks are not listed.
        num_blocks: Number of blocks in all.
        num_splits: Number of programs that the segments of a block are distributed to; 1 where one
            program computes all of them.
        limit: Maximum number of keys of a sequence whose segments one program computes, though
            `num_splits` is more; 0 if there is no such sequence.
        num_slots: Number of sums stored for each row and head.
        shared_splits: Number of programs that the shared segments of some sequences are distributed
            to; 0 without shared keys.
    """

    block_m: int
    row_blocks: int
    num_blocks: int
    num_splits: int
    limit: int
    num_slots: int
    shared_splits: int = 0


class ExactAttention(AttentionBackend):
    """Computes attention for a target whose texts must not depend on what else is computed.

    Args:
        segments: Computes segments where it can; None for nothing but Triton.
    """

    def __init__(self, segments: SegmentKernel | None = None) -> None:
        self._segments = segments

    def block_rows(self, max_rows: int, group_size: int, dtype: torch.dtype, kv: PagedKV) -> int:
        """See AttentionBackend."""
        return _block_lines(max_rows * group_size, dtype, kv)

    def shared_rows(self, num_rows: int, group_size: int, dtype: torch.dtype, kv: PagedKV) -> int:
        """See AttentionBackend."""
        return _block_lines(num_rows * group_size, dtype, kv) // group_size

    def cuts_keys(
        self, batch: int, max_rows: int, num_keys: int, group_size: int, kv: PagedKV
    ) -> bool:
        """See AttentionBackend."""
        num_lines = batch * max_rows * group_size
        with few_variants(cut_keys=True):
            max_rows = rows_outside_graphs(max_rows, group_size)
            block_m = _block_lines(max_rows * group_size, kv.data.dtype, kv)
            programs = batch * -(-max_rows * group_size // block_m)
            return _num_splits(programs, block_m, num_keys, num_lines, kv) > 1

    def partial_bytes(self, sizes: ForwardSizes, device: torch.device) -> int:
        """See AttentionBackend."""
        slot = sizes.num_rows * sizes.num_heads * _part_bytes(sizes.head_dim)
        found = min(_MOST_PART_BYTES, slot * (segment_of(sizes.num_keys - 1) + 1))
        return found if sizes.cuts_keys else 0

    def plan(
        self, batch: Batch, kv: PagedKV, windows: Sequence[int | None], group_size: int
    ) -> TritonPlan:
        """See AttentionBackend.

        Rows must follow the prefix at once, and the prefix must be whole.
        """
        if batch.plan is None:
            plan = plan_of_spans(batch, kv, group_size)
        else:
            plan = cast(TritonPlan, batch.plan)
        if plan.tail_mask is not None:
            plan.paths = _find_paths(plan, group_size, batch.num_rows)
        if None in windows:
            plan.segments = self._plan_segments(plan, group_size, batch.num_rows)
        return plan

    def _plan_segments(self, plan: TritonPlan, group_size: int, num_tokens: int) -> Any:
        if self._segments is None or plan.shared is not None or VARIANTS.are_few:
            return None
        layout = _layout(plan, None, group_size, num_tokens, plan.kv.data.dtype)
        if layout.num_splits == 1:
            return None
        return self._segments.plan(plan, group_size, layout.limit)

    def attend(
        self,
        plan: TritonPlan,
        queries: torch.Tensor,
        layer: int,
        window: int | None,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """See AttentionBackend. Reads no value of the device, so that it can be captured."""
        from foredraft.attention import exact_fold_kernels, exact_kernels

        kv = plan.kv
        keys, values = kv.keys(layer), kv.values(layer)
        num_tokens, num_heads, head_dim = queries.shape
        kv_heads = keys.shape[0]
        group = num_heads // kv_heads
        shared = plan.shared if window is None else None
        layout = _layout(plan, shared, group, num_tokens, queries.dtype)
        segments = plan.segments if window is None and queries.dtype == kv.data.dtype else None
        num_parts = num_tokens * num_heads * layout.num_slots
        parts = out.new_empty((num_parts, head_dim), dtype=torch.float32)
        best, total = (out.new_empty(num_parts, dtype=torch.float32) for _ in range(2))
        k_scale, v_scale = kv.scales[layer]
        arrays = (queries, keys, values, out, parts, best, total)
        lengths = plan.first_row, plan.num_rows, plan.prefix_len, plan.positions
        unread = plan.first_row  # stands for tensors that a launch does not read
        shared_keys = unread if shared is None else shared.keys
        scales = (
            scale * k_scale * math.log2(math.e), v_scale, window or 0, keys.stride(0), queries.stride(0),
            queries.stride(1), layout.num_slots,
        )  # fmt: skip
        is_split, is_branched = layout.num_splits > 1, plan.tail_mask is not None
        paths = plan.paths or TreePaths(unread[:, None], unread, unread, unread[:, None])
        of_leaves = paths.row_leaves, paths.leaf_ends, paths.leaf_slots
        room = has_room(keys.device)
        options: dict[str, Any] = {
            "GROUP": group, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "BLOCK_D": max(16, power_of_two(head_dim)),
            "WINDOWED": window is not None, "BRANCHED": is_branched, "EIGHT_BIT": kv.is_8_bit,
            "PRECISION": "ieee" if queries.dtype == torch.float32 else "tf32",
            "TILE": TILE, "TILES": paths.slots.shape[1] // TILE, "NEAR": NEAR, "SMALL": SMALL, "LARGE": LARGE,
            "BEHIND": shared is not None,
        } | overlapped(keys.device)  # fmt: skip
        for_tiles = {
            "PAGE_SIZE": kv.page_size, "OWN": _OWN, "GRAIN": TILE if kv.is_8_bit else _GRAIN, "HAS_ROOM": room,
            "LEAF_ROWS": _leaf_rows(group),
        }  # fmt: skip
        if shared is not None:
            block_m = _block_lines(num_tokens * group, queries.dtype, kv)
            others = options | for_tiles | {"BRANCHED": False, "BEHIND": False}
            exact_kernels.attend[(len(shared.num_rows), kv_heads, layout.shared_splits)](
                *arrays, shared.page_tables, *of_leaves, shared.first_row, shared.num_rows, shared.num_keys, plan.positions,
                shared.keys, *scales, 0, unread, 1, shared.row_index, shared.page_tables.stride(0),
                layout.shared_splits, **others, BLOCK_M=block_m, SPLIT=True, TOGETHER=False, LISTED=False, SHARED=True,
                AT_ONCE=1, **_warps_and_stages(block_m, head_dim, queries.dtype, room),
            )  # fmt: skip
        if segments is not None:
            assert self._segments is not None
            sums = PartialSums(parts, best, total, layout.num_slots)
            self._segments.attend(segments, plan, queries, layer, scales[0], sums)
        if segments is None or layout.limit:
            splits = layout.num_splits if segments is None else 1
            blocks = unread if plan.blocks is None else plan.blocks
            exact_kernels.attend[(layout.num_blocks, kv_heads, splits)](
                *arrays, plan.page_tables, *of_leaves, *lengths, shared_keys, *scales, layout.limit, blocks, layout.row_blocks,
                unread, plan.page_tables.stride(0), splits, **options, **for_tiles,
                BLOCK_M=layout.block_m, SPLIT=splits > 1, TOGETHER=splits == 1 or layout.limit > 0,
                LISTED=plan.blocks is not None, SHARED=False, AT_ONCE=max(1, _MOST_AT_ONCE // layout.block_m),
                **_warps_and_stages(layout.block_m, head_dim, queries.dtype, room),
            )  # fmt: skip
        if not is_split:
            return
        heads = group if is_branched else 1
        is_ahead = (
            not VARIANTS.are_few
            and num_tokens * kv_heads <= _AHEAD_PER_UNIT * compute_units(kv.data.device)
        )
        exact_fold_kernels.fold[(len(plan.num_rows) * plan.max_rows, num_heads // heads)](
            *arrays, paths.slots, *lengths, shared_keys, *scales, layout.limit, plan.max_rows, **options,
            EARLY=num_tokens <= _EARLY_ROWS and not VARIANTS.are_few, HEADS=heads, BLOCK_H=max(16, power_of_two(group)) if is_branched else 1,
            AHEAD=is_ahead, AT_ONCE=_AT_ONCE if is_branched else 1, num_warps=(4 if is_ahead else 2) if is_branched else 1,
            num_stages=2 if is_ahead else 3,
        )  # fmt: skip


def _block_lines(num_lines: int, dtype: torch.dtype, kv: PagedKV) -> int:
    """Returns the number of lines of a block for sequences of up to `num_lines`; a line is a row
    under one query head.
    """
    if dtype == torch.float32:  # no matrix units: small tiles and many threads, or registers spill
        return 16
    most = 64 if kv.data.shape[-1] > 128 or num_lines <= 256 else 128
    if kv.is_8_bit:
        # Triton feeds converted 8-bit numbers to the matrix units in one order for smaller blocks
        # and in another for larger ones.
        most = 32
    return min(most, max(16, power_of_two(num_lines)))


def _warps_and_stages(
    block_m: int, head_dim: int, dtype: torch.dtype, has_room: bool
) -> dict[str, int]:
    if dtype == torch.float32:
        return {"num_warps": 8, "num_stages": 1}
    wide = head_dim > 128
    return {
        "num_warps": 8 if block_m == 128 or (wide and block_m == 64) else 4,
        "num_stages": (2 if has_room else 1) if wide else 3 if has_room or block_m < 128 else 2,
    }


def _layout(
    plan: TritonPlan, shared: SharedKeys | None, group: int, num_tokens: int, dtype: torch.dtype
) -> _Layout:
    """Decides how a step is cut; depends on `VARIANTS` of this thread."""
    kv = plan.kv
    is_branched = plan.tail_mask is not None
    block_m = _block_lines(plan.max_rows * group, dtype, plan.kv)
    row_blocks = -(-plan.max_rows * group // block_m)
    num_blocks = len(plan.num_rows) * row_blocks
    if plan.blocks is not None:
        num_blocks = plan.blocks.shape[1]
    if is_branched and plan.blocks is None:
        small = min(block_m, TREE_LINES)
        small_blocks = -(-plan.max_rows * group // small)
        in_all = len(plan.num_rows) * small_blocks
        if VARIANTS.are_few or in_all * kv.num_kv_heads >= compute_units(kv.data.device):
            block_m, row_blocks, num_blocks = small, small_blocks, in_all
    num_keys = plan.page_tables.shape[1] * kv.page_size
    num_splits = 1
    if plan.blocks is None and not (VARIANTS.are_few and (is_branched or not VARIANTS.cut_keys)):
        num_splits = _num_splits(num_blocks, block_m, num_keys, num_tokens * group, kv)
    num_slots = shared_splits = 0
    if num_splits > 1 or shared is not None:
        num_slots = segment_of(num_keys - 1) + 1
    if shared is not None:
        slot_bytes = num_tokens * group * kv.num_kv_heads * _part_bytes(kv.data.shape[-1])
        num_slots = min(num_slots, _MOST_PART_BYTES // slot_bytes)
        shared_splits = _splits_of(len(shared.num_rows), num_slots, kv)
    is_busy = num_blocks * kv.num_kv_heads >= compute_units(kv.data.device)
    limit = _SHORT if num_splits > 1 and (VARIANTS.are_few or is_busy) else 0
    return _Layout(block_m, row_blocks, num_blocks, num_splits, limit, num_slots, shared_splits)


def _num_splits(num_blocks: int, block_m: int, num_keys: int, num_lines: int, kv: PagedKV) -> int:
    """Returns the number of programs that the segments of a block of rows are distributed to.

    Args:
        num_blocks: Number of blocks of rows.
        num_lines: Number of rows times query heads of a KV head.
    """
    in_all, units = num_blocks * kv.num_kv_heads, compute_units(kv.data.device)
    num_segments = segment_of(num_keys - 1) + 1
    part_bytes = num_lines * kv.num_kv_heads * num_segments * _part_bytes(kv.data.shape[-1])
    is_many = block_m == 128 and 2 * in_all >= units  # storing the sums of all rows would take long
    is_short = VARIANTS.are_few and num_keys <= _SHORT
    if is_many or is_short or part_bytes > _MOST_PART_BYTES:
        return 1
    return _splits_of(num_blocks, num_segments, kv)


def _splits_of(num_blocks: int, num_segments: int, kv: PagedKV) -> int:
    most = _PROGRAMS_PER_UNIT * compute_units(kv.data.device)
    return max(1, min(num_segments, most // (num_blocks * kv.num_kv_heads)))


def _part_bytes(head_dim: int) -> int:
    """Returns the bytes of a row's partial sum of one head: numbers, maximum and total."""
    return (head_dim + 2) * 4


def _leaf_rows(group: int) -> int:
    """Returns the number of rows among which rows of a tree share a leaf: those of a block, if
    blocks are of whole rows.
    """
    return 1 << (max(1, TREE_LINES // group).bit_length() - 1)


def _find_paths(plan: TritonPlan, group: int, num_tokens: int) -> TreePaths:
    """Finds the keys that each row of a tree sees from the last whole tile before the tree on.

    Runs once per forward.
    """
    from foredraft.attention import exact_fold_kernels

    mask, tail_positions, kv = plan.tail_mask, plan.tail_positions, plan.kv
    assert mask is not None
    assert tail_positions is not None
    tiles = -(-(TILE - 1 + mask.shape[1]) // TILE)
    # Programs enumerate blocks as in `fold`; listed blocks have the size of their list.
    block_m = _block_lines(plan.max_rows * group, kv.data.dtype, kv)
    row_blocks = -(-plan.max_rows * group // block_m)
    programs = plan.blocks.shape[1] if plan.blocks is not None else len(plan.num_rows) * row_blocks
    per_row = ((tiles * TILE,), (), (), (tiles * TILE,))
    paths = TreePaths(
        *(torch.empty(num_tokens, *n, dtype=torch.int32, device=kv.data.device) for n in per_row)
    )
    exact_fold_kernels.find_paths[(programs * (block_m // group + 1),)](
        paths.slots, paths.row_leaves, paths.leaf_ends, paths.leaf_slots, plan.page_tables, plan.first_row, plan.num_rows, plan.prefix_len, plan.positions,
        plan.first_row if plan.blocks is None else plan.blocks, mask.view(torch.uint8), tail_positions,
        row_blocks, plan.page_tables.stride(0), mask.stride(0), mask.shape[1], tail_positions.stride(0), kv.page_size,
        GROUP=group, BLOCK_M=block_m, LISTED=plan.blocks is not None, TILE=TILE, TILES=tiles,
        NODES=_NODES, LEAF_ROWS=_leaf_rows(group),
    )  # fmt: skip
    return paths
