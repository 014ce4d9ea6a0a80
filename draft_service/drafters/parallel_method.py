"""Drafts with P-EAGLE: one forward of mask rows computes a whole proposal.

Committed tokens are computed as for other heads.
"""

from collections.abc import Sequence

import torch

from draft_service.drafters.beam_drafting import Scratch, TreeRequest
from draft_service.drafters.chains import draft_trees, rows_behind
from draft_service.drafters.head_method import StatesMethod
from draft_service.drafters.hidden_source import HiddenSource
from draft_service.models.peagle import PEagleHead
from draft_service.steps.draft_step import StepOptions
from draft_service.steps.head_runner import HeadRunner
from draft_service.steps.parallel_step import ParallelStep
from foredraft.api.draft.v1 import draft_pb2
from foredraft.trees.draft_tree import DraftTree


class ParallelMethod(StatesMethod):
    """Drafts for one verifier with a P-EAGLE head.

    Args:
        runner: Runs the head; its KV includes the scratch pages.
        head: Head of the runner.
        attach: The verifier's sizes.
        scratch: Pages for the KV of mask rows.
    """

    def __init__(
        self,
        runner: HeadRunner,
        head: PEagleHead,
        attach: draft_pb2.AttachRequest,
        scratch: Scratch,
    ) -> None:
        super().__init__(runner, attach)
        self._head, self._scratch = head, scratch
        with torch.inference_mode():
            self._mask_feature = head.mask_feature()

    def draft(self, requests: Sequence[TreeRequest]) -> list[DraftTree]:
        """See DraftMethod."""
        if not requests:
            return []
        first = torch.stack([request.logits for request in requests if request.logits is not None])
        num_masks = max(request.limits.steps for request in requests) - 1
        logits = first[:, None]
        if num_masks:
            rows = [
                rows_behind(
                    request.sequence,
                    [self._head.mask_token_id] * num_masks,
                    self._scratch.pages(request.sequence.slot),
                    self._attach.page_size,
                    is_causal=True,
                )
                for request in requests
            ]
            features = self._mask_feature.expand(len(requests) * num_masks, -1).contiguous()
            masked, _ = self._levels.run(rows, features)
            logits = torch.cat((logits, masked.view(len(requests), num_masks, -1)), 1)

        def next_logits(
            indices: list[int], depth: int, previous: torch.Tensor, beams: torch.Tensor | None
        ) -> torch.Tensor:
            return logits[indices, depth][:, None].expand(-1, previous.shape[1], -1)

        token_map = self._head.token_map
        return draft_trees(requests, next_logits, self._ordering, token_map, self.sizes.device)

    def fixed_step(self, options: StepOptions, source: HiddenSource | None) -> ParallelStep:
        """See DraftMethod."""
        levels, features = self._levels, self._states.at(source)
        return ParallelStep(
            levels.forward,
            features,
            levels.kv,
            options,
            levels.token_map,
            mask_token=self._head.mask_token_id,
            mask_feature=self._mask_feature,
        )
