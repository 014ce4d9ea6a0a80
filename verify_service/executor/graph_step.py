"""The target's part of a step on a GPU: captured graphs wherever they fit, single operations for the rest."""

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foredraft.models.decoder import ModelOutput
from foredraft.runner.batch import StepRows
from foredraft.runner.model_runner import ModelRunner
from foredraft.trees.draft_tree import EMPTY, NO_PARENT, ROOT, DraftTree
from foredraft.types import SamplingParams
from verify_service.controller.tables import GridTable
from verify_service.executor.decode_graphs import DecodeGraphs
from verify_service.executor.graph_run import GraphRun
from verify_service.executor.mixed_graphs import MixedGraphs
from verify_service.executor.sampler import Chooser, VerifyRows
from verify_service.executor.simulation import SimulatedAcceptance
from verify_service.executor.step_buffers import StepArrays
from verify_service.executor.target_step import (
    AheadRows,
    DeviceOutcome,
    StartedStep,
    StepResult,
    TargetStep,
    broken_of,
)
from verify_service.executor.triton_steps import (
    COMMITTED,
    ENTRY,
    FORCED,
    NEW_PAGE,
    NUM_ROWS,
    SAMPLING,
    SLOT,
    TREE,
)
from verify_service.executor.two_phase_step import LateRun, SlotTables, fill_adjustments, is_late
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.step_plan import PrefillChunk


@dataclass(frozen=True, slots=True)
class _Members:
    """Sequences of a step, and what of their records stays the same while they go on together.

    Attributes:
        slots: Theirs.
        sampling: int32 [n, words], of their headers.
        is_late: Whether somebody asks for more than the rule.
        is_filtered: Whether top-k, top-p or min-p of somebody are obeyed.
    """

    sequences: list[RequestSequence]
    slots: list[int]
    sampling: np.ndarray
    is_late: bool
    is_filtered: bool

    @classmethod
    def of(cls, sequences: list[RequestSequence], slots: list[int]) -> "_Members":
        samplings = [sequence.sampling for sequence in sequences]
        words = b"".join(
            struct.pack("<fffiQ", s.temperature, s.top_p, s.min_p, s.top_k, s.seed)
            for s in samplings
        )
        return cls(
            sequences,
            slots,
            np.frombuffer(words, np.int32).reshape(len(sequences), -1),
            any(map(is_late, sequences)),
            any(map(_is_filtered, samplings)),
        )


_NOBODY = _Members([], [], np.zeros((0, 0), np.int32), is_late=False, is_filtered=False)


