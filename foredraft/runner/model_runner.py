"""Runs one model on its paged cache. Decides nothing about which rows are computed or which tokens are taken."""

from collections.abc import Sequence

import torch

from foredraft.attention.base import AttentionBackend
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.decoder import DecoderModel, ModelOutput
from foredraft.runner.batch import SequenceRows, build_batch

ForwardOutput = ModelOutput


class ModelRunner:
    """A model, its KV cache and an attention backend.

    Args:
        model: On the device of `kv`.
        kv: Of the model's shape.
        attention: For the model's device.
    """

    def __init__(self, model: DecoderModel, kv: PagedKV, attention: AttentionBackend) -> None:
        self.model = model
        self.kv = kv
        self.attention = attention

    @torch.inference_mode()
    def forward(
        self,
        rows: Sequence[SequenceRows],
        capture: Sequence[int] = (),
        embeddings: torch.Tensor | None = None,
    ) -> ForwardOutput:
        """Computes the rows of some sequences and writes their KV.

        Args:
            rows: At least one sequence; no two write the same slot.
            capture: Layers whose entering residual stream is wanted; see `DecoderModel.forward`.
            embeddings: [num_rows, hidden] instead of the tokens' own embeddings.

        Returns:
            Logits float32 [R, vocab_size] of the rows that ask for them, in order; hidden states and captured
            streams of all rows.

        Raises:
            ValueError: Rows that contradict themselves or the cache.
        """
        num_slots = self.kv.data.shape[2]
        batch = build_batch(rows, self.kv.page_size, num_slots, self.kv.data.device)
        batch.embeddings = embeddings
        return self.model.forward(batch, self.kv, self.attention, capture)

    @torch.inference_mode()
    def commit_path(self, pages: Sequence[int], committed_len: int, path: Sequence[int]) -> None:
        """Moves the KV of a tree's accepted rows to follow the committed keys.

        Args:
            pages: The page table that the tree's rows were computed with.
            committed_len: Keys before the tree; row i of the tree lies at key index committed_len + i.
            path: Accepted rows from the root (row 0) on, ascending.
        """
        moves = [(row, index) for index, row in enumerate(path) if row != index]
        if not moves:
            return
        size = self.kv.page_size

        def slots(indexes: list[int]) -> torch.Tensor:
            keys = [committed_len + index for index in indexes]
            numbers = [pages[key // size] * size + key % size for key in keys]
            return torch.tensor(numbers, device=self.kv.data.device)

        self.kv.copy_slots(slots([row for row, _ in moves]), slots([index for _, index in moves]))
