"""One decode step as a CUDA graph: trees in, the target's forward, the rule, the walk, accepted KV in place, tokens out.

Everything has a fixed shape: B sequences of R rows, padded, with a graph for each pair that is used. Lengths, pages and
trees are read from device memory, so a step needs one upload, one launch and one download; and a step may be started before
the outcome of the one before it is known on the host.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from foredraft.models.decoder import ModelOutput
from foredraft.runner.aside import capture_graph, run_aside
from foredraft.trees.draft_tree import NO_PARENT
from verify_service.executor.decode_step import DecodeStep, StepKind
from verify_service.executor.step_buffers import UNDER_WAY, RunningStep, StepArrays, pinned
from verify_service.executor.triton_steps import ADJUSTED, HEADER, MASK, SLOT, TREE

T = TypeVar("T")

LEAST_ROWS = 32  # of a step that is worth a graph of its own between one row per sequence and all
PAGE_UPDATES = 8192  # of one upload


@dataclass(frozen=True, slots=True)
class _LateGraphs:
    """The two halves of a step, and what the first gives."""

    forward: torch.cuda.CUDAGraph
    choice: torch.cuda.CUDAGraph
    output: ModelOutput


@dataclass(frozen=True, slots=True)
class LateStep:
    """A step whose forward was started; `DecodeGraphs.choose_late` starts the rest.

    Attributes:
        output: As that of `RunningStep`.
        num_sequences: Without padding.
        turn: Which of the buffers are its own.
        forwarded: When the forward is done.
    """

    kind: StepKind
    output: ModelOutput
    num_sequences: int
    turn: int
    forwarded: torch.cuda.Event


class DecodeGraphs:
    """Captured decode steps of one model over one cache.

    Args:
        step: What is captured.

    Attributes:
        max_batch, max_rows: Sequences, and rows of each with the root, at most.
        capture: Layers that were captured when the graphs were made ready.
        trees: int32 [max_batch, 2, max_rows - 1]: what a draft on the device proposed, for records that say so.
        accepted, accepted_index: Of the newest step, for a draft; see `triton_steps.Ended`.
        late: Tables of steps that adjust logits.
        pool: Memory of the graphs; for others too that never run at the same time.
    """

    def __init__(self, step: DecodeStep) -> None:
        self._step = step
        self.max_batch, self.max_rows = step.max_batch, step.max_rows
        self.batch_sizes = batch_sizes(step.max_batch)
        self._row_sizes = {batch: row_sizes(batch, step.max_rows) for batch in self.batch_sizes}
        self.capture: tuple[int, ...] = ()
        self._device = step.inputs.device
        self.trees, self.late = step.trees, step.late
        self.accepted, self.accepted_index = step.accepted, step.accepted_index
        self._hosts = pinned(UNDER_WAY, *step.inputs.shape)
        self._host_records = [block.numpy() for block in self._hosts]
        self._updates = pinned(UNDER_WAY, 3 * PAGE_UPDATES, dtype=torch.int64)
        self._sent_updates = torch.zeros(
            3 * PAGE_UPDATES, dtype=torch.int64, device=step.inputs.device
        )
        self._host_results = pinned(UNDER_WAY, *step.results.shape)
        self._done = [torch.cuda.Event() for _ in range(UNDER_WAY)]
        self._current = 0  # of all that is there UNDER_WAY times
        self.pool = torch.cuda.graph_pool_handle()
        self._steps: dict[StepKind, tuple[torch.cuda.CUDAGraph, ModelOutput]] = {}
        self._forwards: dict[StepKind, tuple[torch.cuda.CUDAGraph, ModelOutput]] = {}
        self._late: dict[StepKind, _LateGraphs] = {}
        self._forwarded = [torch.cuda.Event() for _ in range(UNDER_WAY)]

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
        host = self._host_records[self._current]
        if num_sequences < batch:
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
        slots, entries, pages = (
            list(itertools.chain.from_iterable(values))
            for values in zip(
                *(([slot] * len(own), range(a, a + len(own)), own) for slot, a, own in updates),
                strict=True,
            )
        )
        for start in range(0, len(slots), PAGE_UPDATES):
            if start:
                torch.cuda.current_stream().synchronize()  # the pinned block is still being read
            end = min(start + PAGE_UPDATES, len(slots))
            # Whole, as the host would wait for a device to take single rows of it.
            block = self._updates[self._current][: 3 * (end - start)]
            block.numpy().reshape(3, -1)[:] = slots[start:end], entries[start:end], pages[start:end]
            sent = self._sent_updates[: len(block)]
            sent.copy_(block, non_blocking=True)
            slot, entry, page = sent.view(3, -1)
            self._step.tables.index_put_((slot, entry), page.to(torch.int32))

    def send_trees(self) -> None:
        """Lets the host see `trees` in their present state; after `arrays`, for that step's `late.trees`."""
        self.late.send_trees(self._current, self.trees)

    def upload(self, num_sequences: int) -> None:
        """Sends the records that were filled in to the device: before a step starts, and before anything that it waits for."""
        batch = self.batch_size(num_sequences)
        self._step.inputs[:batch].copy_(self._hosts[self._current][:batch], non_blocking=True)

    def start(
        self,
        num_sequences: int,
        num_rows: int,
        capture: Sequence[int],
        is_filtered: bool = False,
    ) -> RunningStep:
        """Starts a whole step on the records that were sent. At most one step that was started before may be running.

        Args:
            is_filtered: Whether top-k, top-p and min-p of the records are obeyed.
        """
        kind = StepKind(self.batch_size(num_sequences), num_rows, tuple(capture), is_filtered)
        if kind not in self._steps:
            self._steps[kind] = self._capture_step(kind)
        graph, output = self._steps[kind]
        graph.replay()
        return self._download(kind, num_sequences, output)

    def prepare_late(
        self, num_sequences: int, num_rows: int, capture: Sequence[int], with_logprobs: bool
    ) -> StepKind:
        """Captures what `start_late` needs, unless that was done before.

        To be called before the stream waits for a draft: capturing waits for the stream, so nobody could end that wait.
        """
        batch = self.batch_size(num_sequences)
        kind = StepKind(batch, num_rows, tuple(capture), True, True, with_logprobs)
        if kind not in self._late:
            self.upload(num_sequences)
            self._late[kind] = self._capture_late(kind)
            self.upload(num_sequences)  # capturing has changed the records
        return kind

    def start_late(
        self, num_sequences: int, num_rows: int, capture: Sequence[int], with_logprobs: bool
    ) -> LateStep:
        """Starts the forward of a step whose records may ask for anything; else as `start`."""
        kind = self.prepare_late(num_sequences, num_rows, capture, with_logprobs)
        graphs = self._late[kind]
        graphs.forward.replay()
        forwarded = self._forwarded[self._current]
        forwarded.record()
        return LateStep(kind, graphs.output, num_sequences, self._current, forwarded)

    def choose_late(self, step: LateStep, num_masks: int) -> RunningStep:
        """Starts the rest of the newest step: adjusted logits, the rule, and all that follows.

        Args:
            num_masks: Rows of `late.masks` that were filled in.
        """
        kind, graphs = step.kind, self._late[step.kind]
        self.late.upload_masks(step.turn, num_masks)
        graphs.choice.replay()
        return self._download(kind, step.num_sequences, graphs.output)

    def _download(self, kind: StepKind, num_sequences: int, output: ModelOutput) -> RunningStep:
        results, done = self._host_results[self._current], self._done[self._current]
        results[: kind.batch].copy_(self._step.results[: kind.batch], non_blocking=True)
        logprobs = None
        if kind.with_logprobs:
            logprobs = self.late.send_logprobs(self._current, kind.batch * kind.rows)
        done.record()
        return RunningStep(output, results[:num_sequences], done, kind.rows, logprobs)

    def forward(self, num_sequences: int, num_rows: int, capture: Sequence[int]) -> ModelOutput:
        """Runs the target alone, for batches whose tokens are chosen otherwise.

        Returns:
            Logits and hidden states of all B x R rows, padding included; valid until the next step.
        """
        kind = StepKind(self.batch_size(num_sequences), num_rows, tuple(capture))
        if kind not in self._forwards:
            graph, forward = self._record(lambda: self._step.forward(kind))
            self._forwards[kind] = graph, forward.output
        graph, output = self._forwards[kind]
        graph.replay()
        return output

    def warm_up(self, capture: Sequence[int]) -> None:
        """Captures every shape, with and without filters, largest first, so that the others fit its memory."""
        self.capture = tuple(capture)
        for batch, rows in self.shapes:
            for is_filtered in (True, False):
                self.idle_step(batch, rows, is_filtered)
        # Others are captured when they are needed; their kernels are ready then.
        self.arrays(0, 1)
        self._pad(self._host_records[self._current][:1])
        self.upload(1)
        self.choose_late(self.start_late(1, 1, self.capture, False), 0).chosen()

    def idle_step(self, batch: int, rows: int, is_filtered: bool = False) -> None:
        """Runs a step that belongs to no sequence."""
        self.arrays(0, rows)
        self._pad(self._host_records[self._current][:batch])
        self.upload(batch)
        self.start(batch, rows, self.capture, is_filtered).chosen()

    def _pad(self, records: npt.NDArray[np.int32]) -> None:
        records[:, :HEADER] = 0
        records[:, SLOT] = self._step.num_slots
        records[:, TREE] = -1
        records[:, HEADER + self.max_rows :] = NO_PARENT

    def _capture_step(self, kind: StepKind) -> tuple[torch.cuda.CUDAGraph, ModelOutput]:
        def run() -> ModelOutput:
            forward = self._step.forward(kind)
            self._step.choose(kind, forward)
            return _without_logits(forward.output)

        return self._record(run)

    def _capture_late(self, kind: StepKind) -> _LateGraphs:
        def run() -> None:
            # Sequences are not to be counted twice; there may be masks of none yet.
            self._step.inputs[: kind.batch, MASK : ADJUSTED + 1] = 0
            self._step.choose(kind, self._step.forward(kind))

        self._run_aside(run)
        forward_graph, forward = self._capture(lambda: self._step.forward(kind))
        choice_graph, _ = self._capture(lambda: self._step.choose(kind, forward))
        # The second follows the first at once, so nothing overwrites the logits between them.
        return _LateGraphs(forward_graph, choice_graph, _without_logits(forward.output))

    def _record(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Runs once for real, which compiles what is not compiled yet, then captures."""
        self._run_aside(run)
        return self._capture(run)

    def _run_aside(self, run: Callable[[], object]) -> None:
        state = self._step.state.clone()
        run_aside(run, self._device)
        # A step that goes on from here must not begin where it has ended.
        self._step.state.copy_(state)

    def _capture(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        return capture_graph(run, self.pool)


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


def _without_logits(output: ModelOutput) -> ModelOutput:
    """Lets the memory of the largest tensor serve the other graphs too."""
    return replace(output, logits=output.logits.new_empty(0))
