"""Attention of float32 rows on a CPU, in C (`foredraft/cpu/_attention.c`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foredraft.attention.base import AttentionBackend, Batch, SequenceSpan
from foredraft.attention.sdpa import SdpaAttention, SdpaPlan
from foredraft.cpu import _kernels
from foredraft.kvcache.paged_kv import PagedKV

# Rows times query heads of a KV head that are computed together: enough to read keys seldom, and
# few enough for the cache.
_MOST_LINES = 64
_BLOCK = _kernels.ATTENTION_BLOCK


@dataclass(slots=True)
class _Keys:
    """The keys that a forward's rows see under one window.

    Attributes:
        rows: int64 [num_rows, 5], `Row` of `_attention.h`.
        slots: int64, KV slots, which `rows` points into.
        addresses: Addresses of both, which every layer asks for.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    addresses: tuple[int, int]


@dataclass(slots=True)
class CpuPlan:
    """Holds the keys of one forward's rows, by window, and the cache that its layers read.

    Attributes:
        pieces: int64 [num_pieces, 2], first row and number of rows of what is computed together.
        num_pieces: Number of them.
        most_rows: Maximum number of rows of a piece.
        num_pairs: Number of pairs of a row and a key, at most.
    """

    kv: PagedKV
    keys: dict[int | None, _Keys]
    pieces: torch.Tensor
    num_pieces: int
    most_rows: int
    num_pairs: int
    group_size: int


class CpuAttention(AttentionBackend):
    """Computes all sequences and heads of a layer in one call, from the pages themselves.

    A row's bits depend on the keys that it sees and on their order alone. So a row of a tree has
    the same bits as the same row after its path was accepted, and a row of a prompt as one that was
    decoded.

    Two to five times as fast as SDPA from 1 row to 256 and up to 2,000 keys
    (`benchmarks/cpu_attention.py`), so it takes rows of any number. A cache of another type than
    float32 is left to `SdpaAttention`.

    Args:
        kernel: Index into `foredraft.cpu.products.KERNELS`.
    """

    def __init__(self, kernel: int = 0) -> None:
        self._kernel = kernel
        self._other_types = SdpaAttention()

    def plan(
        self, batch: Batch, kv: PagedKV, windows: Sequence[int | None], group_size: int
    ) -> CpuPlan | SdpaPlan:
        """See AttentionBackend."""
        if kv.data.dtype is not torch.float32:
            return self._other_types.plan(batch, kv, windows, group_size)
        at_once = max(1, _MOST_LINES // group_size)
        pieces: list[tuple[int, int]] = []
        num_rows = num_slots = num_pairs = most_rows = 0
        for span in batch.spans:
            rows, keys = span.num_rows, span.num_keys
            firsts = range(0, rows, at_once)
            pieces.extend((span.first_row + row, min(at_once, rows - row)) for row in firsts)
            most_rows = max(most_rows, min(at_once, rows))
            num_rows += rows
            num_pairs += rows * keys
            num_slots += keys + _BLOCK
            if span.tail_mask is not None or span.tail_positions is not None:
                num_slots += rows * (keys - span.prefix_len + _BLOCK)
        planned = {
            window: _keys_of(batch.spans, kv, window, num_rows, num_slots) for window in windows
        }
        table = torch.from_numpy(np.array(pieces, np.int64))
        return CpuPlan(kv, planned, table, len(pieces), most_rows, num_pairs, group_size)

    def attend(
        self,
        plan: CpuPlan | SdpaPlan,
        queries: torch.Tensor,
        layer: int,
        window: int | None,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """See AttentionBackend."""
        if isinstance(plan, SdpaPlan):
            self._other_types.attend(plan, queries, layer, window, scale, out)
            return
        if not queries.dtype == out.dtype == torch.float32 or out.stride(-1) != 1:
            own = torch.empty(out.shape)
            self.attend(plan, queries.float(), layer, window, scale, own)
            out.copy_(own)
            return
        keys, values = plan.kv.keys(layer), plan.kv.values(layer)
        rows, slots = plan.keys[window].addresses
        num_kv_heads, _, head_dim = keys.shape
        num_rows, num_heads = plan.keys[window].rows.shape[0], num_kv_heads * plan.group_size
        if queries.stride()[1:] != (head_dim, 1):
            queries = queries.contiguous()
        width = num_heads * head_dim
        if queries.shape != (num_rows, num_heads, head_dim) or out.shape != (num_rows, width):
            raise ValueError(
                f"queries {tuple(queries.shape)} and a result {tuple(out.shape)} for {num_rows}"
                f" rows of {num_heads} heads of {head_dim} numbers"
            )
        _kernels.attend(
            rows,
            plan.pieces.data_ptr(),
            slots,
            queries.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            plan.num_pieces,
            queries.stride(0),
            out.stride(0),
            keys.stride(0),
            num_kv_heads,
            plan.group_size,
            head_dim,
            plan.most_rows,
            plan.num_pairs,
            self._kernel,
            scale,
        )


def _keys_of(
    spans: Sequence[SequenceSpan], kv: PagedKV, window: int | None, num_rows: int, num_slots: int
) -> _Keys:
    table = torch.empty(num_rows, 5, dtype=torch.int64)
    slots = torch.empty(num_slots, dtype=torch.int64)
    addresses = table.data_ptr(), slots.data_ptr()
    used, cache_slots, row_bytes = 0, kv.data.shape[2], table.stride(0) * table.itemsize
    for span in spans:
        mask = None if span.tail_mask is None else span.tail_mask.contiguous()
        shape = (span.num_rows, span.num_keys - span.prefix_len)
        if mask is not None and not (mask.dtype is torch.bool and mask.shape == shape):
            raise ValueError(f"a mask of {mask.dtype} {tuple(mask.shape)} instead of bool {shape}")
        if not 0 <= span.first_row <= num_rows - span.num_rows:
            raise ValueError(f"a sequence's rows begin at {span.first_row} of {num_rows}")
        used = _kernels.plan_keys(
            span.positions,
            span.pages,
            span.tail_positions,
            addresses[0] + span.first_row * row_bytes,
            addresses[1],
            used,
            num_slots,
            0 if mask is None else mask.data_ptr(),
            span.prefix_start,
            span.prefix_len,
            span.write_index,
            window or 0,
            kv.page_size,
            cache_slots,
        )
    return _Keys(table, slots, addresses)
