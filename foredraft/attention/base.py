"""Interface of attention backends, and the description of a forward that models pass to them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from foredraft.kvcache.paged_kv import PagedKV

MOST_PLANS = 2  # of a forward: one for each half of its rows
# Number of rows without logits from which on a plan of the others takes less time than it spares.
WORTH_PICKING = 64
# Maximum number of those others: graphs of prompts have as many rows, see `timed_size`.
MOST_PICKED = 1024
# Maximum number of them in a sequence: not a prompt to any backend, whose plans of prompts are few.
MOST_PICKED_OF_ONE = 64


@dataclass(slots=True)
class SequenceSpan:
    """Locates the rows of one sequence in a batch, and the keys that they may see.

    A key's index is its place in the order of the page table. Keys [prefix_start, prefix_len) are
    seen by every row and stand at the position of their index. From prefix_len on lies the tail;
    rows write their own keys to its end, from write_index on.

    Attributes:
        first_row: Index of the sequence's first row in the batch.
        positions: int64 [n], absolute positions of the rows.
        pages: int64, page table of the sequence.
        tail_mask: bool [n, write_index + n - prefix_len] on the CPU, which keys of the tail each
            row sees; None for causal rows (write_index == prefix_len).
        tail_positions: int64 [write_index + n - prefix_len], positions of the tail's keys; None
            where they equal the key indexes.
        first_wanted: First of the rows whose logits are computed, among the sequence's; those after
            it are computed too.
    """

    first_row: int
    positions: npt.NDArray[np.int64]
    pages: npt.NDArray[np.int64]
    prefix_start: int
    prefix_len: int
    write_index: int
    tail_mask: torch.Tensor | None = None
    tail_positions: npt.NDArray[np.int64] | None = None
    first_wanted: int = 0

    @property
    def num_rows(self) -> int:
        """Number of rows of the sequence."""
        return len(self.positions)

    @property
    def num_wanted(self) -> int:
        """Number of rows whose logits are computed."""
        return self.num_rows - self.first_wanted

    @property
    def can_be_cut(self) -> bool:
        """Whether the rows are causal, so that they can be cut between any two."""
        return self.tail_mask is None and self.tail_positions is None

    @property
    def num_keys(self) -> int:
        """Number of keys up to and including the rows' own."""
        return self.write_index + len(self.positions)

    def part(self, begin: int, end: int, first_row: int) -> "SequenceSpan":
        """Returns some of the rows, [begin, end), as those of another batch; all of them unless
        they are causal.

        Args:
            first_row: Index of the part's first row in that batch.
        """
        if end - begin == self.num_rows:
            return replace(self, first_row=first_row)
        write_index = self.write_index + begin
        return replace(
            self,
            first_row=first_row,
            positions=self.positions[begin:end],
            prefix_len=write_index,
            write_index=write_index,
            first_wanted=min(max(self.first_wanted - begin, 0), end - begin),
        )


