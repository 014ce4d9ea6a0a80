"""Runs the target's steps on a GPU: as captured graphs where possible, else op by op."""

import time
from collections.abc import Sequence

import torch

from foredraft.models.decoder import ModelOutput
from foredraft.runner.batch import StepRows
from foredraft.runner.model_runner import ModelRunner
from foredraft.trees.draft_tree import DraftTree
from verify_service.controller.tables import GridTable
from verify_service.executor.base import (
    Ahead,
    DeviceOutcome,
    FinishedStep,
    PendingStep,
    Step,
    StepResult,
    broken_of,
)
from verify_service.executor.captured.fill import RecordFiller
from verify_service.executor.captured.graphs import DecodeGraphs
from verify_service.executor.captured.mixed import MixedGraphs
from verify_service.executor.captured.pending import GraphRun
from verify_service.executor.captured.step import StepKind
from verify_service.executor.captured.two_phase import SlotTables, TwoPhaseRun
from verify_service.executor.choice.sampler import Sampler, VerifyRows
from verify_service.executor.choice.simulation import SimulatedAcceptance
from verify_service.executor.eager import EagerExecutor
from verify_service.executor.ranks.workers import Ranks
from verify_service.executor.timing import best_of_rounds
from verify_service.metrics import SHARED_KEY_STEPS
from verify_service.scheduler.request import Sequence as RequestSequence

MEASURE_SECONDS = 0.5  # budget for measuring captured steps, whose times hardly differ


