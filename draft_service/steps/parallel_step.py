"""The step of a P-EAGLE head: a forward of committed tokens, then one of mask rows."""

from dataclasses import replace

import torch

from draft_service.steps.batches import DraftBatches
from draft_service.steps.draft_step import StepOptions
from draft_service.steps.level_step import Features, Forward, RootedStep
from draft_service.steps.operations import Beams
from foredraft.kvcache.paged_kv import PagedKV


class ParallelStep(RootedStep):
    """Steps of a head that computes all levels in one forward.

    The mask rows write their keys to the slots of as many levels of a chain, all at once.

    Args:
        mask_token: Token id of a mask row.
        mask_feature: Feature of a mask row, [1, hidden_size].

    See RootedStep for the other arguments.
    """

    has_blocks = True

    def __init__(
        self,
        forward: Forward,
        features: Features,
        kv: PagedKV,
        options: StepOptions,
        token_map: torch.Tensor | None,
        *,
        mask_token: int,
        mask_feature: torch.Tensor,
    ) -> None:
        # Mask rows read no features of the roots.
        shape = replace(options.shape, feature_size=0)
        options, planned = replace(options, shape=shape), replace(shape, topk=1)
        super().__init__(forward, features, kv, options, token_map, planned)
        self._mask_token, self._mask_feature = mask_token, mask_feature

    def grow(self, batch: int, batches: DraftBatches, beams: Beams) -> None:
        """See DraftStep."""
        num_masks, rows = self.shape.num_steps - 1, batches.block_rows
        levels = [self._root_logits[:batch]]
        if rows is not None:
            self.operations.begin_block(batches.plan, rows, self._mask_token, False)
            features = self._mask_feature.expand(batch * num_masks, -1).contiguous()
            block = batches.block(rows, is_causal=True)
            logits, _ = self._forward(block, features, None)
            # Level by level, so that each level's logits lie together.
            by_level = logits.unflatten(0, (batch, num_masks)).transpose(0, 1)
            levels += by_level.contiguous().unbind()
        for level, scores in enumerate(levels):
            width = self.shape.topk if level else 1
            beams.grow(scores.repeat_interleave(width, 0), self._token_map)