@dataclass(slots=True)
class Batch:
    """Holds the rows of one forward, sequence after sequence.

    Attributes:
        tokens: int64 [num_rows], input tokens.
        positions: int64 [num_rows], absolute positions.
        slots: int64 [num_rows], KV slots that the rows' keys and values are written to.
        spans: One span per sequence.
        logit_rows: int64, rows whose logits are computed; None for all.
        embeddings: [num_rows, hidden], used instead of the tokens' embeddings; None for those.
        plan: Plan that a graph runner has made for the backend's `plan` to return; `spans` are not
            read then.
        reaches: int64 [num_rows], see `Rotary.angles`; None where every row reaches its own
            position.
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
        """Number of rows of all sequences."""
        return self.tokens.shape[0]

    def halves(self, num_rows: int) -> tuple["Batch", "Batch"]:
        """Returns the first rows and the others, as batches to be computed in this order, layer by
        layer.

        Args:
            num_rows: Wanted number of first rows, less than there are; where that is amid a
                sequence that cannot be cut, a tree for example, the first batch ends before it.
        """
        spans: tuple[list[SequenceSpan], list[SequenceSpan]] = [], []
        for span in self.spans:
            cut = num_rows - span.first_row
            if 0 < cut < span.num_rows and not span.can_be_cut:
                cut, num_rows = 0, span.first_row
            if cut > 0:
                spans[0].append(span.part(0, min(cut, span.num_rows), span.first_row))
            if cut < span.num_rows:
                begin = max(cut, 0)
                spans[1].append(span.part(begin, span.num_rows, span.first_row + begin - num_rows))
        first, second = slice(num_rows), slice(num_rows, None)
        wanted: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
        if self.logit_rows is not None:
            count = sum(span.num_wanted for span in spans[0])
            wanted = self.logit_rows[:count], self.logit_rows[count:] - num_rows
        return self._rows(first, spans[0], wanted[0]), self._rows(second, spans[1], wanted[1])

    def _rows(
        self,
        rows: slice | torch.Tensor,
        spans: Sequence[SequenceSpan],
        logit_rows: torch.Tensor | None = None,
    ) -> "Batch":
        return Batch(
            self.tokens[rows],
            self.positions[rows],
            self.slots[rows],
            spans,
            logit_rows,
            None if self.embeddings is None else self.embeddings[rows],
            reaches=None if self.reaches is None else self.reaches[rows],
        )

    @property
    def wants_few(self) -> bool:
        """Whether few rows have logits and many have none, and `wanted` can pick the former."""
        if self.plan is not None or self.logit_rows is None:
            return False
        num_wanted = len(self.logit_rows)
        can_pick = all(
            span.can_be_cut if span.first_wanted else span.num_rows <= MOST_PICKED_OF_ONE
            for span in self.spans
        )
        is_worth_it = self.num_rows - num_wanted >= max(WORTH_PICKING, num_wanted)
        return can_pick and num_wanted <= MOST_PICKED and is_worth_it

    def wanted(self, least: int) -> tuple[torch.Tensor, "Batch"]:
        """Returns the rows with logits as a batch of their own, behind their indexes int64 [n].

        Only for a batch that `wants_few`, or halves of one.

        Args:
            least: Number of rows to return at least, as far as there are causal sequences: rows of
                the longest of them follow the others.
        """
        assert self.logit_rows is not None
        index, spans, first = self.logit_rows, list[SequenceSpan](), 0
        for span in self.spans:
            if span.num_wanted:
                spans.append(span.part(span.first_wanted, span.num_rows, first))
                first += span.num_wanted
        causal = (span for span in self.spans if span.can_be_cut)
        filler = max(causal, key=lambda span: span.num_rows, default=None)
        while filler is not None and first < least:
            num_rows = min(least - first, filler.num_rows, MOST_PICKED_OF_ONE)
            spans.append(filler.part(0, num_rows, first))
            more = torch.arange(filler.first_row, filler.first_row + num_rows, device=index.device)
            index, first = torch.cat([index, more]), first + num_rows
        return index, self._rows(index, spans)


@dataclass(frozen=True, slots=True)
class WantedRows:
    """Names rows of a batch that a layer returns; of the others it computes keys and values alone.

    Attributes:
        index: int64 [n], at least one: the rows to return, and after them some that nobody reads.
        plan: Backend's plan of these rows.
    """

    index: torch.Tensor
    plan: object


@dataclass(frozen=True, slots=True)
class ForwardSizes:
    """Maximum sizes of forwards.

    Attributes:
        num_rows: Number of rows of all sequences.
        num_keys: Number of keys of a sequence.
        cuts_keys: Whether keys may be cut into parts.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads.
        head_dim: Width of a head.
    """

    num_rows: int
    num_keys: int
    cuts_keys: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int


class AttentionBackend(ABC):
    """Computes attention of a batch's rows over the paged cache."""

    def block_rows(self, max_rows: int, group_size: int, dtype: torch.dtype, kv: PagedKV) -> int:
        """Returns the size of a program's block, where a plan lists blocks; on GPUs only.

        The size counts rows times query heads of a KV head.

        Args:
            max_rows: Maximum number of rows of a sequence.
            group_size: Query heads per KV head.
            dtype: Type of the queries.
        """
        raise NotImplementedError

    def cuts_keys(
        self, batch: int, max_rows: int, num_keys: int, group_size: int, kv: PagedKV
    ) -> bool:
        """Returns whether forwards outside of graphs cut a sequence's keys into parts; for GPUs.

        Args:
            batch: Number of sequences.
            max_rows: Maximum number of rows of a sequence.
            num_keys: Maximum number of keys of a sequence.
            group_size: Query heads per KV head.
        """
        raise NotImplementedError

    def shared_rows(self, num_rows: int, group_size: int, dtype: torch.dtype, kv: PagedKV) -> int:
        """Returns how many rows of several sequences may read the keys that they share together; 0
        if each sequence reads all of its keys itself.

        Args:
            num_rows: Number of rows of a step.
            group_size: Query heads per KV head.
            dtype: Type of the queries.
        """
        return 0

    def prompt_rows(self, group_size: int, kv: PagedKV) -> int | None:
        """Returns the number of rows from which on a sequence alone is computed by a kernel of its
        own; None if there is no such kernel, or none that must be compiled.

        Args:
            group_size: Query heads per KV head.
            kv: The cache.
        """
        return None

    def partial_bytes(self, sizes: ForwardSizes, device: torch.device) -> int:
        """Returns the maximum bytes of what parts of the keys leave for another kernel.

        Args:
            sizes: Sizes of the largest forward.
            device: Device of the queries.
        """
        return 0

    @abstractmethod
    def plan(
        self, batch: Batch, kv: PagedKV, windows: Sequence[int | None], group_size: int
    ) -> Any:
        """Prepares the data that all layers of one forward read.

        The newest MOST_PLANS of a backend's plans can be used, in turns.

        Args:
            windows: Distinct attention windows of the layers; None stands for a layer that sees all
                keys.
            group_size: Query heads per KV head.

        Returns:
            A plan that only `attend` reads.
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
        """Computes attention of one layer; the rows' own keys and values are in the cache already.

        Args:
            queries: [num_rows, num_heads, head_dim], rotated.
            layer: Index of the layer in the cache.
            window: One of the planned windows; a row sees keys with position > its own - window.
            scale: Factor of the scores.
            out: [num_rows, num_heads * head_dim], written.
        """
