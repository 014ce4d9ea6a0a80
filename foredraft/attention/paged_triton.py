"""Attention on NVIDIA GPUs by the Triton kernels of `triton_kernels`, imported on first use."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from foredraft.attention.base import AttentionBackend, Batch, ForwardSizes, SequenceSpan
from foredraft.attention.split_kv import SPARE, Balance, Lengths, Levels, WorkList, build_work_lists
from foredraft.kernel_launch import VARIANTS, overlapped, power_of_two
from foredraft.kvcache.paged_kv import PagedKV

MAX_SPLITS = 32
# Minimum number of keys for a program; with few rows it waits for memory, with many it
# computes.
MIN_KEYS_FEW_ROWS, MIN_KEYS_MANY_ROWS = 64, 1024
# Maximum rows times query heads of a KV head for which tiles have several sizes.
_SMALL_TILES = 32
FEW_ROWS = 16  # maximum rows times query heads of a KV head that count as few
_PROGRAMS_PER_UNIT = 4  # maximum number of programs per unit that a sequence's keys are cut for
_LARGEST_TILE = 128  # maximum rows times query heads of a KV head of a program
# Compute units assumed where there is no GPU, which is where Triton's interpreter runs the kernels.
_INTERPRETED_UNITS = 16


@dataclass(slots=True)
class TritonPlan:
    """Describes a batch of B sequences with T rows to the kernels; all tensors are on the device.

    A CUDA graph makes its own from buffers whose content changes between replays. A sequence
    without rows is padding.

    Attributes:
        page_tables: int32 [B, P], page tables.
        first_row, num_rows, prefix_start, prefix_len, write_index: int32 [B], see `SequenceSpan`.
        positions: int64 [T], absolute positions of the rows.
        tail_mask: bool or uint8 [T, W]: which keys from prefix_len on each row sees. None where all
            rows are causal.
        is_causal: int8 [B]: whether the mask does not apply to a sequence; None if it applies to
            all.
        tail_positions: int32 [B, W]: positions of those keys; None where they equal the key
            indexes.
        max_rows: Maximum number of rows of a sequence.
        num_splits: Number of parts that keys are cut into and computed side by side; a power of
            two. See `splits_for`.
        blocks: int32 [2, N]: sequence and block of rows of each program, see
            `AttentionBackend.block_rows`; a block after the sequence's last is padding. None gives
            each sequence as many blocks as `max_rows` need.
        balance: Builds split-KV work lists on the device, with the plan of level 0; see
            `TritonAttention.plan`. None cuts each sequence into `num_splits` parts. Not with
            `blocks` or `is_causal`.
        level: Index of this plan's level in `balance`.
        tails: Slots of the keys that each row of a tree sees from the last whole tile before the
            tree on; for `exact_triton` only.
    """

    kv: PagedKV
    page_tables: torch.Tensor
    first_row: torch.Tensor
    num_rows: torch.Tensor
    prefix_start: torch.Tensor
    prefix_len: torch.Tensor
    write_index: torch.Tensor
    positions: torch.Tensor
    tail_mask: torch.Tensor | None
    is_causal: torch.Tensor | None
    tail_positions: torch.Tensor | None
    max_rows: int
    num_splits: int
    blocks: torch.Tensor | None = None
    balance: Balance | None = None
    level: int = 0
    tails: torch.Tensor | None = None


def splits_for(batch: int, max_rows: int, kv: PagedKV, max_tokens: int, group_size: int = 4) -> int:
    """Returns the number of parts to cut keys into, so that all parts keep the device busy.

    The numbers are the fastest of a sweep on an H200 over batches of 1, 8 and 32 sequences with 1,
    4 and 32 rows.

    Args:
        batch: Number of sequences.
        max_rows: Maximum number of rows of a sequence.
        kv: The cache.
        max_tokens: Maximum number of keys of a sequence.
        group_size: Query heads per KV head.
    """
    units = _units(kv.data.device)
    folded = max_rows * group_size
    programs = max(1, batch) * kv.num_kv_heads * -(-folded // 64)
    if folded <= FEW_ROWS:  # several programs run on a unit at a time
        # Adding up the parts costs more with more rows. A unit holds three of the larger 8-bit
        # tiles.
        per_unit = 2 if max_rows > 1 else 3 if kv.is_8_bit else _PROGRAMS_PER_UNIT
        wanted = min(per_unit * units // programs, max_tokens // MIN_KEYS_FEW_ROWS)
    else:
        wanted = min(2 * units // programs, max_tokens // MIN_KEYS_MANY_ROWS)
    return 1 << max(0, min(MAX_SPLITS, wanted).bit_length() - 1)


def _units(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_UNITS
    return torch.cuda.get_device_properties(device).multi_processor_count


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
        programs = max(_PROGRAMS_PER_UNIT * _units(device), 2 * SPARE * sizes.num_kv_heads)
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
        at_once: bool = False,
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
        parts: Any = out  # not read where there is one part
        best: Any = out
        total: Any = out
        if work is not None:
            grid = (num_kv_heads, work.items.shape[0], 1)
            lines = work.num_parts * num_kv_heads * tiles["BLOCK_M"]
            parts = out.new_empty((lines, head_dim), dtype=torch.float32)
            best, total = (out.new_empty(lines, dtype=torch.float32) for _ in range(2))
        elif splits > 1:
            shape = (num_tokens, num_heads, splits)
            parts = out.new_empty((*shape, head_dim), dtype=torch.float32)
            best, total = out.new_empty((2, *shape), dtype=torch.float32)
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
        if work is not None:
            if not work.joins:
                self._combine_items(plan, work, out, parts, best, total, group, head_dim)
        elif splits > 1:
            # With few rows each program takes one head.
            heads = math.gcd(num_heads, 8) if num_tokens >= 64 and splits <= 4 else 1
            chunk = splits
            if VARIANTS.are_few:
                heads, chunk = 1, MAX_SPLITS
            triton_kernels.combine[(num_tokens, num_heads // heads)](
                out, parts, best, total, splits,
                HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_H=heads, BLOCK_D=block_d,
                CHUNK=chunk, WHOLE=chunk == splits and not VARIANTS.are_few,
                num_warps=4 if chunk * heads > 4 else 2, **options,
            )  # fmt: skip

    @staticmethod
    def _combine_items(
        plan: TritonPlan,
        work: WorkList,
        out: torch.Tensor,
        parts: torch.Tensor,
        best: torch.Tensor,
        total: torch.Tensor,
        group: int,
        head_dim: int,
    ) -> None:
        from foredraft.attention import triton_kernels

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


@functools.cache
def has_room(device: torch.device) -> bool:
    """Returns whether a program may use 128 KiB of shared memory; sm_86, sm_89 and sm_120 have 99."""
    if device.type != "cuda":
        return True
    capability = torch.cuda.get_device_capability(device)
    return (9, 0) <= capability < (12, 0) or capability in ((8, 0), (8, 7))


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


def plan_of_spans(batch: Batch, kv: PagedKV, group_size: int) -> TritonPlan:
    spans, device = batch.spans, kv.data.device
    masks = [_mask(span) for span in spans]
    num_spans, num_tokens = len(spans), batch.num_rows
    width = max((mask.shape[1] for mask in masks if mask is not None), default=0)
    num_pages = max(len(span.pages) for span in spans)
    # One block: B records of page table, five numbers, whether it is causal, and tail positions;
    # then the masks.
    record = num_pages + 6 + width
    num_ints = num_spans * record
    num_bytes = 4 * num_ints + num_tokens * width
    block = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    ints = block[: 4 * num_ints].view(torch.int32).view(num_spans, record).numpy()
    rows = block[4 * num_ints :].view(num_tokens, width).numpy()
    for line, span, mask in zip(ints, spans, masks, strict=True):
        line[: len(span.pages)] = span.pages
        line[num_pages : num_pages + 6] = (
            span.first_row,
            span.num_rows,
            span.prefix_start,
            span.prefix_len,
            span.write_index,
            mask is None,
        )
        if mask is None:
            continue
        num_tail = mask.shape[1]
        rows[span.first_row : span.first_row + span.num_rows, :num_tail] = mask
        line[num_pages + 6 : num_pages + 6 + num_tail] = (
            np.arange(span.prefix_len, span.num_keys)
            if span.tail_positions is None
            else span.tail_positions
        )
    uploaded = block.to(device, non_blocking=True)
    table = uploaded[: 4 * num_ints].view(torch.int32).view(num_spans, record)
    numbers = table[:, num_pages : num_pages + 6].t().contiguous()
    has_mask = width > 0
    num_keys = max(span.num_keys for span in spans)
    max_rows = max(span.num_rows for span in spans)
    num_splits = splits_for(num_spans, max_rows, kv, num_keys, group_size)
    is_mixed = any(mask is None for mask in masks)
    if VARIANTS.are_few:
        max_rows = rows_outside_graphs(max_rows, group_size)
        is_mixed = True
        if has_mask or not VARIANTS.cut_keys:
            num_splits = 1
    return TritonPlan(
        kv=kv,
        page_tables=table[:, :num_pages],
        first_row=numbers[0],
        num_rows=numbers[1],
        prefix_start=numbers[2],
        prefix_len=numbers[3],
        write_index=numbers[4],
        positions=batch.positions,
        tail_mask=uploaded[4 * num_ints :].view(num_tokens, width) if has_mask else None,
        is_causal=numbers[5].to(torch.int8) if has_mask and is_mixed else None,
        tail_positions=table[:, num_pages + 6 :] if has_mask else None,
        max_rows=max_rows,
        num_splits=num_splits,
    )


def rows_outside_graphs(max_rows: int, group_size: int) -> int:
    """Returns the number of rows per sequence that forwards of few variants are launched for.

    Every smaller number shares the largest of the small tiles.
    """
    return max(max_rows, _SMALL_TILES // group_size + 1)


def _mask(span: SequenceSpan) -> npt.NDArray[np.bool_] | None:
    """Returns a span's mask; None for causal rows whose keys' positions equal their indexes."""
    if span.tail_mask is not None:
        return span.tail_mask.numpy()
    if span.tail_positions is not None:
        return np.tri(span.num_rows, dtype=np.bool_)
    return None
