"""What a forward computes, as the model and its attention see it, and the interface of attention backends."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from foredraft.kvcache.paged_kv import PagedKV


@dataclass(slots=True)
class SequenceSpan:
    """The rows of one sequence in a batch and the keys that they may see.

    A key's index is its place in the order of the page table. Keys [prefix_start, prefix_len) are
    seen by every row and stand at the position of their index. From prefix_len on lies the tail; rows
    write their own keys to its end, from write_index on.

    Attributes:
        first_row: Of the batch.
        positions: int64 [n], absolute.
        pages: int64, the page table.
        tail_mask: bool [n, write_index + n - prefix_len] on the CPU; None for causal (write_index == prefix_len).
        tail_positions: int64 [write_index + n - prefix_len]; None where they are the key indexes.
    """

    first_row: int
    positions: npt.NDArray[np.int64]
    pages: npt.NDArray[np.int64]
    prefix_start: int
    prefix_len: int
    write_index: int
    tail_mask: torch.Tensor | None = None
    tail_positions: npt.NDArray[np.int64] | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the sequence."""
        return len(self.positions)

    @property
    def num_keys(self) -> int:
        """Keys up to and with the rows' own."""
        return self.write_index + len(self.positions)


@dataclass(slots=True)
class Batch:
    """The rows of one forward, sequence after sequence.

    Attributes:
        tokens: int64 [num_rows].
        positions: int64 [num_rows].
        slots: int64 [num_rows], where the rows' KV goes.
        spans: One per sequence.
        logit_rows: int64, the rows whose logits are wanted; None for all.
        embeddings: [num_rows, hidden] to use instead of the tokens' own, or None.
        plan: What the backend's `plan` shall return, made by a graph runner; `spans` are not read then.
        reaches: int64 [num_rows], see `Rotary.angles`; None where every row reaches its own position.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    spans: Sequence[SequenceSpan]
    logit_rows: torch.Tensor | None = None
    embeddings: torch.Tensor | None = None
    plan: object | None = None
    reaches: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows of all sequences."""
        return self.tokens.shape[0]


class AttentionBackend(ABC):
    """Computes attention of a batch's rows over the paged cache."""

    @abstractmethod
    def plan(
        self, batch: Batch, kv: PagedKV, windows: Sequence[int | None], group_size: int
    ) -> Any:
        """Prepares, once per forward, what the layers share.

        Args:
            windows: The different windows that layers have; None for a layer that sees all keys.
            group_size: Query heads per KV head.

        Returns:
            Something for `attend` alone.
        """

    @abstractmethod
    def attend(
        self,
        plan: Any,
        queries: torch.Tensor,
        layer: int,
        window: int | None,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Attention of one layer; the rows' own keys and values are in the cache already.

        Args:
            queries: [num_rows, num_heads, head_dim], rotated.
            layer: Of the cache.
            window: One of the windows that were planned: rows see keys with position > their own - window.
            scale: Of the scores.
            out: [num_rows, num_heads * head_dim], written.
        """
