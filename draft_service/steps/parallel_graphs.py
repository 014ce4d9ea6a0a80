"""A P-EAGLE head's step as CUDA graphs: a forward of committed tokens, then one of mask rows."""

from dataclasses import replace
from typing import Any

import torch

from draft_service.steps.graphs import DraftGraphs, Forward
from draft_service.steps.records import DraftShape
from foredraft.kvcache.paged_kv import PagedKV


class ParallelGraphs(DraftGraphs):
    """Draft steps of a head that computes all levels in one forward; see DraftGraphs.

    The mask rows write their keys to the slots of as many levels of a chain, all at once.

    Args:
        mask_token: Token id of a mask row.
        mask_feature: Feature of a mask row, [1, hidden_size].
    """

    has_blocks = True

    def __init__(
        self,
        forward: Forward,
        kv: PagedKV,
        shape: DraftShape,
        *,
        mask_token: int,
        mask_feature: torch.Tensor,
        **options: Any,
    ) -> None:
        planned = replace(shape, topk=1, feature_size=0)
        super().__init__(forward, kv, planned, grown=(shape.num_steps, shape.topk), **options)
        self._mask_token, self._mask_feature = mask_token, mask_feature

    def _draft(self, batch: int, any_sampled: bool, any_ranked: bool) -> None:
        batches, num_masks = self._batches_of(batch), self.num_levels - 1
        rows = batches.block_rows
        levels = [self._root_logits[:batch]]
        if rows is not None:
            masks = (batch, num_masks)
            self._begin_block(batches.plan, rows, self._mask_token, False)
            features = self._mask_feature.expand(batch * num_masks, -1).contiguous()
            block = batches.block(rows, is_causal=True)
            logits, _ = self._forward(block, features, None)
            # Level by level, so that each level's logits lie together.
            levels += logits.unflatten(0, masks).transpose(0, 1).contiguous().unbind()
        beams = self._beams(batch, batches, any_sampled, any_ranked)
        for level, scores in enumerate(levels):
            width = self.topk if level else 1
            beams.grow(scores.repeat_interleave(width, 0), self._token_map)
        self._write(batch, beams)
