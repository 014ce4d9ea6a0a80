"""One decode step as a CUDA graph: trees in, the target's forward, the rule, the walk, accepted KV in place, tokens out.

Everything has a fixed shape: B sequences of R rows, padded, with a graph for each pair that is used. Lengths, pages and
trees are read from device memory, so a step needs one upload, one launch and one download.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from foredraft.attention.base import AttentionBackend, Batch
from foredraft.attention.paged_triton import TritonPlan, splits_for
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.decoder import DecoderModel, ModelOutput
from foredraft.speculation.triton_sampling import (
    PAD,
    choose_tokens,
    commit_paths,
    prepare_trees,
    walk_trees,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Columns of a sequence's record, before its tokens and its parents.
SLOT, COMMITTED, NUM_ROWS, TEMPERATURE, SEED_LOW, SEED_HIGH = range(6)
HEADER = 6
PAGE_UPDATES = 8192  # of one upload


@dataclass(slots=True)
class StepArrays:
    """What the host fills in for a step, views of one pinned block.

    Attributes:
        header: int32 [B, HEADER].
        tokens: int32 [B, R]; the root first.
        parents: int32 [B, R], parent rows; see `triton_sampling`.
        forced: int32 [B, R], tokens to take instead of the rule's, -1 for none; where acceptance is simulated.
    """

    header: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    forced: npt.NDArray[np.int32] | None


@dataclass(frozen=True, slots=True)
class _Key:
    batch: int
    rows: int
    capture: tuple[int, ...]


@dataclass(slots=True)
class _Forward:
    """What the forward of one shape reads and gives, in memory that its graph keeps."""

    output: ModelOutput
    tokens: torch.Tensor
    parents: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the rule gave, on the host.

    Attributes:
        lengths: int32 [B], accepted rows.
        paths: int32 [B, R], these rows, the root first; -1 after.
        tokens: int32 [B, R], the token emitted at each; -1 after.
    """

    lengths: npt.NDArray[np.int32]
    paths: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]


