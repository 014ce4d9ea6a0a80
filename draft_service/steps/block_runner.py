"""Runs one block drafter on its paged cache.

Decides nothing about which rows are computed or which tokens are taken.
"""

from collections.abc import Sequence

import torch

from draft_service.models.block_draft import BlockDraft
from foredraft.attention.base import AttentionBackend, Batch
from foredraft.kernel_launch import few_variants
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.batch import SequenceRows, build_batch
from foredraft.runner.heap import keep_freed_memory


class BlockRunner:
    """Runs a block drafter with its KV cache and an attention backend.

    Args:
        draft: Block drafter on the device of `kv`.
        kv: Cache of the drafter's shape.
        attention: Backend for the drafter's device.
    """

    def __init__(self, draft: BlockDraft, kv: PagedKV, attention: AttentionBackend) -> None:
        self.draft = draft
        self.kv = kv
        self.attention = attention
        if kv.data.device.type == "cpu":
            keep_freed_memory()

    @torch.inference_mode()
    def fuse(self, rows: torch.Tensor) -> torch.Tensor:
        """See `DraftHead.fuse`."""
        with few_variants(cut_keys=False):
            return self.draft.fuse(rows)

    @torch.inference_mode()
    def extend(self, rows: Sequence[SequenceRows], features: torch.Tensor) -> None:
        """Writes the keys and values of committed tokens.

        Args:
            rows: At least one sequence; their tokens are not read.
            features: [num_rows, hidden_size], from `fuse` for the rows' positions.

        Raises:
            ValueError: Rows that contradict themselves or the cache.
        """
        batch = self._batch(rows)
        with few_variants(cut_keys=False):
            self.draft.extend(features, batch.positions, batch.slots, self.kv)

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
        ordered = None if causal is None else self._batch(causal)
        with few_variants(cut_keys=False):
            return self.draft(self._batch(rows), ordered, self.kv, self.attention)

    def _batch(self, rows: Sequence[SequenceRows]) -> Batch:
        num_slots = self.kv.data.shape[2]
        return build_batch(rows, self.kv.page_size, num_slots, self.kv.data.device)
