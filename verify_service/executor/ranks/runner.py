"""Rank 0's runner: sends each forward and each move of keys and values to the other ranks, and
computes its own share.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from foredraft.attention.base import AttentionBackend
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.decoder import DecoderModel
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ForwardOutput, ModelRunner
from verify_service.executor.ranks import messages
from verify_service.executor.ranks.board import timed
from verify_service.executor.ranks.workers import Ranks


class RankedRunner(ModelRunner):
    """A `ModelRunner` of a model that several ranks share."""

    def __init__(
        self, model: DecoderModel, kv: PagedKV, attention: AttentionBackend, ranks: Ranks
    ) -> None:
        super().__init__(model, kv, attention)
        self._ranks = ranks

    def forward(
        self,
        rows: Sequence[SequenceRows],
        capture: Sequence[int] = (),
        embeddings: torch.Tensor | None = None,
        all_hidden: bool = True,
    ) -> ForwardOutput:
        """See ModelRunner; takes tokens only, since ranks are not sent embeddings."""
        if embeddings is not None:
            raise ValueError("ranks are sent tokens, not embeddings")
        self._ranks.board.write(messages.forward(rows, capture, all_hidden))
        with timed(self._ranks.board):
            return super().forward(rows, capture, all_hidden=all_hidden)

    def without_repeats(self) -> AbstractContextManager[None]:
        """Leaves out nothing, since the other ranks run whole forwards."""
        return nullcontext()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ModelRunner."""
        self._ranks.board.write(messages.logits(len(hidden)))
        head = self.model.lm_head
        with timed(self._ranks.board):
            logits = super().logits(self._ranks.group.broadcast(hidden))
            return logits if head.gathers else head.gather(logits)

    def commit_paths(self, paths: Sequence[messages.Path]) -> None:
        """See ModelRunner."""
        moved = [path for path in paths if any(row != i for i, row in enumerate(path[2]))]
        if moved:
            self._ranks.board.write(messages.move(moved))
            super().commit_paths(moved)
