"""Base of the runners of drafts that read the target's hidden states."""

from typing import Generic, TypeVar

import torch

from draft_service.models.draft_head import DraftHead
from foredraft.attention.base import AttentionBackend
from foredraft.cpu.threads import threads_for
from foredraft.kernel_launch import few_variants
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.heap import keep_freed_memory

Head = TypeVar("Head", bound=DraftHead)


class DraftRunner(Generic[Head]):
    """A draft with its KV cache and an attention backend.

    Args:
        head: Draft on the device of `kv`.
        kv: Cache of the draft's shape.
        attention: Backend for the draft's device.
    """

    def __init__(self, head: Head, kv: PagedKV, attention: AttentionBackend) -> None:
        self.head = head
        self.kv = kv
        self.attention = attention
        if kv.data.device.type == "cpu":
            keep_freed_memory()

    @torch.inference_mode()
    def fuse(self, rows: torch.Tensor) -> torch.Tensor:
        """See `DraftHead.fuse`."""
        with few_variants(cut_keys=False), threads_for(len(rows)):
            return self.head.fuse(rows)
