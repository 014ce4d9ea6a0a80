"""Batches of a draft step of fixed shape: views of its plan."""

import torch

from draft_service.steps.plan import BlockRows, DraftPlan
from draft_service.steps.records import DraftShape
from foredraft.attention.base import Batch
from foredraft.attention.split_kv import Balance, Levels
from foredraft.attention.triton_plan import TritonPlan, splits_for
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.sampling.columns import FLOATS
from foredraft.sampling.rows import SamplingRows


class DraftBatches:
    """Creates the batches of a step of one size.

    Args:
        plan: The step's plan, filled in before a batch is computed.
        has_blocks: Whether all levels are rows of one block.

    Attributes:
        block_rows: Rows of a block, one for each level of the plan; None without blocks.
    """

    def __init__(
        self, plan: DraftPlan, shape: DraftShape, kv: PagedKV, has_blocks: bool = False
    ) -> None:
        self.plan = plan
        self._shape, self._kv = shape, kv
        batch, device = len(plan.start), plan.start.device
        rows, topk = shape.num_rows, shape.topk
        self._first_row, self._first_beam = (
            torch.arange(0, batch * each, each, dtype=torch.int32, device=device)
            for each in (rows, topk)
        )
        max_keys = shape.max_pages * kv.page_size
        self._row_splits = splits_for(batch, rows, kv, max_keys)
        self._beam_splits = splits_for(batch, topk, kv, max_keys)
        self._is_balanced = batch > 1
        self._beam_balance: Balance | None = None
        self.block_rows: BlockRows | None = None
        if has_blocks and shape.num_steps > 1:
            self.block_rows = BlockRows.empty(batch, shape.num_steps - 1, device)

    def committed(self) -> Batch:
        """Returns the batch of committed tokens: up to R rows of each sequence, with logits of
        the last.
        """
        plan = self.plan
        attention = TritonPlan(
            kv=self._kv,
            page_tables=plan.tables,
            first_row=self._first_row,
            num_rows=plan.num_rows,
            prefix_start=plan.prefix_start,
            prefix_len=plan.start,
            write_index=plan.start,
            positions=plan.positions,
            max_rows=self._shape.num_rows,
            num_splits=self._row_splits,
            balance=Balance(self._kv.data.dtype) if self._is_balanced else None,
        )
        return Batch(plan.tokens, plan.positions, plan.slots, (), plan.last, plan=attention)

    def level(self, level: int, tokens: torch.Tensor, mask: torch.Tensor | None) -> Batch:
        """Returns the batch of a level's drafted tokens, which attend to the committed keys and
        to their own ancestors.

        Level 0 comes first.

        Args:
            tokens: int64 [B, K].
            mask: bool [B * K, (level + 1) * K], the beams' ancestors; None for a chain.
        """
        plan, shape = self.plan, self._shape
        first, positions = plan.level_first[level], plan.level_positions[level]
        tail_positions = None
        if shape.is_windowed and mask is not None:
            tail_positions = plan.tail_positions[:, : mask.shape[1]]
        if level == 0 and self._is_balanced:
            # One plan covers all levels.
            before = plan.num_keys.expand_as(plan.level_first)
            prefix_len = plan.level_first if mask is None else before
            levels = Levels(prefix_len, plan.level_first, plan.level_positions)
            self._beam_balance = Balance(self._kv.data.dtype, levels)
        attention = TritonPlan(
            kv=self._kv,
            page_tables=plan.tables,
            first_row=self._first_beam,
            num_rows=plan.num_beams,
            prefix_start=plan.valid_from,
            prefix_len=first if mask is None else plan.num_keys,
            write_index=first,
            positions=positions,
            tail_mask=mask,
            tail_positions=tail_positions,
            max_rows=shape.topk,
            num_splits=self._beam_splits,
            balance=self._beam_balance,
            level=level,
        )
        return Batch(tokens.flatten(), positions, plan.level_slots[level], (), plan=attention)

    def block(self, rows: BlockRows, is_causal: bool) -> Batch:
        """Returns the batch of a block: rows behind the committed keys that attend to these keys
        and to each other.

        Args:
            rows: `block_rows`, filled in by `plan.begin_block`.
            is_causal: Whether a row sees no later one.
        """
        plan, batch = self.plan, len(self.plan.start)
        num_rows = len(rows.tokens) // batch
        max_keys = self._shape.max_pages * self._kv.page_size
        attention = TritonPlan(
            kv=self._kv,
            page_tables=plan.tables,
            first_row=rows.first_row,
            num_rows=rows.num_rows,
            prefix_start=plan.valid_from,
            prefix_len=plan.num_keys,
            write_index=plan.num_keys,
            positions=rows.positions,
            tail_mask=rows.causal_mask if is_causal else rows.whole_mask,
            tail_positions=plan.tail_positions if self._shape.is_windowed else None,
            max_rows=num_rows,
            num_splits=splits_for(batch, num_rows, self._kv, max_keys),
        )
        return Batch(rows.tokens, rows.positions, rows.slots, (), plan=attention)

    def sampling(self, any_sampled: bool, any_ranked: bool) -> SamplingRows:
        """Returns the sequences' sampling parameters; see `SamplingRows` for the two promises."""
        plan = self.plan
        return SamplingRows(
            **dict(zip(FLOATS, plan.floats[:, : len(plan.start)], strict=True)),
            top_k=plan.top_k,
            seed=plan.seed,
            position=plan.position,
            any_sampled=any_sampled,
            any_ranked=any_ranked,
        )
