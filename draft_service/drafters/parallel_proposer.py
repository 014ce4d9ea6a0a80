"""Proposes trees from P-EAGLE: one forward of mask rows computes a whole proposal.

Committed tokens are computed as for other heads.
"""

from collections.abc import Sequence

import torch

from draft_service.drafters.beam_drafting import Scratch, TreeRequest
from draft_service.drafters.chains import draft_trees, rows_behind
from draft_service.drafters.graph_drafting import GraphSettings
from draft_service.drafters.head_proposer import HeadProposer
from draft_service.drafters.paged_proposer import Limits
from draft_service.models.peagle import PEagleHead
from draft_service.steps.draft_step import StepOptions
from draft_service.steps.head_runner import HeadRunner
from draft_service.steps.level_step import Features
from draft_service.steps.parallel_step import ParallelStep
from foredraft.api.draft.v1 import draft_pb2
from foredraft.trees.draft_tree import DraftTree


class ParallelProposer(HeadProposer):
    """Drafts for one verifier with a P-EAGLE head.

    Args:
        head: Head of the runner.

    See HeadProposer for the other arguments.
    """

    def __init__(
        self,
        runner: HeadRunner,
        head: PEagleHead,
        attach: draft_pb2.AttachRequest,
        limits: Limits,
        scratch: Scratch,
        graphs: GraphSettings | None = None,
    ) -> None:
        super().__init__(runner, attach, limits, scratch, graphs)
        self._head, self._scratch = head, scratch
        with torch.inference_mode():
            self._mask_feature = head.mask_feature()

    def close(self) -> None:
        """See PagedProposer."""
        super().close()
        del self._head

    def _make_step(self, features: Features, options: StepOptions) -> ParallelStep:
        """See HeadProposer."""
        runner, head = self._head_runner, self._head
        return ParallelStep(
            self._forward,
            features,
            runner.kv,
            options,
            head.token_map,
            mask_token=head.mask_token_id,
            mask_feature=self._mask_feature,
        )

    def _draft(self, requests: Sequence[TreeRequest]) -> list[DraftTree]:
        """See PagedProposer."""
        if not requests:
            return []
        first = torch.stack([request.logits for request in requests if request.logits is not None])
        num_masks = max(request.limits[0] for request in requests) - 1
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
            masked = self._head_runner.forward(rows, features).logits
            logits = torch.cat((logits, masked.view(len(requests), num_masks, -1)), 1)

        def next_logits(
            indices: list[int], depth: int, previous: torch.Tensor, beams: torch.Tensor | None
        ) -> torch.Tensor:
            return logits[indices, depth][:, None].expand(-1, previous.shape[1], -1)

        token_map = self._head.token_map
        return draft_trees(requests, next_logits, self._ordering, token_map, self._device)