class GraphStep(TargetStep):
    """Runs a step by captured graphs where it can.

    Args:
        runner: Of the target, on a GPU.
        chooser: For steps that `graphs` do not take: prompts, larger batches, lossy acceptance.
        graphs: Of the same model and cache.
        mixed: Of forwards with prompts, likewise; they read the page tables that `graphs` keep.
        simulated: Replaces what is accepted, for benchmarks.
    """

    def __init__(
        self,
        runner: ModelRunner,
        chooser: Chooser,
        graphs: DecodeGraphs,
        mixed: MixedGraphs,
        simulated: SimulatedAcceptance | None = None,
    ) -> None:
        super().__init__(runner, chooser)
        self._graphs, self._mixed = graphs, mixed
        self._simulated = simulated
        self._vocab_size = runner.model.config.vocab_size
        self._members = _NOBODY  # of the newest step
        self._tables = SlotTables(graphs.late, chooser.eos_token_ids, self._vocab_size)

    def measure(self) -> GridTable:
        """Times the captured steps; what they read and write belongs to no sequence."""
        graphs = self._graphs
        torch.cuda.synchronize()

        def run(batch: int, rows: int) -> float:
            started = time.perf_counter()
            graphs.idle_step(batch, rows)
            return time.perf_counter() - started

        return GridTable.measure(graphs.shapes, run)

    def can_start(self, batch: Sequence[VerifyRows]) -> bool:
        """See TargetStep."""
        return len(batch) <= self._graphs.max_batch and not self._chooser.is_lossy

    def start(self, batch: Sequence[VerifyRows], capture: Sequence[int]) -> StartedStep:
        """See TargetStep."""
        num_rows = self._num_rows(batch)
        sequences = [rows.sequence for rows in batch]
        self._tables.update(sequences)
        self._fill_values(batch, num_rows)
        trees = [rows.tree for rows in batch]
        return self._start(sequences, num_rows, capture, trees, [None] * len(batch))

    def start_ahead(
        self,
        batch: Sequence[AheadRows],
        capture: Sequence[int],
        num_rows: int,
        fetch: Callable[[torch.Tensor], None] | None,
    ) -> StartedStep:
        """See TargetStep."""
        num_rows = self._graphs.row_size(len(batch), num_rows)
        sequences = [rows.sequence for rows in batch]
        arrays = self._fill(sequences, num_rows)
        header = arrays.header
        header[:, COMMITTED] = -1
        if fetch is None:
            header[:, TREE], header[:, NUM_ROWS] = -1, 1
        else:
            header[:, TREE] = [-1 if rows.tree is None else rows.tree for rows in batch]
            header[:, NUM_ROWS] = [1 if rows.tree is None else num_rows for rows in batch]
        self._force(header)
        arrays.parents[:] = NO_PARENT
        if self._members.is_late:
            capture = capture or self._graphs.capture
            self._graphs.prepare_late(len(batch), num_rows, capture, _has_logprobs(sequences))
        self._graphs.upload(len(batch))
        if fetch is not None:
            fetch(self._graphs.trees)
            if any(rows.tree is not None and rows.sequence.grammar is not None for rows in batch):
                self._graphs.send_trees()
        trees = [EMPTY] * len(batch)
        return self._start(sequences, num_rows, capture, trees, [rows.tree for rows in batch])

    def run(
        self,
        batch: Sequence[VerifyRows],
        chunks: Sequence[PrefillChunk],
        capture: Sequence[int],
    ) -> StepResult:
        """See TargetStep."""
        if chunks or len(batch) > self._graphs.max_batch:
            return super().run(batch, chunks, capture)
        if self.can_start(batch):
            step = self.start(batch, capture)
            step.choose()
            return step.finish()[0]
        started = time.perf_counter()
        num_rows = self._num_rows(batch)
        self._fill_values(batch, num_rows)
        output = self._graphs.forward(len(batch), num_rows, capture or self._graphs.capture)
        outcomes = self._chooser.choose(batch, self._logits(output, batch, num_rows))
        self._commit(batch, outcomes)
        seconds = time.perf_counter() - started
        first_rows = range(0, len(batch) * num_rows, num_rows)
        count, broken = len(batch) * num_rows, broken_of(outcomes)
        return StepResult(outcomes, output, first_rows, count, seconds, broken)

    def _forward(
        self,
        sequences: Sequence[RequestSequence],
        rows: Sequence[StepRows],
        capture: Sequence[int],
    ) -> ModelOutput:
        if not self._mixed.takes(rows):
            return super()._forward(sequences, rows, capture)
        self._mixed.settle()
        self._update_pages(sequences)
        return self._mixed.forward(rows, capture or self._graphs.capture)

    def _num_rows(self, batch: Sequence[VerifyRows]) -> int:
        return self._graphs.row_size(len(batch), 1 + max(len(rows.tree) for rows in batch))

    def _start(
        self,
        sequences: Sequence[RequestSequence],
        num_rows: int,
        capture: Sequence[int],
        trees: Sequence[DraftTree],
        rows: Sequence[int | None],
    ) -> GraphRun:
        """Starts what was filled in; see `LateRun` for the arguments."""
        graphs, count = self._graphs, len(sequences)
        # Hidden states that are captured anyway cost no second set of graphs.
        capture = capture or graphs.capture
        where = graphs.accepted[:count], graphs.accepted_index
        if not self._members.is_late:
            running = graphs.start(count, num_rows, capture, self._members.is_filtered)
            outcome = DeviceOutcome(count, *where, running.output)
            return GraphRun(running, num_rows, outcome, self._vocab_size)
        step = graphs.start_late(count, num_rows, capture, _has_logprobs(sequences))
        outcome = DeviceOutcome(count, *where, step.output)
        return LateRun(
            graphs, self._tables, step, sequences, trees, rows, outcome, self._vocab_size
        )

    def _fill(self, sequences: list[RequestSequence], num_rows: int) -> StepArrays:
        """Everything of the records but roots and trees."""
        arrays = self._graphs.arrays(len(sequences), num_rows)
        header = arrays.header
        self._fill_pages(header, sequences)
        slots = [sequence.slot or 0 for sequence in sequences]
        if self._members.sequences != sequences or self._members.slots != slots:
            self._members = _Members.of(sequences, slots)
        header[:, SLOT] = slots
        header[:, SAMPLING] = self._members.sampling
        if self._members.is_late:
            fill_adjustments(header, sequences, num_rows)
        return arrays

    def _fill_values(self, batch: Sequence[VerifyRows], num_rows: int) -> None:
        sequences = [rows.sequence for rows in batch]
        arrays = self._fill(sequences, num_rows)
        header = arrays.header
        header[:, COMMITTED] = [sequence.num_computed for sequence in sequences]
        header[:, NUM_ROWS] = [1 + len(rows.tree) for rows in batch]
        self._force(header)
        header[:, TREE] = -1
        arrays.tokens[:, 0] = [sequence.tokens[-1] for sequence in sequences]
        arrays.parents[:, 0] = ROOT
        if num_rows > 1:
            _fill_trees(arrays, batch, num_rows)
        self._graphs.upload(len(batch))

    def _force(self, header: np.ndarray) -> None:
        """Where outcomes are simulated, says them; who verifies nothing gets one token all the same."""
        header[:, FORCED] = 0
        if self._simulated is not None:
            header[:, FORCED] = np.minimum(self._simulated.draw(len(header)), header[:, NUM_ROWS])

    def _fill_pages(self, header: np.ndarray, sequences: Sequence[RequestSequence]) -> None:
        """Puts what is new of page tables into the records where it is an entry of each, as nearly always."""
        header[:, NEW_PAGE] = 0
        others = []
        for record, sequence in enumerate(sequences):
            first, size = sequence.device_pages_from, len(sequence.pages)
            if first + 1 == size:
                header[record, ENTRY], header[record, NEW_PAGE] = first, 1 + sequence.pages[first]
                sequence.device_pages_from = size
            elif first < size:
                others.append(sequence)
        if others:
            self._update_pages(others)

    def _update_pages(self, sequences: Sequence[RequestSequence]) -> None:
        updates = []
        for sequence in sequences:
            first, size = sequence.device_pages_from, len(sequence.pages)
            if first < size:
                assert sequence.slot is not None
                updates.append((sequence.slot, first, sequence.pages[first:]))
                sequence.device_pages_from = size
        self._graphs.set_pages(updates)

    def _logits(
        self, output: ModelOutput, batch: Sequence[VerifyRows], num_rows: int
    ) -> torch.Tensor:
        """Those of rows that exist, for the chooser to change."""
        index = [
            first * num_rows + row
            for first, rows in enumerate(batch)
            for row in range(1 + len(rows.tree))
        ]
        where = torch.tensor(index).to(output.logits.device)
        return output.logits.index_select(0, where)


def _fill_trees(arrays: StepArrays, batch: Sequence[VerifyRows], num_rows: int) -> None:
    size = num_rows - 1
    trees = [rows.tree for rows in batch]
    if all(len(tree) == size for tree in trees):
        arrays.tokens[:, 1:] = [tree.tokens for tree in trees]
        arrays.parents[:, 1:] = [tree.parents for tree in trees]
        arrays.parents[:, 1:] += 1
        return
    arrays.parents[:, 1:] = NO_PARENT
    arrays.tokens[:, 1:] = 0
    for tokens, parents, tree in zip(arrays.tokens, arrays.parents, trees, strict=True):
        tokens[1 : 1 + len(tree)] = tree.tokens
        parents[1 : 1 + len(tree)] = tree.parents
        parents[1 : 1 + len(tree)] += 1


def _is_filtered(sampling: SamplingParams) -> bool:
    has_filter = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return sampling.temperature > 0 and has_filter


def _has_logprobs(sequences: Sequence[RequestSequence]) -> bool:
    return any(sequence.sampling.logprobs is not None for sequence in sequences)
