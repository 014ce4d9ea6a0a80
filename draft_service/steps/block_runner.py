"""Runs one block drafter on its paged cache.

Decides nothing about which rows are computed or which tokens are taken.
"""

from collections.abc import Sequence

import torch

from draft_service.models.block_draft import BlockDraft
from draft_service.steps.draft_runner import DraftRunner
from foredraft.cpu.threads import threads_for
from foredraft.kernel_launch import few_variants
from foredraft.runner.batch import SequenceRows, build_batch


class BlockRunner(DraftRunner[BlockDraft]):
    """Runs a block drafter with its KV cache and an attention backend."""

    @torch.inference_mode()
    def extend(self, rows: Sequence[SequenceRows], features: torch.Tensor) -> None:
        """Writes the keys and values of committed tokens.

        Args:
            rows: At least one sequence; their tokens are not read.
            features: [num_rows, hidden_size], from `fuse` for the rows' positions.

        Raises:
            ValueError: Rows that contradict themselves or the cache.
        """
        batch = build_batch(rows, self.kv)
        with few_variants(cut_keys=False), threads_for(len(features)):
            self.head.extend(features, batch.positions, batch.slots, self.kv)

    @torch.inference_mode()
    def propose(
        self, rows: Sequence[SequenceRows], causal: Sequence[SequenceRows] | None
    ) -> torch.Tensor:
        """Computes hidden states of the rows of some blocks, [num_rows, hidden_size].

        Args:
            rows: Rows of the blocks; each row sees its whole block.
            causal: The same blocks in causal order; None unless `BlockDraft.has_causal_layers`.

        Raises:
            ValueError: See `extend`.
        """
        ordered = None if causal is None else build_batch(causal, self.kv)
        batch = build_batch(rows, self.kv)
        with few_variants(cut_keys=False), threads_for(len(batch.positions)):
            return self.head(batch, ordered, self.kv, self.attention)
