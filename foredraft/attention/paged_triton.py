"""Attention on NVIDIA GPUs by the Triton kernels of `triton_kernels`, imported on first use."""

import math
from collections.abc import Sequence
from typing import cast

import torch

from foredraft.attention.base import AttentionBackend, Batch, ForwardSizes
from foredraft.attention.split_kv import SPARE, Balance, Lengths, Levels, WorkList, build_work_lists
from foredraft.attention.triton_plan import (
    MAX_SPLITS,
    PROGRAMS_PER_UNIT,
    TritonPlan,
    plan_of_spans,
    splits_for,
)
from foredraft.device_limits import compute_units, has_room
from foredraft.kernel_launch import VARIANTS, overlapped, power_of_two
from foredraft.kvcache.paged_kv import PagedKV

_LARGEST_TILE = 128  # maximum rows times query heads of a KV head of a program
# Sums of the parts of the keys, their maxima and totals; see `triton_kernels.attend`.
_PartialSums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class TritonAttention(AttentionBackend):
    """Computes attention in one kernel per layer, and in a second one that adds up parts of the
    keys.
    """

    def block_rows(self, max_rows: int, group_size: int, dtype: torch.dtype, kv: PagedKV) -> int:
        """See AttentionBackend. Keys are not cut into parts then."""
        room, head_dim = has_room(kv.data.device), kv.data.shape[-1]
        return _tiles(max_rows * group_size, head_dim, dtype, kv.is_8_bit, 1, room)["BLOCK_M"]

    def cuts_keys(
        self, batch: int, max_rows: int, num_keys: int, group_size: int, kv: PagedKV
    ) -> bool:
        """See AttentionBackend."""
        return splits_for(batch, max_rows, kv, num_keys, group_size) > 1

    def partial_bytes(self, sizes: ForwardSizes, device: torch.device) -> int:
        """See AttentionBackend."""
        if not sizes.cuts_keys:
            return 0
        # Keys are cut only until so many programs keep the device busy; work lists have spare ones.
        programs = max(PROGRAMS_PER_UNIT * compute_units(device), 2 * SPARE * sizes.num_kv_heads)
        return programs * _LARGEST_TILE * (sizes.head_dim + 2) * 4

    def plan(
        self, batch: Batch, kv: PagedKV, windows: Sequence[int | None], group_size: int
    ) -> TritonPlan:
        """See AttentionBackend.

        Returns the batch's own plan if it has one, else uploads one made from its spans.
        """
        if batch.plan is not None:
            plan = cast(TritonPlan, batch.plan)
            balance = plan.balance
            if balance is not None and plan.level == 0:
                balance.work_lists = {
                    each: _work_lists(plan, balance, each, group_size) for each in set(windows)
                }
            return plan
        return plan_of_spans(batch, kv, group_size)

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
        from foredraft.attention import triton_kernels

        kv, splits = plan.kv, plan.num_splits
        keys, values = kv.keys(layer), kv.values(layer)
        num_tokens, num_heads, head_dim = queries.shape
        num_kv_heads = keys.shape[0]
        group = num_heads // num_kv_heads
        work = plan.balance.work_lists[window][plan.level] if plan.balance is not None else None
        tiles = _plan_tiles(plan, group, queries.dtype)
        row_blocks = -(-plan.max_rows * group // tiles["BLOCK_M"])
        blocks = plan.blocks
        programs = plan.num_rows.shape[0] * row_blocks if blocks is None else blocks.shape[1]
        grid = (programs, num_kv_heads, splits)
        mask = plan.tail_mask
        sums: _PartialSums = (out, out, out)  # not read where there is one part
        if work is not None:
            grid = (num_kv_heads, work.items.shape[0], 1)
            lines = work.num_parts * num_kv_heads * tiles["BLOCK_M"]
            sums = (
                out.new_empty((lines, head_dim), dtype=torch.float32),
                out.new_empty(lines, dtype=torch.float32),
                out.new_empty(lines, dtype=torch.float32),
            )
        elif splits > 1:
            shape = (num_tokens, num_heads, splits)
            both = out.new_empty((2, *shape), dtype=torch.float32)
            sums = (out.new_empty((*shape, head_dim), dtype=torch.float32), both[0], both[1])
        parts, best, total = sums
        k_scale, v_scale = kv.scales[layer]
        options = overlapped(keys.device)
        block_d = max(16, power_of_two(head_dim))
        triton_kernels.attend[grid](
            queries, keys, values, out, parts, best, total,
            plan.page_tables, plan.first_row, plan.num_rows, plan.prefix_start, plan.prefix_len,
            plan.write_index, plan.positions,
            plan.positions if mask is None else mask.view(torch.uint8),
            plan.positions if plan.is_causal is None else plan.is_causal,
            plan.positions if plan.tail_positions is None else plan.tail_positions,
            plan.first_row if blocks is None else blocks,
            plan.first_row if work is None else work.items, plan.first_row if work is None else work.counters,
            scale * k_scale * math.log2(math.e), v_scale, window or 0, keys.stride(0), queries.stride(0),
            queries.stride(1), plan.page_tables.stride(0),
            0 if mask is None else mask.stride(0), 0 if mask is None else mask.shape[1],
            0 if plan.tail_positions is None else plan.tail_positions.stride(0), row_blocks, splits,
            GROUP=group, KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PAGE_SIZE=kv.page_size,
            BLOCK_D=block_d, SPLIT=splits > 1 and work is None, WINDOWED=window is not None, MASKED=mask is not None, MIXED=plan.is_causal is not None,
            PLACED=plan.tail_positions is not None, LISTED=blocks is not None,
            WORK_LIST=work is not None, JOINS=work is not None and work.joins, EIGHT_BIT=kv.is_8_bit,
            PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
            **tiles, **options,
        )  # fmt: skip
        if work is None:
            if splits > 1:
                _combine_splits(sums, out, head_dim)
        elif not work.joins:
            _combine_items(plan, work, sums, out, group)


def _combine_splits(sums: _PartialSums, out: torch.Tensor, head_dim: int) -> None:
    """Adds up the parts of sequences that are all cut into the same number of them."""
    from foredraft.attention import triton_kernels

    parts, best, total = sums
    num_tokens, num_heads, splits = best.shape
    # With few rows each program takes one head.
    heads = math.gcd(num_heads, 8) if num_tokens >= 64 and splits <= 4 else 1
    chunk = splits
    if VARIANTS.are_few:
        heads, chunk = 1, MAX_SPLITS
    triton_kernels.combine[(num_tokens, num_heads // heads)](
        out, parts, best, total, splits,
        HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_H=heads, BLOCK_D=max(16, power_of_two(head_dim)),
        CHUNK=chunk, WHOLE=chunk == splits and not VARIANTS.are_few,
        num_warps=4 if chunk * heads > 4 else 2, **overlapped(out.device),
    )  # fmt: skip


def _combine_items(
    plan: TritonPlan, work: WorkList, sums: _PartialSums, out: torch.Tensor, group: int
) -> None:
    """Adds up the parts of a work list, for the sequences that have several."""
    from foredraft.attention import triton_kernels

    (parts, best, total), head_dim = sums, sums[0].shape[-1]
    kv_heads, block_m = plan.kv.num_kv_heads, work.tiles["BLOCK_M"]
    lines = min(block_m, plan.max_rows * group)
    # With few rows each program takes one line.
    each = math.gcd(lines, 4) if out.shape[0] >= 64 and work.chunk <= 8 else 1
    triton_kernels.combine_items[(len(work.pairs), kv_heads, -(-lines // each))](
        out, parts, best, total, work.items, work.pairs,
        GROUP=group, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_M=block_m, BLOCK_D=max(16, power_of_two(head_dim)),
        LINES=each, CHUNK=work.chunk, num_warps=4 if work.chunk * each > 8 else 2, **overlapped(out.device),
    )  # fmt: skip


def _plan_tiles(plan: TritonPlan, group: int, dtype: torch.dtype) -> dict[str, int]:
    kv = plan.kv
    return _tiles(
        plan.max_rows * group,
        kv.data.shape[-1],
        dtype,
        kv.is_8_bit,
        plan.num_splits,
        has_room(kv.data.device),
    )


def _work_lists(
    plan: TritonPlan, balance: Balance, window: int | None, group: int
) -> list[WorkList]:
    kv, tiles = plan.kv, _plan_tiles(plan, group, balance.dtype)
    levels = balance.levels
    if levels is None:
        levels = Levels(plan.prefix_len[None], plan.write_index[None], plan.positions[None])
    return build_work_lists(
        Lengths(
            plan.first_row,
            plan.num_rows,
            plan.prefix_start,
            levels.prefix_len,
            levels.write_index,
            levels.positions,
        ),
        max_rows=plan.max_rows,
        group=group,
        kv_heads=kv.num_kv_heads,
        splits=plan.num_splits,
        tiles=tiles,
        window=window,
        is_masked=plan.tail_mask is not None,
    )


def _tiles(
    folded_rows: int,
    head_dim: int,
    dtype: torch.dtype,
    eight_bit: bool,
    splits: int,
    has_room: bool,
) -> dict[str, int]:
    """Returns rows and keys of a tile, warps and stages: the fastest of a sweep on an H200 with
    heads of 128. Smaller heads leave room.
    """
    if dtype == torch.float32:  # no matrix units: small tiles and many threads, or registers spill
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 8, "num_stages": 1, "PACKED": False}
    wide = head_dim > 128
    block_m = max(16, power_of_two(folded_rows))
    # For a tree's rows two tiles side by side are faster than one; for a long chunk, whose keys are
    # read again for each tile, larger tiles are.
    block_m = min(block_m, 64 if wide or folded_rows <= 256 else 128)
    # All stages but one hold keys and values that are being loaded; more stages leave room for
    # fewer programs.
    block_n, stages = 64, 3 if eight_bit or block_m < 128 or has_room else 2
    if wide:
        block_n, stages = 32, 2
    elif block_m <= 32:
        block_n = 128 if eight_bit else 32
    elif block_m == 64 and not eight_bit:
        block_n, stages = (64, 2) if splits > 1 else (32, 3)
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": 8 if block_m == 128 or (wide and block_m == 64) else 4,
        "num_stages": stages,
        "PACKED": eight_bit and block_m <= 32 and head_dim >= 64 and head_dim % 4 == 0,
    }
