"""Runs one draft head on its paged cache.

Decides nothing about which rows are computed or which tokens are taken.
"""

from collections.abc import Sequence

import torch

from draft_service.models.draft_head import HeadOutput, LevelHead
from foredraft.attention.base import AttentionBackend
from foredraft.kernel_launch import few_variants
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.batch import SequenceRows, build_batch
from foredraft.runner.heap import keep_freed_memory


class HeadRunner:
    """Runs a head with its KV cache and an attention backend.

    Args:
        head: Head on the device of `kv`.
        kv: Cache of the head's shape.
        attention: Backend for the head's device.
    """

    def __init__(self, head: LevelHead, kv: PagedKV, attention: AttentionBackend) -> None:
        self.head = head
        self.kv = kv
        self.attention = attention
        if kv.data.device.type == "cpu":
            keep_freed_memory()

    @torch.inference_mode()
    def fuse(self, rows: torch.Tensor) -> torch.Tensor:
        """See `LevelHead.fuse`."""
        with few_variants(cut_keys=False):
            return self.head.fuse(rows)

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
        num_slots = self.kv.data.shape[2]
        batch = build_batch(rows, self.kv.page_size, num_slots, self.kv.data.device)
        with few_variants(cut_keys=False):  # one layer is fast even over long contexts
            return self.head.forward(batch, features, self.kv, self.attention, module, all_features)
