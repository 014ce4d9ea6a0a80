"""A block drafter's step as CUDA graphs: projections for committed tokens, then one forward of
a block and its chain.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from draft_service.models.block_draft import BlockDraft
from draft_service.models.markov import MarkovHead
from draft_service.steps.graphs import Beams, DraftGraphs
from draft_service.steps.records import DraftShape
from foredraft.attention.base import AttentionBackend
from foredraft.kvcache.paged_kv import PagedKV


class BlockGraphs(DraftGraphs):
    """Draft steps of one block drafter over one cache; see DraftGraphs.

    The rows of a block write their keys to the slots of as many levels of a chain, all at
    once.

    Args:
        draft: The block drafter.
        shape: Sizes of the requested chains.
        features: Returns features [n, hidden_size] for row indexes, int64 [n], in the source of
            hidden states.
    """

    has_blocks = True

    def __init__(
        self,
        draft: BlockDraft,
        kv: PagedKV,
        attention: AttentionBackend,
        shape: DraftShape,
        *,
        features: Callable[[torch.Tensor], torch.Tensor],
        **options: Any,
    ) -> None:
        # A chain one longer than the block has a level for each of its rows.
        planned = replace(shape, num_steps=draft.options.block_size + 1, topk=1, feature_size=0)
        super().__init__(
            _no_forward,
            kv,
            planned,
            token_map=draft.token_map,
            features=features,
            grown=(shape.num_steps, shape.topk),
            **options,
        )
        draft.prepare()
        self._draft_model, self._attention = draft, attention
        self._embed = features

    def _extend(self, batch: int) -> None:
        rows = self._prepare(batch).plan
        features = self._embed(rows.hidden_rows)
        self._draft_model.extend(features, rows.positions, rows.slots, self._kv)

    def _draft(self, batch: int, any_sampled: bool, any_ranked: bool) -> None:
        batches, draft = self._batches_of(batch), self._draft_model
        options, num_levels = draft.options, self.num_levels
        rows = batches.block_rows
        assert rows is not None
        self._begin_block(batches.plan, rows, options.mask_token_id, True)
        whole = batches.block(rows, is_causal=False)
        ordered = batches.block(rows, is_causal=True) if draft.has_causal_layers else None
        hidden = draft(whole, ordered, self._kv, self._attention)
        first = int(not options.from_anchor)
        hidden = hidden.view(batch, options.block_size, -1)[:, first : first + num_levels]
        # Level by level, so that each level's logits lie together; the LM head is read once.
        hidden = hidden.transpose(0, 1).contiguous()
        logits = draft.lm_head(hidden.flatten(0, 1))
        beams = self._beams(batch, batches, any_sampled, any_ranked)
        if draft.markov is None:
            beams.grow_all(logits, self._token_map)
        else:
            self._grow_biased(beams, logits.view(num_levels, batch, -1), hidden, draft.markov)
        self._write(batch, beams)

    def _grow_biased(
        self, beams: Beams, logits: torch.Tensor, hidden: torch.Tensor, markov: MarkovHead
    ) -> None:
        """Grows the levels one after another, each by the bias of the tokens before it.

        Args:
            logits: [levels, B, V], of the rows alone.
            hidden: [levels, B, hidden_size], of the rows.
        """
        newest = self._batches_of(hidden.shape[1]).plan
        previous = newest.tokens.index_select(0, newest.last)
        state = markov.start(len(previous))
        for level, (scores, row) in enumerate(zip(logits, hidden, strict=True)):
            if level and self.topk > 1:
                scores, row = (part.repeat_interleave(self.topk, 0) for part in (scores, row))
            bias, state = markov.bias(markov.embed(previous), row, state)
            chosen, sources = beams.grow(scores + bias, self._token_map)
            previous, state = chosen.flatten(), state.index_select(0, sources)


def _no_forward(*_: object) -> Any:
    raise AssertionError("a block drafter has forwards of its own")
