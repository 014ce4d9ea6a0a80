"""The step of a block drafter: projections for committed tokens, then one forward of a block, and
its trees.
"""

from dataclasses import replace

import torch

from draft_service.models.block_draft import BlockDraft
from draft_service.models.markov import MarkovHead
from draft_service.steps.batches import DraftBatches
from draft_service.steps.draft_step import DraftStep, StepOptions
from draft_service.steps.level_step import Features
from draft_service.steps.operations import Beams
from foredraft.attention.base import AttentionBackend
from foredraft.kvcache.paged_kv import PagedKV


class BlockStep(DraftStep):
    """Steps of one block drafter.

    The rows of a block write their keys to the slots of as many levels of a chain, all at once.

    Args:
        draft: The block drafter.
        features: Features of committed tokens.
        attention: Attention of the rows of a block.

    See DraftStep for the other arguments.
    """

    has_blocks = True

    def __init__(
        self,
        draft: BlockDraft,
        features: Features,
        kv: PagedKV,
        attention: AttentionBackend,
        options: StepOptions,
    ) -> None:
        # A chain one longer than the block has a level for each of its rows.
        num_levels = draft.options.block_size + 1
        planned = replace(options.shape, num_steps=num_levels, topk=1)
        super().__init__(kv, options, draft.token_map, planned)
        draft.prepare()
        self._draft_model, self._features, self._attention = draft, features, attention

    def extend(self, batch: int) -> None:
        """See DraftStep."""
        rows = self.prepare(batch).plan
        features = self._features(rows.hidden_rows)
        self._draft_model.extend(features, rows.positions, rows.slots, self.kv)

    def grow(self, batch: int, batches: DraftBatches, beams: Beams) -> None:
        """See DraftStep."""
        draft, num_levels = self._draft_model, self.shape.num_steps
        options, rows = draft.options, batches.block_rows
        assert rows is not None
        self.operations.begin_block(batches.plan, rows, options.mask_token_id, True)
        whole = batches.block(rows, is_causal=False)
        ordered = batches.block(rows, is_causal=True) if draft.has_causal_layers else None
        hidden = draft(whole, ordered, self.kv, self._attention)
        first = int(not options.from_anchor)
        hidden = hidden.view(batch, options.block_size, -1)[:, first : first + num_levels]
        # Level by level, so that each level's logits lie together; the LM head is read once.
        hidden = hidden.transpose(0, 1).contiguous()
        logits = draft.lm_head(hidden.flatten(0, 1))
        if draft.markov is None:
            beams.grow_all(logits, self._token_map)
        else:
            newest = batches.plan.tokens.index_select(0, batches.plan.last)
            logits = logits.view(num_levels, batch, -1)
            self._grow_biased(beams, logits, hidden, draft.markov, newest)

    def _grow_biased(
        self,
        beams: Beams,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        markov: MarkovHead,
        previous: torch.Tensor,
    ) -> None:
        """Grows the levels one after another, each by the bias of the tokens before it.

        Args:
            beams: Beams at the roots.
            logits: [levels, B, V], of the rows alone.
            hidden: [levels, B, hidden_size], of the rows.
            markov: Computes the bias.
            previous: int64 [B], the sequences' newest tokens.
        """
        state, topk = markov.start(len(previous)), self.shape.topk
        for level, (scores, row) in enumerate(zip(logits, hidden, strict=True)):
            if level and topk > 1:
                scores, row = (part.repeat_interleave(topk, 0) for part in (scores, row))
            bias, state = markov.bias(markov.embed(previous), row, state)
            chosen, sources = beams.grow(scores + bias, self._token_map)
            previous, state = chosen.flatten(), state.index_select(0, sources)
