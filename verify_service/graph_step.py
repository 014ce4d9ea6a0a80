"""The target's part of a step on a GPU: captured graphs for batches that only decode, single operations for the rest."""

import struct
import time
from collections.abc import Sequence

import numpy as np
import torch

from foredraft.models.decoder import ModelOutput
from foredraft.runner.decode_graphs import (
    COMMITTED,
    NUM_ROWS,
    SEED_HIGH,
    SLOT,
    TEMPERATURE,
    DecodeGraphs,
    StepArrays,
)
from foredraft.runner.model_runner import ModelRunner
from foredraft.speculation import penalties
from foredraft.speculation.triton_sampling import PAD, ROOT
from foredraft.speculation.verification import Verified
from foredraft.types import SamplingParams
from verify_service.chooser import Chooser, Outcome, VerifyRows
from verify_service.simulation import SimulatedAcceptance
from verify_service.step_plan import PrefillChunk
from verify_service.target_step import StepResult, TargetStep


class GraphStep(TargetStep):
    """Runs a step by captured graphs where it can.

    Args:
        runner: Of the target, on a GPU.
        chooser: For rows that the graphs cannot choose for: filters, penalties, log-probabilities, grammars.
        graphs: Of the same model and cache.
        simulated: Replaces what is accepted, for benchmarks.
    """

    def __init__(
        self,
        runner: ModelRunner,
        chooser: Chooser,
        graphs: DecodeGraphs,
        simulated: SimulatedAcceptance | None = None,
    ) -> None:
        super().__init__(runner, chooser)
        self._graphs = graphs
        self._simulated = simulated

    def run(
        self,
        batch: Sequence[VerifyRows],
        chunks: Sequence[PrefillChunk],
        capture: Sequence[int],
    ) -> StepResult:
        """See TargetStep."""
        if chunks or len(batch) > self._graphs.max_batch:
            return super().run(batch, chunks, capture)
        capture = capture or self._graphs.capture  # what is there already
        started = time.perf_counter()
        num_rows = self._graphs.max_rows if any(rows.tree.tokens for rows in batch) else 1
        self._update_pages(batch)
        self._fill(self._graphs.arrays(len(batch), num_rows), batch, num_rows)
        if all(self._is_plain(rows) for rows in batch):
            output, chosen = self._graphs.step(len(batch), num_rows, capture)
            outcomes = [
                Outcome(Verified(path[:length], tokens[:length]))
                for length, path, tokens in zip(
                    chosen.lengths.tolist(),
                    chosen.paths.tolist(),
                    chosen.tokens.tolist(),
                    strict=True,
                )
            ]
        else:
            output = self._graphs.forward(len(batch), num_rows, capture)
            outcomes = self._chooser.choose(batch, self._logits(output, batch, num_rows))
            self._commit(batch, outcomes)
        seconds = time.perf_counter() - started
        first_rows = range(0, len(batch) * num_rows, num_rows)
        return StepResult(outcomes, output, first_rows, len(batch) * num_rows, seconds)

    def _is_plain(self, rows: VerifyRows) -> bool:
        """Whether the rule needs nothing but logits, temperature, seed and position."""
        sampling = rows.sequence.sampling
        return (
            sampling.logprobs is None
            and rows.sequence.grammar is None
            and not penalties.needed(sampling)
            and (sampling.temperature == 0 or not _has_filter(sampling))
            and not self._chooser.is_lossy
        )

    def _update_pages(self, batch: Sequence[VerifyRows]) -> None:
        updates = []
        for rows in batch:
            sequence = rows.sequence
            first, size = sequence.device_pages_from, len(sequence.pages)
            if first < size:
                assert sequence.slot is not None
                updates.append((sequence.slot, first, sequence.pages[first:]))
                sequence.device_pages_from = size
        self._graphs.set_pages(updates)

    def _fill(self, arrays: StepArrays, batch: Sequence[VerifyRows], num_rows: int) -> None:
        header = arrays.header
        sequences = [rows.sequence for rows in batch]
        header[:, SLOT] = [sequence.slot or 0 for sequence in sequences]
        header[:, COMMITTED] = [sequence.num_computed for sequence in sequences]
        header[:, NUM_ROWS] = [1 + len(rows.tree) for rows in batch]
        samplings = [sequence.sampling for sequence in sequences]
        words = b"".join(struct.pack("<fQ", s.temperature, s.seed) for s in samplings)
        header[:, TEMPERATURE : SEED_HIGH + 1] = np.frombuffer(words, np.int32).reshape(-1, 3)
        roots = [sequence.tokens[-1] for sequence in sequences]
        arrays.tokens[:, 0] = roots
        arrays.parents[:, 0] = ROOT
        if num_rows > 1:
            _fill_trees(arrays, batch, num_rows)
        if self._simulated is not None and arrays.forced is not None:
            forced = self._simulated.forced([rows.tree for rows in batch])
            arrays.forced[:] = -1
            for row, tokens in zip(arrays.forced, forced, strict=True):
                row[: len(tokens)] = tokens

    def _logits(
        self, output: ModelOutput, batch: Sequence[VerifyRows], num_rows: int
    ) -> torch.Tensor:
        """Those of rows that exist, in float32, for the chooser to change."""
        index = [
            first * num_rows + row
            for first, rows in enumerate(batch)
            for row in range(1 + len(rows.tree))
        ]
        where = torch.tensor(index).to(output.logits.device)
        return output.logits.index_select(0, where).float()


def _fill_trees(arrays: StepArrays, batch: Sequence[VerifyRows], num_rows: int) -> None:
    size = num_rows - 1
    trees = [rows.tree for rows in batch]
    if all(len(tree) == size for tree in trees):
        arrays.tokens[:, 1:] = [tree.tokens for tree in trees]
        arrays.parents[:, 1:] = [tree.parents for tree in trees]
        arrays.parents[:, 1:] += 1
        return
    arrays.parents[:, 1:] = PAD
    arrays.tokens[:, 1:] = 0
    for tokens, parents, tree in zip(arrays.tokens, arrays.parents, trees, strict=True):
        tokens[1 : 1 + len(tree)] = tree.tokens
        parents[1 : 1 + len(tree)] = tree.parents
        parents[1 : 1 + len(tree)] += 1


def _has_filter(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
