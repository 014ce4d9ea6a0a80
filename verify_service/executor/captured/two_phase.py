"""Two-phase steps: captured steps whose requests ask for more than the sampling rule.

Such requests have penalties, biases, log-probabilities, grammars or bad words. The device handles
all of them but masks. Masks of grammars and bad words depend on earlier tokens, so the host makes
them once the previous outcome is known, while this step's forward runs. The device chooses the
tokens afterwards.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foredraft.trees.draft_tree import NO_PARENT, DraftTree
from verify_service import metrics
from verify_service.executor.base import DeviceOutcome, StepResult
from verify_service.executor.captured.fill import masked_indexes
from verify_service.executor.captured.pending import GraphRun
from verify_service.executor.captured.running_step import LogProbs
from verify_service.executor.captured.two_phase_graphs import TwoPhaseGraphs, TwoPhaseStep
from verify_service.executor.captured.two_phase_tables import TwoPhaseTables
from verify_service.executor.choice.sampler import Outcome
from verify_service.executor.kernels import adjust
from verify_service.grammar.masks import fill_two_phase_masks, side_by_side
from verify_service.outputs import TokenLogprob
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.token_limits import biases


@dataclass(slots=True)
class _Held:
    """The request whose tokens are counted in a slot's history, and how many of its output are."""

    request_id: int
    num_counted: int


class SlotTables:
    """Keeps histories and biases on the device equal to the sequences' in the slots."""

    def __init__(
        self, tables: TwoPhaseTables, eos_token_ids: frozenset[int], vocab_size: int
    ) -> None:
        self._tables = tables
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._held: dict[int, _Held] = {}

    def update(self, sequences: Sequence[RequestSequence]) -> None:
        """Brings the tables up to the sequences' committed tokens, before a step that starts from
        them.
        """
        for sequence in sequences:
            if adjust.kinds(sequence.sampling):
                self._update(sequence)

    def counted(self, sequence: RequestSequence, num_tokens: int) -> None:
        """Notes tokens that the device has counted itself."""
        held = self._held.get(sequence.slot or 0)
        if held is not None and held.request_id == sequence.request_id:
            held.num_counted += num_tokens

    def _update(self, sequence: RequestSequence) -> None:
        slot, sampling = sequence.slot or 0, sequence.sampling
        held = self._held.get(slot)
        if held is not None and held.request_id == sequence.request_id:
            missing = sequence.tokens[sequence.num_prompt + held.num_counted :]
            if missing:
                self._tables.add_to_history(slot, missing)
                held.num_counted += len(missing)
            return
        known = (sequence.prompt, sequence.output, self._eos_token_ids)
        self._tables.set_history(slot, adjust.history(sampling, *known, self._vocab_size))
        if adjust.kinds(sampling) & adjust.BIASED:
            self._tables.set_biases(slot, biases(sampling, self._vocab_size))
        self._held[slot] = _Held(sequence.request_id, sequence.num_output)


class TwoPhaseRun(GraphRun):
    """Stands for a two-phase step whose forward was started.

    Args:
        trees: Trees that are verified, where the host knows them.
        tree_rows: For each sequence, the row of its tree among a draft's trees on the device; None
            where the host knows the tree, or there is none.
    """

    def __init__(
        self,
        graphs: TwoPhaseGraphs,
        tables: SlotTables,
        step: TwoPhaseStep,
        sequences: Sequence[RequestSequence],
        trees: Sequence[DraftTree],
        tree_rows: Sequence[int | None],
        outcome: DeviceOutcome,
        vocab_size: int,
    ) -> None:
        super().__init__(None, step.kind.rows, outcome, vocab_size)
        self._graphs, self._tables, self._step = graphs, tables, step
        self._sequences, self._trees, self._tree_rows = sequences, trees, tree_rows
        self._masked = masked_indexes(sequences)
        self._waits = any(tree_rows[i] is not None for i in self._masked)
        if not self._masked:
            self._running = graphs.choose(step, 0)

    @property
    def is_ready(self) -> bool:
        """See PendingStep."""
        return not self._waits or self._graphs.tables.are_trees_there(self._step.turn)

    def choose(self) -> None:
        """See PendingStep."""
        if self._running is not None:
            return
        tables, turn, num_rows = self._graphs.tables, self._step.turn, self.num_rows
        masks = tables.masks(turn, len(self._masked) * num_rows)
        proposed = tables.trees(turn) if self._waits else None
        work = []
        for i, masked in enumerate(self._masked):
            tree, row = self._trees[masked], self._tree_rows[masked]
            if row is not None and proposed is not None:
                tree = self._proposed(proposed[row])
            block = masks[i * num_rows : (i + 1) * num_rows]
            work.append(
                functools.partial(fill_two_phase_masks, self._sequences[masked], tree, block)
            )
        side_by_side(work)
        metrics.LATE_MASKS.inc(len(self._masked))
        metrics.AWAITED_MASKS.inc(self._step.forwarded.query())
        self._running = self._graphs.choose(self._step, len(masks))

    def finish(self) -> StepResult:
        """See PendingStep."""
        result = super().finish()
        logprobs = self.running.logprobs
        for i, (sequence, outcome) in enumerate(zip(self._sequences, result.outcomes, strict=True)):
            self._tables.counted(sequence, len(outcome.verified.tokens))
            if sequence.sampling.logprobs is not None and logprobs is not None:
                _report(outcome, logprobs, i * self.num_rows, sequence.sampling.logprobs)
        return result

    def _proposed(self, tree: npt.NDArray[np.int32]) -> DraftTree:
        """Returns a draft's tree as the device reads it.

        A node with an invalid token gets no parent.
        """
        tokens, parents = tree[:, : self.num_rows - 1]
        parents = np.where((tokens >= 0) & (tokens < self._vocab_size), parents, NO_PARENT)
        return DraftTree(tuple(tokens.tolist()), tuple(parents.tolist()))


def _report(outcome: Outcome, logprobs: LogProbs, first_row: int, top_n: int) -> None:
    for row in outcome.verified.path:
        own, *values = logprobs.values[first_row + row].tolist()
        best = logprobs.best[first_row + row].tolist()
        outcome.logprobs.append(TokenLogprob(own, best[:top_n], values[:top_n]))
