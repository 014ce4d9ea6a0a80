"""One decode step as a CUDA graph: trees in, the target's forward, the rule, the walk, accepted KV in place, tokens out.

Everything has a fixed shape: B sequences of R rows, padded, with a graph for each pair that is used. Lengths, pages and
trees are read from device memory, so a step needs one upload, one launch and one download; and a step may be started before
the outcome of the one before it is known on the host.
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
from foredraft.runner.step_buffers import RunningStep, StepArrays, pinned
from foredraft.speculation.triton_sampling import (
    PAD,
    choose_tokens,
    commit_paths,
    prepare_trees,
    walk_trees,
)
from foredraft.speculation.triton_steps import (
    HEADER,
    MIN_P,
    NUM_ROWS,
    SEED_LOW,
    SLOT,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TREE,
    Begun,
    Ended,
    begin_step,
    end_step,
    pretend_paths,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

LEAST_ROWS = 32  # of a step that is worth a graph of its own between one row per sequence and all
PAGE_UPDATES = 8192  # of one upload
UNDER_WAY = 3  # steps whose host memory must not be written yet: one that runs, one behind it, one being filled in


@dataclass(frozen=True, slots=True)
class _Key:
    batch: int
    rows: int
    capture: tuple[int, ...]
    is_filtered: bool = False


@dataclass(slots=True)
class _Forward:
    """What the forward of one shape reads and gives, in memory that its graph keeps."""

    output: ModelOutput
    begun: Begun
    positions: torch.Tensor
    tables: torch.Tensor


class DecodeGraphs:
    """Captured decode steps of one model over one cache.

    Args:
        max_batch: Sequences at most.
        max_rows: Rows of a sequence at most, the root included.
        max_path: Tokens of one step that a draft is told of at most.
        max_tokens: Of a sequence.
        num_slots: Sequences that may be known at a time; each has a page table of its own on the device.
        simulate: Whether the column `FORCED` is obeyed.

    Attributes:
        capture: Layers that were captured when the graphs were made ready.
        trees: int32 [max_batch, 2, max_rows - 1]: what a draft on the device proposed, for records that say so.
        accepted, accepted_index: Of the newest step, for a draft; see `triton_steps.Ended`.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv: PagedKV,
        attention: AttentionBackend,
        *,
        max_batch: int,
        max_rows: int,
        max_path: int,
        max_tokens: int,
        num_slots: int,
        simulate: bool = False,
    ) -> None:
        if not kv.num_scratch_pages:
            raise ValueError("padding rows need a scratch page")
        self.max_batch, self.max_rows, self.max_path = max_batch, max_rows, max_path
        self.batch_sizes = batch_sizes(max_batch)
        self._row_sizes = {batch: row_sizes(batch, max_rows) for batch in self.batch_sizes}
        self.capture: tuple[int, ...] = ()
        self._model, self._kv, self._attention = model, kv, attention
        self._max_tokens = max_tokens
        self._simulate = simulate
        device = self._device = kv.data.device
        width = HEADER + 2 * max_rows
        self._hosts = pinned(UNDER_WAY, max_batch, width)
        self._inputs = torch.zeros(max_batch, width, dtype=torch.int32, device=device)
        # A step may begin before the one before it is over, which has a tree of its own.
        max_pages = -(-(max_tokens + 2 * max_rows) // kv.page_size)
        # The last row belongs to no sequence: padding reads it, and padded updates go there.
        self._no_slot = num_slots
        self._tables = torch.zeros(num_slots + 1, max_pages, dtype=torch.int32, device=device)
        self._state = torch.zeros(num_slots + 1, 2, dtype=torch.int32, device=device)
        self._updates = pinned(UNDER_WAY, 3, PAGE_UPDATES, dtype=torch.int64)
        self._results = torch.zeros(max_batch, 1 + 4 * max_rows, dtype=torch.int32, device=device)
        self._host_results = pinned(UNDER_WAY, *self._results.shape)
        self._done = [torch.cuda.Event() for _ in range(UNDER_WAY)]
        self._current = 0  # of all that is there UNDER_WAY times
        self.trees = torch.zeros(
            max_batch, 2, max(1, max_rows - 1), dtype=torch.int32, device=device
        )
        self.accepted = torch.zeros(max_batch, 1 + max_path, dtype=torch.int32, device=device)
        self.accepted_index = torch.zeros(max_batch * max_path, dtype=torch.int64, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        self._steps: dict[_Key, tuple[torch.cuda.CUDAGraph, ModelOutput]] = {}
        self._forwards: dict[_Key, tuple[torch.cuda.CUDAGraph, ModelOutput]] = {}

    def batch_size(self, num_sequences: int) -> int:
        """The padded batch of a step."""
        return next(size for size in self.batch_sizes if size >= num_sequences)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(batch, rows of each) of all steps that are worth a graph, the largest first."""
        shapes = [(batch, rows) for batch in self.batch_sizes for rows in self._row_sizes[batch]]
        return sorted(shapes, key=lambda shape: (shape[1], shape[0]), reverse=True)

    def row_size(self, num_sequences: int, num_rows: int) -> int:
        """The padded rows of each sequence of a step."""
        sizes = self._row_sizes[self.batch_size(num_sequences)]
        return next(size for size in sizes if size >= num_rows)

    def arrays(self, num_sequences: int, num_rows: int) -> StepArrays:
        """What to fill in for the next step; padding is filled in already."""
        self._current = (self._current + 1) % UNDER_WAY
        batch = self.batch_size(num_sequences)
        host = self._hosts[self._current].numpy()
        self._pad(host[num_sequences:batch])
        rows = host[:num_sequences]
        first_parent = HEADER + self.max_rows
        return StepArrays(
            header=rows[:, :HEADER],
            tokens=rows[:, HEADER : HEADER + num_rows],
            parents=rows[:, first_parent : first_parent + num_rows],
        )

    def set_pages(self, updates: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Writes parts of page tables: (slot, first entry, pages) each; after `arrays`, for that step and those after it."""
        if not updates:
            return
        slots = np.concatenate([np.full(len(pages), slot) for slot, _, pages in updates])
        entries = np.concatenate([np.arange(a, a + len(pages)) for _, a, pages in updates])
        pages = np.concatenate([np.asarray(pages) for _, _, pages in updates])
        for start in range(0, len(slots), PAGE_UPDATES):
            if start:
                torch.cuda.current_stream().synchronize()  # the pinned block is still being read
            end = min(start + PAGE_UPDATES, len(slots))
            block = self._updates[self._current][:, : end - start]
            for row, values in zip(block.numpy(), (slots, entries, pages), strict=True):
                row[:] = values[start:end]
            where_and_what = block.to(self._device, non_blocking=True)
            self._tables.index_put_(
                (where_and_what[0], where_and_what[1]), where_and_what[2].to(torch.int32)
            )

    def start(
        self,
        num_sequences: int,
        num_rows: int,
        capture: Sequence[int],
        is_filtered: bool = False,
    ) -> RunningStep:
        """Starts a whole step on the arrays that were filled in. At most one step that was started before may be running.

        Args:
            is_filtered: Whether top-k, top-p and min-p of the records are obeyed.
        """
        key = _Key(self.batch_size(num_sequences), num_rows, tuple(capture), is_filtered)
        self._upload(key)
        if key not in self._steps:
            self._steps[key] = self._capture_step(key)
        graph, output = self._steps[key]
        graph.replay()
        results, done = self._host_results[self._current], self._done[self._current]
        results[: key.batch].copy_(self._results[: key.batch], non_blocking=True)
        done.record()
        return RunningStep(output, results[:num_sequences], done, num_rows)

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

    def warm_up(self, capture: Sequence[int]) -> None:
        """Captures every shape, with and without filters, largest first, so that the others fit its memory."""
        self.capture = tuple(capture)
        for batch, rows in self.shapes:
            for is_filtered in (True, False):
                self.idle_step(batch, rows, is_filtered)

    def idle_step(self, batch: int, rows: int, is_filtered: bool = False) -> None:
        """Runs a step that belongs to no sequence."""
        self.arrays(0, rows)
        self._pad(self._hosts[self._current].numpy()[:batch])
        self.start(batch, rows, self.capture, is_filtered).chosen()

    def _pad(self, records: npt.NDArray[np.int32]) -> None:
        records[:, :HEADER] = 0
        records[:, SLOT] = self._no_slot
        records[:, TREE] = -1
        records[:, HEADER + self.max_rows :] = PAD

    def _upload(self, key: _Key) -> None:
        self._inputs[: key.batch].copy_(self._hosts[self._current][: key.batch], non_blocking=True)

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
        begun = begin_step(inputs, self.max_rows, key.rows, self._state, self.trees)
        batch, tables = self._batch(key, inputs, begun)
        output = self._model.forward(batch, self._kv, self._attention, key.capture)
        return _Forward(output, begun, batch.positions, tables)

    def _record(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Runs once for real, which compiles what is not compiled yet, then captures."""
        state = self._state.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        # A step that goes on from here must not begin where it has ended.
        self._state.copy_(state)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may use CUDA meanwhile: a draft may be attached at any time.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        return graph, result

    def _batch(self, key: _Key, inputs: torch.Tensor, begun: Begun) -> tuple[Batch, torch.Tensor]:
        """The step as the model sees it, made of the uploaded records."""
        kv, device = self._kv, self._device
        slots, num_rows = inputs[:, SLOT], inputs[:, NUM_ROWS].contiguous()
        tables = self._tables.index_select(0, slots)
        rows = prepare_trees(
            begun.tokens,
            begun.parents,
            begun.committed,
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
            num_rows=num_rows,
            prefix_start=torch.zeros(key.batch, dtype=torch.int32, device=device),
            prefix_len=begun.committed,
            write_index=begun.committed,
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
        inputs, begun = self._inputs[: key.batch], forward.begun

        def each_row(first: int, dtype: torch.dtype) -> torch.Tensor:
            """A value of the records, for each row of their sequences."""
            values = inputs[:, first : first + dtype.itemsize // 4].contiguous().view(dtype)
            # Of a single sequence, flatten alone would give a view that stands still.
            return values.view(key.batch, 1).expand(-1, key.rows).flatten().contiguous()

        filters: tuple[torch.Tensor, ...] = ()
        if key.is_filtered:
            floats = each_row(TOP_P, torch.float32), each_row(MIN_P, torch.float32)
            filters = (each_row(TOP_K, torch.int32), *floats)
        temperature, seed = each_row(TEMPERATURE, torch.float32), each_row(SEED_LOW, torch.int64)
        chosen = choose_tokens(
            forward.output.logits, temperature, seed, forward.positions + 1, *filters
        ).view(key.batch, key.rows)
        path, length, emitted = walk_trees(chosen, begun.tokens, begun.parents)
        if self._simulate:
            pretend_paths(inputs, path, length, emitted)
        if key.rows > 1:
            commit_paths(self._kv, forward.tables, begun.committed, path, length)
        ended = Ended(
            self._results[: key.batch],
            self._state,
            self.accepted[: key.batch],
            self.accepted_index[: key.batch * self.max_path],
        )
        end_step(inputs, begun, path, length, emitted, ended)


def batch_sizes(max_batch: int) -> list[int]:
    """Sizes that batches are padded to: powers of two up to 8, then multiples of 8, wider apart from 64 on."""
    sizes = [1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, max_batch + 1, 32)]
    kept = [size for size in sizes if size < max_batch]
    return [*kept, max_batch]


def row_sizes(batch: int, max_rows: int) -> list[int]:
    """Rows per sequence that are padded to: 1, powers of two, and `max_rows`.

    A few rows in all cost a GPU the same, so small batches have no small trees.
    """
    powers = (1 << i for i in range(1, max_rows.bit_length()))
    kept = [rows for rows in powers if rows < max_rows and batch * rows >= LEAST_ROWS]
    return sorted({1, *kept, max_rows})