class DecodeGraphs:
    """Captured decode steps of one model over one cache.

    Args:
        max_batch: Sequences at most.
        max_rows: Rows of a sequence at most, the root included.
        max_tokens: Of a sequence.
        num_slots: Sequences that may be known at a time; each has a page table of its own on the device.
        simulate: Whether `StepArrays.forced` is obeyed.

    Attributes:
        capture: Layers that were captured when the graphs were made ready.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv: PagedKV,
        attention: AttentionBackend,
        *,
        max_batch: int,
        max_rows: int,
        max_tokens: int,
        num_slots: int,
        simulate: bool = False,
    ) -> None:
        if not kv.num_scratch_pages:
            raise ValueError("padding rows need a scratch page")
        self.max_batch, self.max_rows = max_batch, max_rows
        self.batch_sizes = batch_sizes(max_batch)
        self.capture: tuple[int, ...] = ()
        self._model, self._kv, self._attention = model, kv, attention
        self._max_tokens = max_tokens
        self._simulate = simulate
        device = self._device = kv.data.device
        width = HEADER + max_rows * (3 if simulate else 2)
        self._host = torch.zeros(max_batch, width, dtype=torch.int32).pin_memory()
        self._inputs = torch.zeros(max_batch, width, dtype=torch.int32, device=device)
        max_pages = -(-(max_tokens + max_rows) // kv.page_size)
        # The last row belongs to no sequence: padding reads it, and padded updates go there.
        self._no_slot = num_slots
        self._tables = torch.zeros(num_slots + 1, max_pages, dtype=torch.int32, device=device)
        self._updates = torch.zeros(3, PAGE_UPDATES, dtype=torch.int64).pin_memory()
        self._results = torch.zeros(max_batch, 1 + 2 * max_rows, dtype=torch.int32, device=device)
        self._host_results = torch.zeros_like(self._results, device="cpu").pin_memory()
        self._done = torch.cuda.Event()
        self._pool = torch.cuda.graph_pool_handle()
        self._steps: dict[_Key, tuple[torch.cuda.CUDAGraph, ModelOutput]] = {}
        self._forwards: dict[_Key, tuple[torch.cuda.CUDAGraph, ModelOutput]] = {}

    def batch_size(self, num_sequences: int) -> int:
        """The padded batch of a step."""
        return next(size for size in self.batch_sizes if size >= num_sequences)

    def set_pages(self, updates: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Writes parts of page tables: (slot, first entry, pages) each. Takes effect for the steps after it."""
        if not updates:
            return
        slots = np.concatenate([np.full(len(pages), slot) for slot, _, pages in updates])
        entries = np.concatenate([np.arange(a, a + len(pages)) for _, a, pages in updates])
        pages = np.concatenate([np.asarray(pages) for _, _, pages in updates])
        for start in range(0, len(slots), PAGE_UPDATES):
            if start:
                torch.cuda.current_stream().synchronize()  # the pinned block is still being read
            end = min(start + PAGE_UPDATES, len(slots))
            block = self._updates[:, : end - start]
            for row, values in zip(block.numpy(), (slots, entries, pages), strict=True):
                row[:] = values[start:end]
            where_and_what = block.to(self._device, non_blocking=True)
            self._tables.index_put_(
                (where_and_what[0], where_and_what[1]), where_and_what[2].to(torch.int32)
            )

    def arrays(self, num_sequences: int, num_rows: int) -> StepArrays:
        """What to fill in for a step; padding is filled in already."""
        batch = self.batch_size(num_sequences)
        host = self._host.numpy()
        padding = host[num_sequences:batch]
        padding[:, :HEADER] = 0
        padding[:, SLOT] = self._no_slot
        padding[:, HEADER + self.max_rows :] = PAD
        rows = host[:num_sequences]
        first_parent = HEADER + self.max_rows
        first_forced = first_parent + self.max_rows
        return StepArrays(
            header=rows[:, :HEADER],
            tokens=rows[:, HEADER : HEADER + num_rows],
            parents=rows[:, first_parent : first_parent + num_rows],
            forced=rows[:, first_forced : first_forced + num_rows] if self._simulate else None,
        )

    def step(
        self, num_sequences: int, num_rows: int, capture: Sequence[int]
    ) -> tuple[ModelOutput, Chosen]:
        """Runs a whole step on the arrays that were filled in, and waits for the tokens.

        Returns:
            Hidden states of all B x R rows, padding included, valid until the next step (the logits are gone); and what
            was chosen, views that the next step overwrites.
        """
        key = _Key(self.batch_size(num_sequences), num_rows, tuple(capture))
        self._upload(key)
        if key not in self._steps:
            self._steps[key] = self._capture_step(key)
        graph, output = self._steps[key]
        graph.replay()
        self._host_results[: key.batch].copy_(self._results[: key.batch], non_blocking=True)
        self._done.record()
        self._done.synchronize()
        results = self._host_results.numpy()[:num_sequences]
        first = 1 + self.max_rows
        return output, Chosen(
            results[:, 0], results[:, 1 : 1 + num_rows], results[:, first : first + num_rows]
        )

    def forward(self, num_sequences: int, num_rows: int, capture: Sequence[int]) -> ModelOutput:
        """Runs the target alone, for batches whose tokens are chosen otherwise.

        Returns:
            Logits and hidden states of all B x R rows, padding included; valid until the next step.
        """
        key = _Key(self.batch_size(num_sequences), num_rows, tuple(capture))
        self._upload(key)
        if key not in self._forwards:
            graph, forward = self._record(lambda: self._forward(key))
            self._forwards[key] = graph, forward.output
        graph, output = self._forwards[key]
        graph.replay()
        return output

    def warm_up(self, num_rows: Sequence[int], capture: Sequence[int]) -> None:
        """Captures every batch size, largest first, so that the others fit its memory."""
        self.capture = tuple(capture)
        for rows in sorted(num_rows, reverse=True):
            for batch in reversed(self.batch_sizes):
                self.arrays(0, rows)
                host = self._host.numpy()[:batch]
                host[:] = 0
                host[:, SLOT] = self._no_slot
                host[:, HEADER + self.max_rows :] = PAD
                self.step(batch, rows, capture)

    def _upload(self, key: _Key) -> None:
        self._inputs[: key.batch].copy_(self._host[: key.batch], non_blocking=True)

    def _capture_step(self, key: _Key) -> tuple[torch.cuda.CUDAGraph, ModelOutput]:
        def run() -> ModelOutput:
            forward = self._forward(key)
            self._choose(key, forward)
            # Without its logits, the largest tensor, whose memory serves the other graphs too.
            output = forward.output
            return replace(output, logits=output.logits.new_empty(0))

        return self._record(run)

    def _forward(self, key: _Key) -> _Forward:
        inputs = self._inputs[: key.batch]
        tokens = inputs[:, HEADER : HEADER + key.rows]
        first = HEADER + self.max_rows
        parents = inputs[:, first : first + key.rows]
        batch, tables = self._batch(key, inputs, tokens, parents)
        output = self._model.forward(batch, self._kv, self._attention, key.capture)
        return _Forward(output, tokens, parents, batch.positions, tables)

    def _record(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Runs once for real, which compiles what is not compiled yet, then captures."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = run()
        return graph, result

    def _batch(
        self, key: _Key, inputs: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor
    ) -> tuple[Batch, torch.Tensor]:
        """The step as the model sees it, made of the uploaded records."""
        kv, device = self._kv, self._device
        slots, committed, num_rows = (inputs[:, i] for i in (SLOT, COMMITTED, NUM_ROWS))
        tables = self._tables.index_select(0, slots)
        rows = prepare_trees(
            tokens,
            parents,
            committed,
            num_rows,
            tables,
            kv.page_size,
            self._model.config.vocab_size,
            kv.num_pages * kv.page_size,
        )
        plan = TritonPlan(
            kv=kv,
            page_tables=tables,
            first_row=torch.arange(
                0, key.batch * key.rows, key.rows, dtype=torch.int32, device=device
            ),
            num_rows=num_rows.contiguous(),
            prefix_start=torch.zeros(key.batch, dtype=torch.int32, device=device),
            prefix_len=committed.contiguous(),
            write_index=committed.contiguous(),
            positions=rows.positions,
            tail_mask=rows.mask if key.rows > 1 else None,
            is_causal=None,
            tail_positions=rows.positions.view(key.batch, key.rows).to(torch.int32),
            max_rows=key.rows,
            num_splits=splits_for(key.batch, key.rows, kv, self._max_tokens),
        )
        batch = Batch(rows.tokens, rows.positions, rows.slots, (), plan=plan)
        return batch, tables

    def _choose(self, key: _Key, forward: _Forward) -> None:
        inputs = self._inputs[: key.batch]
        header = inputs[:, :HEADER]
        committed = header[:, COMMITTED]
        temperature = header[:, TEMPERATURE].contiguous().view(torch.float32)
        seed = header[:, SEED_LOW : SEED_HIGH + 1].contiguous().view(torch.int64)

        def each_row(values: torch.Tensor) -> torch.Tensor:
            # Of a single sequence, flatten alone would give a view that stands still.
            return values.view(key.batch, 1).expand(-1, key.rows).flatten().contiguous()

        chosen = choose_tokens(
            forward.output.logits, each_row(temperature), each_row(seed), forward.positions + 1
        ).view(key.batch, key.rows)
        if self._simulate:
            first = HEADER + 2 * self.max_rows
            forced = inputs[:, first : first + key.rows]
            chosen = torch.where(forced >= 0, forced.long(), chosen)
        path, length, emitted = walk_trees(chosen, forward.tokens, forward.parents)
        if key.rows > 1:
            commit_paths(self._kv, forward.tables, committed.contiguous(), path, length)
        results = self._results[: key.batch]
        results[:, 0] = length
        results[:, 1 : 1 + key.rows] = path
        first = 1 + self.max_rows
        results[:, first : first + key.rows] = emitted.to(torch.int32)


def batch_sizes(max_batch: int) -> list[int]:
    """Sizes that batches are padded to: powers of two up to 8, then multiples of 8, wider apart from 64 on."""
    sizes = [1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, max_batch + 1, 32)]
    kept = [size for size in sizes if size < max_batch]
    return [*kept, max_batch]
