"""Runs one draft head on its paged cache.

Decides nothing about which rows are computed or which tokens are taken.
"""

from collections.abc import Sequence

import torch

from draft_service.models.draft_head import HeadOutput, LevelHead
from draft_service.steps.draft_runner import DraftRunner
from foredraft.cpu.threads import threads_for
from foredraft.kernel_launch import few_variants
from foredraft.runner.batch import SequenceRows, build_batch


class HeadRunner(DraftRunner[LevelHead]):
    """Runs a head with its KV cache and an attention backend."""

    @torch.inference_mode()
    def forward(
        self,
        rows: Sequence[SequenceRows],
        features: torch.Tensor,
        module: int = 0,
        all_features: bool = False,
    ) -> HeadOutput:
        """Computes the rows of some sequences and writes their KV.

        Args:
            rows: At least one sequence; no two write the same slot.
            features: [num_rows, hidden_size], see `LevelHead.forward`.
            module: Index of the head's module.
            all_features: See `LevelHead.forward`.

        Raises:
            ValueError: Rows that contradict themselves or the cache.
        """
        batch = build_batch(rows, self.kv)
        # One layer is fast even over long contexts.
        with few_variants(cut_keys=False), threads_for(len(features)):
            return self.head.forward(batch, features, self.kv, self.attention, module, all_features)
