"""Runs one model on its paged cache.

Decides nothing about which rows are computed or which tokens are taken.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from foredraft.attention.base import AttentionBackend
from foredraft.cpu.threads import threads_for
from foredraft.kernel_launch import few_variants
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.decoder import DecoderModel, ModelOutput
from foredraft.runner.batch import SequenceRows, build_batch
from foredraft.runner.heap import keep_freed_memory

ForwardOutput = ModelOutput


class ModelRunner:
    """Runs a model with its KV cache and an attention backend.

    Args:
        model: Model on the device of `kv`.
        kv: Cache of the model's shape.
        attention: Backend for the model's device.
        cut_keys: Whether attention may cut keys into parts, see `few_variants`; worth it for long
            contexts.
    """

    def __init__(
        self, model: DecoderModel, kv: PagedKV, attention: AttentionBackend, cut_keys: bool = True
    ) -> None:
        self._cut_keys = cut_keys
        self.model = model
        self.kv = kv
        self.attention = attention
        # Recorded before the newest forward.
        self._before = torch.cuda.Event() if kv.data.is_cuda else None
        if kv.data.device.type == "cpu":
            keep_freed_memory()

    @torch.inference_mode()
    def forward(
        self,
        rows: Sequence[SequenceRows],
        capture: Sequence[int] = (),
        embeddings: torch.Tensor | None = None,
        all_hidden: bool = True,
    ) -> ForwardOutput:
        """Computes the rows of some sequences and writes their KV.

        On a GPU the host waits for the forward before the newest one, so that it runs one ahead,
        and whatever comes meanwhile need not wait longer.

        Args:
            rows: At least one sequence; no two write the same slot.
            capture: Layers whose input (the residual stream) is returned too; see
                `DecoderModel.forward`.
            embeddings: [num_rows, hidden], used instead of the tokens' embeddings.
            all_hidden: Whether hidden states of all rows are wanted, see `DecoderModel.forward`.

        Returns:
            Logits float32 [R, vocab_size] of the rows that ask for them, in order; captured
            streams of all rows; hidden states of all rows, or of those with logits, see
            `ModelOutput`.

        Raises:
            ValueError: Rows that contradict themselves or the cache.
        """
        if self._before is not None:
            self._before.synchronize()
            self._before.record()
        batch = build_batch(rows, self.kv)
        batch.embeddings = embeddings
        with few_variants(self._cut_keys), threads_for(len(batch.positions)):
            return self.model.forward(
                batch, self.kv, self.attention, capture, all_hidden=all_hidden
            )

    def without_repeats(self) -> AbstractContextManager[None]:
        """See DecoderModel."""
        return self.model.without_repeats()

    @torch.inference_mode()
    def trial(
        self,
        rows: Sequence[SequenceRows],
        capture: Sequence[int] = (),
        all_hidden: bool = True,
    ) -> Callable[[], object]:
        """Returns a function that launches the kernels of `forward`, for their compilation; it
        copies nothing from the host.
        """
        batch = build_batch(rows, self.kv)
        with few_variants(self._cut_keys):
            plan = self.model.plan(batch, self.kv, self.attention, capture, all_hidden)

        @torch.inference_mode()
        def run() -> None:
            with few_variants(self._cut_keys), self.model.without_repeats():
                self.model.forward(batch, self.kv, self.attention, capture, plan)

        return run

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes logits [n, vocab_size] of hidden states [n, hidden] of a forward."""
        with few_variants(self._cut_keys), threads_for(len(hidden)):
            return self.model.lm_head(hidden)

    @torch.inference_mode()
    def commit_paths(self, paths: Sequence[tuple[Sequence[int], int, Sequence[int]]]) -> None:
        """Moves the KV of trees' accepted rows to follow the committed keys.

        Args:
            paths: For each tree, its page table, the number of keys before it, and the accepted
                rows in ascending order from the root (row 0) on. Row i lies at key index committed
                + i.
        """
        size = self.kv.page_size
        sources, targets = [], []
        for pages, committed, path in paths:
            for index, row in enumerate(path):
                if row != index:
                    source, target = committed + row, committed + index
                    sources.append(pages[source // size] * size + source % size)
                    targets.append(pages[target // size] * size + target % size)
        if sources:
            slots = torch.tensor([sources, targets]).to(self.kv.data.device)
            self.kv.copy_slots(slots[0], slots[1])
