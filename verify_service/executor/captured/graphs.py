"""Decode steps as CUDA graphs: trees in, the target's forward, sampling, walk and commit, tokens
out.

Every step has a fixed shape: B sequences of R rows, padded, with one graph for each pair (B, R).
Lengths, pages and trees are read from device memory, so a step needs one upload, one launch and
one download. A step may start before the host knows the outcome of the previous one.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from foredraft.models.decoder import ModelOutput
from foredraft.runner.aside import capture_graph, run_aside
from foredraft.trees.draft_tree import NO_PARENT
from verify_service.executor.captured.buffers import UNDER_WAY, RunningStep, pinned
from verify_service.executor.captured.step import DecodeStep, StepKind
from verify_service.executor.records import STEP, record

T = TypeVar("T")

LEAST_ROWS = 32  # minimum rows of a step for a graph between one row per sequence and all
PAGE_UPDATES = 8192  # maximum number of page table entries in one upload


@dataclass(frozen=True, slots=True)
class _TwoPhaseGraphs:
    """Holds the two graphs of a two-phase step, and the output of the first."""

    forward: torch.cuda.CUDAGraph
    choice: torch.cuda.CUDAGraph
    output: ModelOutput


@dataclass(frozen=True, slots=True)
class TwoPhaseStep:
    """Stands for a two-phase step whose forward was started; `DecodeGraphs.choose_two_phase` starts
    the rest.

    Attributes:
        output: Output of the forward, as in `RunningStep`.
        num_sequences: Number of sequences without padding.
        turn: Index of the step's buffers.
        forwarded: Event at the end of the forward.
    """

    kind: StepKind
    output: ModelOutput
    num_sequences: int
    turn: int
    forwarded: torch.cuda.Event


class DecodeGraphs:
    """Captures and replays decode steps of one model over one cache.

    Args:
        step: The computation that is captured.

    Attributes:
        max_batch, max_rows: Maximum number of sequences, and of rows of each with the root.
        capture: Layers whose input was captured at warm-up.
        trees: int32 [max_batch, 2, max_rows - 1]: proposals of a draft on the device, for records
            that refer to them.
        accepted, accepted_index: Outcome of the newest step for a draft; see `steps.Ended`.
        two_phase: Tables of two-phase steps, which adjust logits.
        pool: Memory of the graphs; shared with other graphs that never run at the same time.
    """

    def __init__(self, step: DecodeStep) -> None:
        self._step = step
        self.max_batch, self.max_rows = step.max_batch, step.max_rows
        self.batch_sizes = batch_sizes(step.max_batch)
        self._row_sizes = {batch: row_sizes(batch, step.max_rows) for batch in self.batch_sizes}
        self.capture: tuple[int, ...] = ()
        self._device = step.inputs.device
        self.trees, self.two_phase = step.trees, step.two_phase
        self.accepted, self.accepted_index = step.accepted, step.accepted_index
        self._hosts = pinned(UNDER_WAY, *step.inputs.shape)
        kind = record(step.max_rows)
        self._host_records = [block.numpy().view(kind)[:, 0] for block in self._hosts]
        self._padding = np.zeros((), kind)
        self._padding["slot"], self._padding["tree"] = step.num_slots, -1
        self._padding["parents"] = NO_PARENT
        self._updates = pinned(UNDER_WAY, 3 * PAGE_UPDATES, dtype=torch.int64)
        self._sent_updates = torch.zeros(
            3 * PAGE_UPDATES, dtype=torch.int64, device=step.inputs.device
        )
        self._host_results = pinned(UNDER_WAY, *step.results.shape)
        self._done = [torch.cuda.Event() for _ in range(UNDER_WAY)]
        self._current = 0  # index of the newest step's buffers, 0 .. UNDER_WAY - 1
        self.pool = torch.cuda.graph_pool_handle()
        self._steps: dict[StepKind, tuple[torch.cuda.CUDAGraph, ModelOutput]] = {}
        self._later: list[tuple[int, int]] = []  # shapes to capture with filters, largest first
        self._forwards: dict[StepKind, tuple[torch.cuda.CUDAGraph, ModelOutput]] = {}
        self._two_phase_graphs: dict[StepKind, _TwoPhaseGraphs] = {}
        self._forwarded = [torch.cuda.Event() for _ in range(UNDER_WAY)]

    def batch_size(self, num_sequences: int) -> int:
        """Returns the padded batch size of a step."""
        return next(size for size in self.batch_sizes if size >= num_sequences)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(batch, rows per sequence) of all steps that have a graph, the largest first."""
        shapes = [(batch, rows) for batch in self.batch_sizes for rows in self._row_sizes[batch]]
        return sorted(shapes, key=lambda shape: (shape[1], shape[0]), reverse=True)

    def row_size(self, num_sequences: int, num_rows: int) -> int:
        """Returns the padded number of rows of each sequence of a step."""
        sizes = self._row_sizes[self.batch_size(num_sequences)]
        return next(size for size in sizes if size >= num_rows)

    def records(self, num_sequences: int) -> npt.NDArray[np.void]:
        """Returns the records to fill in for the next step [num_sequences], with `tokens` and
        `parents`. Padding is filled in already.

        They are views of pinned memory. A tree's rows are the root, then its nodes; see
        `triton_sampling` for their parents.
        """
        self._current = (self._current + 1) % UNDER_WAY
        batch = self.batch_size(num_sequences)
        host = self._host_records[self._current]
        if num_sequences < batch:
            self._pad(host[num_sequences:batch])
        return host[:num_sequences]

    def block(self, num_sequences: int) -> npt.NDArray[np.int32]:
        """Returns all records that `records` gave last, padding included, [batch, words]."""
        return self._hosts[self._current][: self.batch_size(num_sequences)].numpy()

    def settle(self) -> None:
        """Waits until the memory that `records` returns next may be overwritten; for callers that
        wait for no outcome.
        """
        self._done[(self._current + 1) % UNDER_WAY].synchronize()

    def set_pages(self, updates: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Writes parts of page tables, (slot, first entry, pages) each.

        Call it after `records`; it holds for that step and later ones.
        """
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
        """Copies the present `trees` to the host, for that step's `two_phase.trees`.

        Call it after `records`.
        """
        self.two_phase.send_trees(self._current, self.trees)

    def upload(self, num_sequences: int) -> None:
        """Sends the filled-in records to the device.

        Call it before the step starts, and before anything that the step waits for.
        """
        batch = self.batch_size(num_sequences)
        self._step.inputs[:batch].copy_(self._hosts[self._current][:batch], non_blocking=True)

    def start(
        self,
        num_sequences: int,
        num_rows: int,
        capture: Sequence[int],
        is_filtered: bool = False,
    ) -> RunningStep:
        """Starts a whole step on the records that were sent.

        At most one step that was started before may be running.

        Args:
            is_filtered: Whether the step applies top-k, top-p and min-p of the records.
        """
        kind = StepKind(self.batch_size(num_sequences), num_rows, tuple(capture), is_filtered)
        if kind not in self._steps:
            self._steps[kind] = self._capture_step(kind)
        graph, output = self._steps[kind]
        graph.replay()
        return self._download(kind, num_sequences, output)

    def prepare_two_phase(
        self, num_sequences: int, num_rows: int, capture: Sequence[int], with_logprobs: bool
    ) -> StepKind:
        """Captures the graphs of `start_two_phase`, unless they exist.

        Call it before the stream waits for a draft: capturing waits for the stream, so nothing
        could end that wait.
        """
        kind = self.two_phase_kind(num_sequences, num_rows, capture, with_logprobs)
        if not self.has_two_phase(kind):
            self.upload(num_sequences)
            self._two_phase_graphs[kind] = self._capture_two_phase(kind)
            self.upload(num_sequences)  # capturing has changed the records
        return kind

    def two_phase_kind(
        self, num_sequences: int, num_rows: int, capture: Sequence[int], with_logprobs: bool
    ) -> StepKind:
        """Returns the kind of a two-phase step."""
        batch = self.batch_size(num_sequences)
        return StepKind(batch, num_rows, tuple(capture), True, True, with_logprobs)

    def has_two_phase(self, kind: StepKind) -> bool:
        """Returns whether a two-phase step is captured."""
        return kind in self._two_phase_graphs

    def start_two_phase(
        self, num_sequences: int, num_rows: int, capture: Sequence[int], with_logprobs: bool
    ) -> TwoPhaseStep:
        """Starts the forward of a two-phase step; otherwise like `start`."""
        kind = self.prepare_two_phase(num_sequences, num_rows, capture, with_logprobs)
        graphs = self._two_phase_graphs[kind]
        graphs.forward.replay()
        forwarded = self._forwarded[self._current]
        forwarded.record()
        return TwoPhaseStep(kind, graphs.output, num_sequences, self._current, forwarded)

    def choose_two_phase(self, step: TwoPhaseStep, num_masks: int) -> RunningStep:
        """Starts the rest of the newest step: adjusted logits, sampling, walk and commit.

        Args:
            num_masks: Number of rows of `two_phase.masks` that are filled in.
        """
        kind, graphs = step.kind, self._two_phase_graphs[step.kind]
        self.two_phase.upload_masks(step.turn, num_masks)
        graphs.choice.replay()
        return self._download(kind, step.num_sequences, graphs.output)

    def _download(self, kind: StepKind, num_sequences: int, output: ModelOutput) -> RunningStep:
        results, done = self._host_results[self._current], self._done[self._current]
        results[: kind.batch].copy_(self._step.results[: kind.batch], non_blocking=True)
        logprobs = None
        if kind.with_logprobs:
            logprobs = self.two_phase.send_logprobs(self._current, kind.batch * kind.rows)
        done.record()
        return RunningStep(output, results[:num_sequences], done, kind.rows, logprobs)

    def forward(self, num_sequences: int, num_rows: int, capture: Sequence[int]) -> ModelOutput:
        """Runs the target alone, for batches whose tokens the sampler chooses.

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

    def runs(self, capture: Sequence[int]) -> list[Callable[[], object]]:
        """Returns what `warm_up` captures, as functions that `compile_ahead` takes."""
        kinds = [
            StepKind(batch, rows, tuple(capture), is_filtered)
            for batch, rows in self.shapes
            for is_filtered in (True, False)
        ]
        kinds.append(StepKind(1, 1, tuple(capture), True, True))
        return [partial(self._try, kind) for kind in kinds]

    def warm_up(self, capture: Sequence[int]) -> None:
        """Captures every shape, largest first, so that the others fit its memory; with filters only
        that one, see `capture_next`.
        """
        self.capture = tuple(capture)
        largest, *others = self.shapes
        self.idle_step(*largest, is_filtered=True)
        for shape in (largest, *others):
            self.idle_step(*shape)
        self._later = others
        # Others are captured when they are needed; their kernels are ready then.
        self.records(0)
        self._pad(self._host_records[self._current][:1])
        self.upload(1)
        self.choose_two_phase(self.start_two_phase(1, 1, self.capture, False), 0).chosen()

    def capture_next(self) -> bool:
        """Captures the smallest step with filters that is missing; returns whether there was one.

        Call it while no step runs.
        """
        while self._later:
            batch, rows = self._later.pop()
            if StepKind(batch, rows, self.capture, True) not in self._steps:
                self.idle_step(batch, rows, is_filtered=True)
                return True
        return False

    def close(self) -> None:
        """Frees the graphs; what they captured of a library may keep it from ending."""
        self._steps.clear()
        self._forwards.clear()
        self._two_phase_graphs.clear()

    def idle_step(self, batch: int, rows: int, is_filtered: bool = False) -> None:
        """Runs a step that belongs to no sequence."""
        self.records(0)
        self._pad(self._host_records[self._current][:batch])
        self.upload(batch)
        self.start(batch, rows, self.capture, is_filtered).chosen()

    def _pad(self, records: npt.NDArray[np.void]) -> None:
        records[:] = self._padding

    def _capture_step(self, kind: StepKind) -> tuple[torch.cuda.CUDAGraph, ModelOutput]:
        return self._record(lambda: self._compute(kind))

    def _try(self, kind: StepKind) -> None:
        with self._step.without_repeats():
            self._compute(kind)

    def _compute(self, kind: StepKind) -> ModelOutput:
        forward = self._step.forward(kind)
        self._step.choose(kind, forward)
        return _without_logits(forward.output)

    def _capture_two_phase(self, kind: StepKind) -> _TwoPhaseGraphs:
        def run() -> None:
            # This run must not count tokens of sequences, and has no masks.
            self._step.inputs[: kind.batch, [STEP["mask"], STEP["adjusted"]]] = 0
            self._step.choose(kind, self._step.forward(kind))

        self._run_aside(run)
        forward_graph, forward = self._capture(lambda: self._step.forward(kind))
        choice_graph, _ = self._capture(lambda: self._step.choose(kind, forward))
        # The second follows the first at once, so nothing overwrites the logits between them.
        return _TwoPhaseGraphs(forward_graph, choice_graph, _without_logits(forward.output))

    def _record(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Runs once, which compiles missing kernels, and then captures."""
        self._run_aside(run)
        return self._capture(run)

    def _run_aside(self, run: Callable[[], object]) -> None:
        state = self._step.state.clone()
        with self._step.without_repeats():
            run_aside(run, self._device)
        # A step that goes on from here must not begin where it has ended.
        self._step.state.copy_(state)

    def _capture(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        return capture_graph(run, self.pool)


def batch_sizes(max_batch: int) -> list[int]:
    """Returns the sizes that batches are padded to: powers of two up to 8, then multiples of 8,
    farther apart from 64 on.
    """
    sizes = [1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, max_batch + 1, 32)]
    kept = [size for size in sizes if size < max_batch]
    return [*kept, max_batch]


def row_sizes(batch: int, max_rows: int) -> list[int]:
    """Returns the numbers of rows that sequences are padded to:

    1, powers of two, and `max_rows`.

    A few rows in all cost a GPU the same, so small batches have no small trees.
    """
    powers = (1 << i for i in range(1, max_rows.bit_length()))
    kept = [rows for rows in powers if rows < max_rows and batch * rows >= LEAST_ROWS]
    return sorted({1, *kept, max_rows})


def _without_logits(output: ModelOutput) -> ModelOutput:
    """Drops the logits, so that other graphs can use the memory of the largest tensor."""
    return replace(output, logits=output.logits.new_empty(0))
