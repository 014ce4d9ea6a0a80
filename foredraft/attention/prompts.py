"""Attention backends that compute prompts by other kernels than the rest of a step."""

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foredraft.attention.base import AttentionBackend, Batch, ForwardSizes, SequenceSpan
from foredraft.kvcache.paged_kv import PagedKV

# Number of rows from which on a sequence's rows are a prompt; fewer wait for memory, and keys are
# cut into parts for them.
PROMPT_ROWS = 128


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """Describes a batch that ends in prompts.

    Attributes:
        kv: Cache of the batch.
        first_row: First row of the prompts.
        prompts: Plan of the prompts.
        others: Plan of the sequences before the prompts; None where there are none.
    """

    kv: PagedKV
    first_row: int
    prompts: Any
    others: Any


class PromptsApart(AttentionBackend):
    """Computes the prompts at the end of a batch by kernels of its own, and everything else,
    captured steps among it, by another backend.

    Args:
        others: Computes what is no prompt.
    """

    def __init__(self, others: AttentionBackend) -> None:
        self.others = others

    def block_rows(self, max_rows: int, group_size: int, dtype: torch.dtype, kv: PagedKV) -> int:
        """See AttentionBackend."""
        return self.others.block_rows(max_rows, group_size, dtype, kv)

    def shared_rows(self, num_rows: int, group_size: int, dtype: torch.dtype, kv: PagedKV) -> int:
        """See AttentionBackend."""
        return self.others.shared_rows(num_rows, group_size, dtype, kv)

    def cuts_keys(
        self, batch: int, max_rows: int, num_keys: int, group_size: int, kv: PagedKV
    ) -> bool:
        """See AttentionBackend."""
        return self.others.cuts_keys(batch, max_rows, num_keys, group_size, kv)

    def partial_bytes(self, sizes: ForwardSizes, device: torch.device) -> int:
        """See AttentionBackend."""
        return self.others.partial_bytes(sizes, device)

    def plan(
        self, batch: Batch, kv: PagedKV, windows: Sequence[int | None], group_size: int
    ) -> Any:
        """See AttentionBackend."""
        spans = batch.spans
        first = next((i for i, span in enumerate(spans) if span.num_rows >= PROMPT_ROWS), None)
        if (
            batch.plan is not None
            or first is None
            or not all(map(_is_causal, spans[first:]))
            or not self._takes(spans[first:], kv, windows, group_size)
        ):
            return self.others.plan(batch, kv, windows, group_size)
        part = dataclasses.replace(batch, spans=spans[first:])
        prompts, others = self._plan_prompts(part, kv, group_size), None
        if first:
            part = dataclasses.replace(batch, spans=spans[:first])
            others = self.others.plan(part, kv, windows, group_size)
        return PromptPlan(kv, spans[first].first_row, prompts, others)

    def attend(
        self,
        plan: Any,
        queries: torch.Tensor,
        layer: int,
        window: int | None,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """See AttentionBackend."""
        if not isinstance(plan, PromptPlan):
            self.others.attend(plan, queries, layer, window, scale, out)
            return
        first = plan.first_row
        if plan.others is not None:
            self.others.attend(plan.others, queries[:first], layer, window, scale, out[:first])
        self._attend_prompts(plan, queries, layer, scale, out)

    def _takes(
        self,
        spans: Sequence[SequenceSpan],
        kv: PagedKV,
        windows: Sequence[int | None],
        group_size: int,
    ) -> bool:
        """Returns whether the own kernels compute these prompts."""
        return True

    @abstractmethod
    def _plan_prompts(self, batch: Batch, kv: PagedKV, group_size: int) -> Any:
        """Plans a batch of prompts alone, whose rows follow those of other sequences."""

    @abstractmethod
    def _attend_prompts(
        self, plan: PromptPlan, queries: torch.Tensor, layer: int, scale: float, out: torch.Tensor
    ) -> None:
        """Computes the rows from `plan.first_row` on; see `attend`."""


def _is_causal(span: SequenceSpan) -> bool:
    """Returns whether a row sees all keys up to its own."""
    is_whole = span.prefix_start == 0 and span.prefix_len == span.write_index
    return is_whole and span.can_be_cut
