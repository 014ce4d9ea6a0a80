"""How a batch is described to the Triton kernels of attention: `TritonPlan`, and one made from spans."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from foredraft.attention.base import Batch, SequenceSpan
from foredraft.attention.split_kv import Balance
from foredraft.device_limits import compute_units
from foredraft.kernel_launch import VARIANTS
from foredraft.kvcache.paged_kv import PagedKV

MAX_SPLITS = 32  # maximum number of parts that a sequence's keys are cut into
# Minimum number of keys for a program; with few rows it waits for memory, with many it
# computes.
MIN_KEYS_FEW_ROWS, MIN_KEYS_MANY_ROWS = 64, 1024
# Maximum rows times query heads of a KV head for which tiles have several sizes.
_SMALL_TILES = 32
FEW_ROWS = 16  # maximum rows times query heads of a KV head that count as few
# Maximum number of programs per compute unit that a sequence's keys are cut for.
PROGRAMS_PER_UNIT = 4


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Names the leading keys that sequences have in common, so that a step reads them once.

    A block is a few sequences whose page tables begin with the same pages.

    Attributes:
        keys: int32 [B], number of shared keys of each sequence; whole tiles, all before its rows.
        row_index: int32 [T]: rows of the blocks' sequences, block after block.
        first_row: int32 [N], where each block's rows begin in `row_index`.
        num_rows: int32 [N], number of rows of each block; 0 for a block that is not there.
        num_keys: int32 [N], number of shared keys of each block.
        page_tables: int32 [N, P], a page table that begins with the shared pages.
    """

    keys: torch.Tensor
    row_index: torch.Tensor
    first_row: torch.Tensor
    num_rows: torch.Tensor
    num_keys: torch.Tensor
    page_tables: torch.Tensor


@dataclass(frozen=True, slots=True)
class TreePaths:
    """Names the keys that rows of trees see from the last whole tile before the tree on.

    Attributes:
        slots, leaf_slots: int32 [T, n]. See `exact_fold_kernels.find_paths`.
        row_leaves, leaf_ends: int32 [T].
    """

    slots: torch.Tensor
    row_leaves: torch.Tensor
    leaf_ends: torch.Tensor
    leaf_slots: torch.Tensor


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
            two. See `splits_for`. For `paged_triton` only.
        blocks: int32 [2, N]: sequence and block of rows of each program, see
            `AttentionBackend.block_rows`; a block after the sequence's last is padding. None gives
            each sequence as many blocks as `max_rows` need.
        balance: Builds split-KV work lists on the device, with the plan of level 0; see
            `TritonAttention.plan`. None cuts each sequence into `num_splits` parts. Not with
            `blocks` or `is_causal`; for `paged_triton` only.
        level: Index of this plan's level in `balance`.
        paths: Keys of the paths of trees; for `exact_triton` only.
        shared: Leading keys that are read once for several sequences; for `exact_triton` only.
            Not with `blocks`.
        segments: What a kernel of segments has prepared; for `exact_triton` only.
    """

    kv: PagedKV
    page_tables: torch.Tensor
    first_row: torch.Tensor
    num_rows: torch.Tensor
    prefix_start: torch.Tensor
    prefix_len: torch.Tensor
    write_index: torch.Tensor
    positions: torch.Tensor
    max_rows: int
    num_splits: int
    tail_mask: torch.Tensor | None = None
    is_causal: torch.Tensor | None = None
    tail_positions: torch.Tensor | None = None
    blocks: torch.Tensor | None = None
    balance: Balance | None = None
    level: int = 0
    paths: TreePaths | None = None
    shared: SharedKeys | None = None
    segments: Any = None


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
    units = compute_units(kv.data.device)
    folded = max_rows * group_size
    programs = max(1, batch) * kv.num_kv_heads * -(-folded // 64)
    if folded <= FEW_ROWS:  # several programs run on a unit at a time
        # Adding up the parts costs more with more rows. A unit holds three of the larger 8-bit
        # tiles.
        per_unit = 2 if max_rows > 1 else 3 if kv.is_8_bit else PROGRAMS_PER_UNIT
        wanted = min(per_unit * units // programs, max_tokens // MIN_KEYS_FEW_ROWS)
    else:
        wanted = min(2 * units // programs, max_tokens // MIN_KEYS_MANY_ROWS)
    return 1 << max(0, min(MAX_SPLITS, wanted).bit_length() - 1)


def plan_of_spans(batch: Batch, kv: PagedKV, group_size: int) -> TritonPlan:
    """Makes the plan of a batch from its spans, and uploads it.

    Args:
        batch: At least one span.
        kv: The cache.
        group_size: Query heads per KV head.
    """
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
    ints[:, num_pages : num_pages + 6] = [
        (
            span.first_row,
            span.num_rows,
            span.prefix_start,
            span.prefix_len,
            span.write_index,
            mask is None,
        )
        for span, mask in zip(spans, masks, strict=True)
    ]
    for line, span, mask in zip(ints, spans, masks, strict=True):
        line[: len(span.pages)] = span.pages
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
        max_rows = rows_outside_graphs(max_rows, group_size, has_mask)
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


def rows_outside_graphs(max_rows: int, group_size: int, is_tree: bool = False) -> int:
    """Returns the number of rows per sequence that forwards of few variants are launched for.

    Rows of sequences that decode have the smallest tile, as in graphs: with the largest of the
    small tiles, which other numbers share, attention beside a long prompt takes twice as long.
    """
    if max_rows * group_size <= FEW_ROWS and not is_tree:
        return max_rows
    return max(max_rows, _SMALL_TILES // group_size + 1)


def _mask(span: SequenceSpan) -> npt.NDArray[np.bool_] | None:
    """Returns a span's mask; None for causal rows whose keys' positions equal their indexes."""
    if span.tail_mask is not None:
        return span.tail_mask.numpy()
    if span.tail_positions is not None:
        return np.tri(span.num_rows, dtype=np.bool_)
    return None
