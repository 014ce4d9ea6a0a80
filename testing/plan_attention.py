"""Attention from the tensors of a plan, sequence by sequence in plain torch, to check the
inputs of graphs.
"""

from collections.abc import Sequence
from typing import Any

import torch

from foredraft.attention.base import AttentionBackend, Batch
from foredraft.attention.sdpa import SdpaAttention
from foredraft.kvcache.paged_kv import PagedKV


class PlanAttention(AttentionBackend):
    """Computes attention from a batch's own plan; batches of spans take the usual path."""

    def __init__(self) -> None:
        self._ordinary = SdpaAttention()

    def plan(
        self, batch: Batch, kv: PagedKV, windows: Sequence[int | None], group_size: int
    ) -> Any:
        if batch.plan is None:
            return self._ordinary.plan(batch, kv, windows, group_size)
        plan: Any = batch.plan
        # Kernels read these as they lie.
        for tensor in (batch.tokens, batch.positions, batch.slots, plan.prefix_len, plan.num_rows):
            assert tensor.is_contiguous()
        return plan

    def attend(
        self,
        plan: Any,
        queries: torch.Tensor,
        layer: int,
        window: int | None,
        scale: float,
        out: torch.Tensor,
        at_once: bool = False,
    ) -> None:
        if not hasattr(plan, "page_tables"):
            self._ordinary.attend(plan, queries, layer, window, scale, out, at_once)
            return
        out.fill_(float("nan"))  # absent rows are not written
        kv = plan.kv
        keys, values = kv.keys(layer), kv.values(layer)
        group = queries.shape[1] // keys.shape[0]
        for i in range(len(plan.num_rows)):
            first, count = int(plan.first_row[i]), int(plan.num_rows[i])
            if count == 0:
                continue
            prefix, write = int(plan.prefix_len[i]), int(plan.write_index[i])
            index = torch.arange(write + count)
            slots = plan.page_tables[i, index // kv.page_size] * kv.page_size + index % kv.page_size
            places = index.clone()
            if plan.tail_positions is not None:
                places[prefix:] = plan.tail_positions[i, : write + count - prefix]
            rows = slice(first, first + count)
            seen = (index >= plan.prefix_start[i]).expand(count, -1).clone()
            if plan.tail_mask is None:
                assert prefix == write
                seen[:, prefix:] = torch.ones(count, count, dtype=torch.bool).tril()
            else:
                seen[:, prefix:] = plan.tail_mask[rows, : write + count - prefix]
            if window is not None:
                seen &= places > plan.positions[rows, None] - window
            k = keys[:, slots].repeat_interleave(group, 0).double()
            v = values[:, slots].repeat_interleave(group, 0).double()
            scores = torch.einsum("rhd,hkd->hrk", queries[rows].double(), k) * scale
            scores = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            result = torch.einsum("hrk,hkd->rhd", scores, v)
            out[rows] = result.reshape(count, -1).to(out.dtype)
