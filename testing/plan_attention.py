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
    ) -> None:
        if not hasattr(plan, "page_tables"):
            self._ordinary.attend(plan, queries, layer, window, scale, out)
            return
        out.fill_(float("nan"))  # absent rows are not written
        kv = plan.kv
        keys, values = kv.keys(layer), kv.values(layer)
        group = queries.shape[1] // keys.shape[0]
        numbers = (
            plan.first_row,
            plan.num_rows,
            plan.prefix_start,
            plan.prefix_len,
            plan.write_index,
        )
        of_each = zip(*(tensor.tolist() for tensor in numbers), strict=True)
        for i, (first, count, start, prefix, write) in enumerate(of_each):
            if count == 0:
                continue
            index = torch.arange(write + count)
            slots = plan.page_tables[i, index // kv.page_size] * kv.page_size + index % kv.page_size
            rows = slice(first, first + count)
            seen = (index >= start).repeat(count, 1)
            if plan.tail_mask is None:
                assert prefix == write
                seen[:, prefix:] = torch.ones(count, count, dtype=torch.bool).tril()
            else:
                seen[:, prefix:] = plan.tail_mask[rows, : write + count - prefix]
            if window is not None:
                if plan.tail_positions is not None:  # where rows stand, which nodes of a tree share
                    index[prefix:] = plan.tail_positions[i, : write + count - prefix]
                seen &= index > plan.positions[rows, None] - window
            k = keys[:, slots].repeat_interleave(group, 0).double()
            v = values[:, slots].repeat_interleave(group, 0).double()
            scores = queries[rows].transpose(0, 1).double() @ k.transpose(1, 2) * scale
            result = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
            out[rows] = result.transpose(0, 1).reshape(count, -1).to(out.dtype)
