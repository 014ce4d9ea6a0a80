"""The step of a P-EAGLE head: a forward of committed tokens, then one of mask rows."""

from dataclasses import replace

import torch

from draft_service.steps.batches import DraftBatches
from draft_service.steps.draft_step import DraftStep, StepOptions
from draft_service.steps.level_step import Features, Forward, Roots
from draft_service.steps.operations import Beams
from foredraft.kvcache.paged_kv import PagedKV


class ParallelStep(DraftStep):
    """Steps of a head that computes all levels in one forward.

    The mask rows write their keys to the slots of as many levels of a chain, all at once.

    Args:
        forward: The head; its attention takes a batch's own plan.
        features: Features of committed tokens.
        mask_token: Token id of a mask row.
        mask_feature: Feature of a mask row, [1, hidden_size].

    See DraftStep for the other arguments.
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
        super().__init__(kv, options, token_map, planned)
        self._forward, self._features = forward, features
        self._mask_token, self._mask_feature = mask_token, mask_feature
        self._roots = Roots(kv, options)

    def extend(self, batch: int) -> None:
        """See DraftStep."""
        batches = self.prepare(batch)
        features = self._features(batches.plan.hidden_rows)
        self._roots.keep(*self._forward(batches.committed(), features, None))

    def take_roots(
        self, batch: int, logits: torch.Tensor | None, features: torch.Tensor | None
    ) -> None:
        """See DraftStep."""
        self.prepare(batch)
        self._roots.keep(logits, features)

    def grow(self, batch: int, batches: DraftBatches, beams: Beams) -> None:
        """See DraftStep."""
        num_masks, rows = self.shape.num_steps - 1, batches.block_rows
        levels = [self._roots.logits[:batch]]
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