class GraphExecutor(EagerExecutor):
    """Runs steps of the target as captured graphs where possible.

    Args:
        runner: Runner of the target, on a GPU.
        sampler: Chooses tokens for steps that `graphs` do not take: prompts, larger batches, lossy
            acceptance.
        graphs: Captured decode steps of the same model and cache.
        mixed: Captured forwards with prompts, of the same model and cache; they read the page
            tables of `graphs`.
        simulated: Replaces the outcomes of verification, for benchmarks.
        ranks: Other ranks of the target, see EagerExecutor; the graphs send them their steps.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        graphs: DecodeGraphs,
        mixed: MixedGraphs,
        simulated: SimulatedAcceptance | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(runner, sampler, ranks)
        self._graphs, self._mixed = graphs, mixed
        graphs.shortage.is_tolerated = ranks is None  # from here on: the start's graphs are there
        self._filler = RecordFiller(graphs.buffers, simulated)
        self._vocab_size = runner.model.config.vocab_size
        self._tables = SlotTables(graphs.two_phase.tables, sampler.eos_token_ids, self._vocab_size)

    def close(self) -> None:
        """See Executor."""
        self._graphs.close()
        self._mixed.close()
        super().close()

    def prepare(self) -> bool:
        """See Executor."""
        return self._graphs.capture_next()

    def measure(self) -> GridTable:
        """Measures the captured steps, on rows that belong to no sequence."""
        graphs = self._graphs
        torch.cuda.synchronize()

        def run(shape: tuple[int, int]) -> float:
            started = time.perf_counter()
            graphs.idle_step(StepKind(*shape, graphs.layers))
            return time.perf_counter() - started

        shapes = graphs.shapes.all()
        times = best_of_rounds(shapes, run, MEASURE_SECONDS, has_run=True)
        return GridTable(dict(zip(shapes, times, strict=True)))

    def can_overlap(self, step: Step) -> bool:
        """See Executor."""
        fits = len(step.batch) <= self._graphs.shapes.max_batch
        return fits and not step.chunks and not self._sampler.is_lossy

    def submit(self, step: Step) -> PendingStep:
        """See Executor. A step takes the first of these ways that fits:

        - with `ahead`: a captured step that starts from the device's state;
        - decoding alone, if `can_overlap`: a captured step that starts from committed tokens;
        - prompts, or more sequences than graphs have: `EagerExecutor.submit`, whose forward
          `_forward` replaces by a captured one where there is one;
        - lossy acceptance: a captured forward, after which the sampler chooses.
        """
        if step.ahead is not None:
            return self._submit_ahead(step, step.ahead)
        if self.can_overlap(step):
            return self._submit_known(step)
        if step.chunks or len(step.batch) > self._graphs.shapes.max_batch:
            return super().submit(step)
        return FinishedStep(self._run_and_choose(step))

    def _submit_known(self, step: Step) -> GraphRun:
        batch, num_rows = step.batch, self._num_rows(step.batch)
        sequences = [rows.sequence for rows in batch]
        self._tables.update(sequences)
        self._filler.fill_known(batch, num_rows)
        trees = [rows.tree for rows in batch]
        kind = self._kind(step, num_rows)
        return self._start(kind, sequences, trees, [None] * len(batch))

    def _submit_ahead(self, step: Step, ahead: Ahead) -> GraphRun:
        batch, graphs = step.batch, self._graphs
        num_rows = graphs.shapes.row_size(len(batch), ahead.num_rows)
        sequences = [rows.sequence for rows in batch]
        self._filler.fill_ahead(sequences, num_rows, ahead)
        kind = self._kind(step, num_rows)
        own = graphs.graphs_of(kind)
        own.prepare(kind, len(batch), step.settle)
        graphs.buffers.upload(len(batch))
        if ahead.fetch is not None:
            ahead.fetch(graphs.trees)
            if not own.has_graph(kind):  # many launches and allocations wait for the device
                fetched = torch.cuda.Event()
                fetched.record()
                ahead.await_trees(fetched.query)
            if kind.is_two_phase and any(
                row is not None and sequence.is_masked
                for sequence, row in zip(sequences, ahead.tree_rows, strict=True)
            ):
                graphs.two_phase.send_trees()
        trees = [rows.tree for rows in batch]
        return self._start(kind, sequences, trees, ahead.tree_rows)

    def _run_and_choose(self, step: Step) -> StepResult:
        """Runs the forward as a graph, and lets the sampler choose the tokens."""
        started = time.perf_counter()
        batch, num_rows = step.batch, self._num_rows(step.batch)
        self._filler.fill_known(batch, num_rows)
        output = self._graphs.forward(StepKind(*self._shape(step, num_rows)), len(batch))
        outcomes = self._sampler.choose(batch, self._logits(output, batch, num_rows))
        self._commit(batch, outcomes)
        seconds = time.perf_counter() - started
        first_rows = range(0, len(batch) * num_rows, num_rows)
        count, broken = len(batch) * num_rows, broken_of(outcomes)
        trees = [rows.tree for rows in batch]
        return StepResult(outcomes, output, first_rows, count, seconds, broken, trees)

    def _forward(
        self,
        sequences: Sequence[RequestSequence],
        rows: Sequence[StepRows],
        step: Step,
    ) -> ModelOutput:
        """Replaces the forward of `EagerExecutor.submit`: a captured one for rows that `mixed`
        takes.
        """
        if not self._mixed.takes(rows):
            step.settle()  # the runner waits for the device, and many launches do
            return super()._forward(sequences, rows, step)
        self._mixed.await_upload()
        # A running step may still read the present block of page updates.
        self._graphs.buffers.next_turn()
        self._filler.update_pages(sequences, step.settle)
        return self._mixed.forward(rows, step.capture or self._graphs.layers, step.settle)

    def _kind(self, step: Step, num_rows: int) -> StepKind:
        """Returns the kind of a step whose records are filled in."""
        filler, shape = self._filler, self._shape(step, num_rows)
        if not filler.members.is_two_phase:
            is_filtered = filler.members.is_filtered
            return StepKind(*shape, is_filtered=is_filtered, shares_keys=filler.shares_keys)
        has_logprobs = any(rows.sequence.sampling.logprobs is not None for rows in step.batch)
        return StepKind(*shape, is_filtered=True, is_two_phase=True, with_logprobs=has_logprobs)

    def _shape(self, step: Step, num_rows: int) -> tuple[int, int, tuple[int, ...]]:
        """Returns the first three fields of a step's `StepKind`."""
        batch = self._graphs.shapes.batch_size(len(step.batch))
        # Graphs that capture hidden states serve steps without a draft too.
        return batch, num_rows, tuple(step.capture) or self._graphs.layers

    def _num_rows(self, batch: Sequence[VerifyRows]) -> int:
        return self._graphs.shapes.row_size(len(batch), max(rows.num_rows for rows in batch))

    def _start(
        self,
        kind: StepKind,
        sequences: Sequence[RequestSequence],
        trees: Sequence[DraftTree],
        tree_rows: Sequence[int | None],
    ) -> GraphRun:
        """Starts the step whose records are filled in; see `TwoPhaseRun` for the arguments."""
        graphs, count = self._graphs, len(sequences)
        where = graphs.accepted[:count], graphs.accepted_index
        if not kind.is_two_phase:
            running = graphs.start(kind, count)
            SHARED_KEY_STEPS.inc(kind.shares_keys)
            outcome = DeviceOutcome(count, *where, running.output)
            return GraphRun(running, kind.rows, outcome, self._vocab_size)
        step = graphs.two_phase.start(kind, count)
        outcome = DeviceOutcome(count, *where, step.output)
        return TwoPhaseRun(
            graphs.two_phase,
            self._tables,
            step,
            sequences,
            trees,
            tree_rows,
            outcome,
            self._vocab_size,
        )

    def _logits(
        self, output: ModelOutput, batch: Sequence[VerifyRows], num_rows: int
    ) -> torch.Tensor:
        """Returns the logits of existing rows, in memory that the sampler may change."""
        index = [
            first * num_rows + row
            for first, rows in enumerate(batch)
            for row in range(rows.num_rows)
        ]
        where = torch.tensor(index).to(output.logits.device)
        return output.logits.index_select(0, where)
