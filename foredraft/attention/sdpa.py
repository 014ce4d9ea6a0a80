"""Attention in plain torch: the reference for the other backends on any device, and the CPU's for
caches of other types than float32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from foredraft.attention.base import AttentionBackend, Batch, SequenceSpan
from foredraft.kvcache.paged_kv import PagedKV

# Long chunks are processed in blocks of this many rows: a block reads no keys after its last row,
# and masks stay small.
BLOCK_ROWS = 128


@dataclass(slots=True)
class _Span:
    """Rows of one sequence, and the keys that they see under one window."""

    first_row: int
    end_row: int
    keys: slice | torch.Tensor  # consecutive slots, or any
    # Added to scores: [num_rows * group_size, num_keys]; None: all are seen.
    mask: torch.Tensor | None


@dataclass(slots=True)
class SdpaPlan:
    """Holds the spans of one forward, by window, and the cache that its layers read."""

    kv: PagedKV
    group_size: int
    spans: dict[int | None, list[_Span]]


class SdpaAttention(AttentionBackend):
    """Calls scaled_dot_product_attention once per sequence and layer; long chunks once per block.

    The query heads of a KV head are folded into the rows, so keys and values are never repeated.
    The keys of consecutive pages are read in place; those of scattered pages are gathered. A layer
    with a window reads no more keys than the window of its rows.
    """

    def plan(
        self, batch: Batch, kv: PagedKV, windows: Sequence[int | None], group_size: int
    ) -> SdpaPlan:
        """See AttentionBackend."""
        spans: dict[int | None, list[_Span]] = {window: [] for window in windows}
        dtype, device = torch.float32 if kv.is_8_bit else kv.data.dtype, kv.data.device
        for span in (block for whole in batch.spans for block in _blocks(whole)):
            for window, planned in spans.items():
                first_key = _first_key(span, window)
                visible = _visible(span, window, first_key)
                mask = None
                if visible is not None:
                    mask = torch.zeros(visible.shape, dtype=dtype)
                    mask = mask.masked_fill_(~visible, float("-inf"))
                    mask = mask.repeat_interleave(group_size, 0).to(device)
                keys = _slots(span, first_key, kv.page_size, device)
                end_row = span.first_row + span.num_rows
                planned.append(_Span(span.first_row, end_row, keys, mask))
        return SdpaPlan(kv, group_size, spans)

    def attend(
        self,
        plan: SdpaPlan,
        queries: torch.Tensor,
        layer: int,
        window: int | None,
        scale: float,
        out: torch.Tensor,
        at_once: bool = False,
    ) -> None:
        """See AttentionBackend."""
        head_dim = queries.shape[-1]
        keys, values = plan.kv.keys(layer), plan.kv.values(layer)
        num_kv_heads, group = keys.shape[0], plan.group_size
        k_scale, v_scale = plan.kv.scales[layer]
        for span in plan.spans[window]:
            rows = queries[span.first_row : span.end_row]
            num_rows = rows.shape[0]
            # [num_kv_heads, num_rows * group, head_dim]
            folded = rows.view(num_rows, num_kv_heads, group, head_dim).transpose(0, 1)
            folded = folded.reshape(1, num_kv_heads, num_rows * group, head_dim)
            if isinstance(span.keys, slice):
                k, v = keys[:, span.keys], values[:, span.keys]
            else:
                k, v = keys.index_select(1, span.keys), values.index_select(1, span.keys)
            k, v = k.to(folded.dtype), v.to(folded.dtype)
            result = F.scaled_dot_product_attention(
                folded,
                k.unsqueeze(0),
                v.unsqueeze(0),
                attn_mask=None if span.mask is None else span.mask.to(folded.dtype),
                scale=scale * k_scale,
            )
            if v_scale != 1.0:
                result = result * v_scale
            result = result.view(num_kv_heads, num_rows, group, head_dim).transpose(0, 1)
            out[span.first_row : span.end_row].view(num_rows, num_kv_heads, group, head_dim).copy_(
                result
            )


def _blocks(span: SequenceSpan) -> Iterator[SequenceSpan]:
    """Cuts causal rows into blocks; for a later block the earlier ones are prefix."""
    num_rows = span.num_rows
    if num_rows <= BLOCK_ROWS or span.tail_mask is not None or span.tail_positions is not None:
        yield span
        return
    for row in range(0, num_rows, BLOCK_ROWS):
        yield replace(
            span,
            first_row=span.first_row + row,
            positions=span.positions[row : row + BLOCK_ROWS],
            prefix_len=span.prefix_len + row,
            write_index=span.write_index + row,
        )


def _first_key(span: SequenceSpan, window: int | None) -> int:
    """Returns the index of the first key that some row sees; the tail is always read whole."""
    first = span.prefix_start
    if window is not None:
        first = max(first, int(span.positions.min()) - window + 1)
    return min(first, span.prefix_len)


def _visible(span: SequenceSpan, window: int | None, first_key: int) -> torch.Tensor | None:
    """Returns which keys each row sees: bool [num_rows, num_keys - first_key]; None if all see all."""
    num_rows, num_keys = span.num_rows, span.num_keys
    if num_rows == 1 and span.tail_mask is None:
        return None
    visible = torch.ones(num_rows, num_keys - first_key, dtype=torch.bool)
    tail = visible[:, span.prefix_len - first_key :]
    if span.tail_mask is None:
        tail.tril_()
    else:
        tail.copy_(span.tail_mask)
    if window is not None:
        key_positions = np.arange(first_key, num_keys)
        if span.tail_positions is not None:
            key_positions[span.prefix_len - first_key :] = span.tail_positions
        oldest = torch.from_numpy(span.positions - window).unsqueeze(1)
        visible &= torch.from_numpy(key_positions) > oldest
    return None if bool(visible.all()) else visible


def _slots(
    span: SequenceSpan, first_key: int, page_size: int, device: torch.device
) -> slice | torch.Tensor:
    """Returns the KV slots of the keys from first_key on: a slice where they are consecutive."""
    first_page = first_key // page_size
    pages = span.pages[first_page : -(-span.num_keys // page_size)]
    offset, num_keys = first_key - first_page * page_size, span.num_keys - first_key
    if pages[-1] - pages[0] == len(pages) - 1 and bool((np.diff(pages) == 1).all()):
        start = int(pages[0]) * page_size + offset
        return slice(start, start + num_keys)
    slots = (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)
    return torch.from_numpy(slots[offset : offset + num_keys]).to(device)
