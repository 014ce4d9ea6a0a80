"""Captured steps in which some sequences ask for more than the rule: penalties, biases, log-probabilities, grammars.

All but grammars the device does by itself. A grammar's masks depend on the tokens before, so the host makes them when the
outcome of the step before is there, while the forward of this one runs; only then the tokens are chosen.
"""

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foredraft.trees.draft_tree import DraftTree
from foredraft.types import SamplingParams
from verify_service import metrics
from verify_service.executor import triton_adjust
from verify_service.executor.decode_graphs import DecodeGraphs, LateStep
from verify_service.executor.graph_run import GraphRun
from verify_service.executor.sampler import Outcome
from verify_service.executor.step_buffers import LogProbs
from verify_service.executor.target_step import DeviceOutcome, StepResult
from verify_service.executor.triton_steps import ADJUSTMENT, MASK
from verify_service.executor.two_phase_tables import LateChoice
from verify_service.grammar.masks import fill_late, side_by_side
from verify_service.outputs import TokenLogprob
from verify_service.scheduler.request import Sequence as RequestSequence


@dataclass(slots=True)
class _Held:
    """Whose words a slot holds, and how many of its output tokens are counted in."""

    request_id: int
    num_counted: int


class SlotTables:
    """Keeps the device's words and biases those of the sequences in the slots."""

    def __init__(self, late: LateChoice, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        self._late = late
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._held: dict[int, _Held] = {}

    def update(self, sequences: Sequence[RequestSequence]) -> None:
        """Before a step of which everything is known: brings them to where the sequences stand."""
        for sequence in sequences:
            if triton_adjust.kinds(sequence.sampling):
                self._update(sequence)

    def counted(self, sequence: RequestSequence, num_tokens: int) -> None:
        """The device has counted tokens itself."""
        held = self._held.get(sequence.slot or 0)
        if held is not None and held.request_id == sequence.request_id:
            held.num_counted += num_tokens

    def _update(self, sequence: RequestSequence) -> None:
        slot, sampling = sequence.slot or 0, sequence.sampling
        held = self._held.get(slot)
        if held is not None and held.request_id == sequence.request_id:
            missing = sequence.tokens[sequence.num_prompt + held.num_counted :]
            if missing:
                self._late.add_words(slot, missing)
                held.num_counted += len(missing)
            return
        known = (sequence.prompt, sequence.output, self._eos_token_ids)
        self._late.set_words(slot, triton_adjust.words(sampling, *known, self._vocab_size))
        if sampling.logit_bias:
            self._late.set_biases(slot, triton_adjust.biases(sampling, self._vocab_size))
        self._held[slot] = _Held(sequence.request_id, sequence.num_output)


def is_late(sequence: RequestSequence) -> bool:
    """Whether a sequence asks for more than the rule."""
    sampling = sequence.sampling
    return (
        sequence.grammar is not None
        or sampling.logprobs is not None
        or triton_adjust.kinds(sampling) != 0
    )


def fill_adjustments(
    header: npt.NDArray[np.int32], sequences: Sequence[RequestSequence], num_rows: int
) -> None:
    """The columns of the records that late steps read besides."""
    words = b"".join(_packed(sequence.sampling, sequence.num_prompt) for sequence in sequences)
    header[:, ADJUSTMENT] = np.frombuffer(words, np.int32).reshape(len(sequences), -1)
    header[:, MASK] = 0
    for i, row in enumerate(_followers(sequences)):
        header[row, MASK] = 1 + i * num_rows


class LateRun(GraphRun):
    """A forward that was started, and what is to follow.

    Args:
        trees: What is verified, where it is known.
        rows: Where among the draft's trees each tree is, where it is not; None for none.
    """

    def __init__(
        self,
        graphs: DecodeGraphs,
        tables: SlotTables,
        step: LateStep,
        sequences: Sequence[RequestSequence],
        trees: Sequence[DraftTree],
        rows: Sequence[int | None],
        outcome: DeviceOutcome,
        vocab_size: int,
    ) -> None:
        super().__init__(None, step.kind.rows, outcome, vocab_size)
        self._graphs, self._tables, self._step = graphs, tables, step
        self._sequences, self._trees, self._rows = sequences, trees, rows
        self._vocab_size = vocab_size
        self._followers = _followers(sequences)
        self._waits = any(rows[i] is not None for i in self._followers)
        if not self._followers:
            self._running = graphs.choose_late(step, 0)

    @property
    def is_ready(self) -> bool:
        """See StartedStep."""
        return not self._waits or self._graphs.late.are_trees_there(self._step.turn)

    def choose(self) -> None:
        """See StartedStep."""
        if self._running is not None:
            return
        late, turn, num_rows = self._graphs.late, self._step.turn, self.num_rows
        masks = late.masks(turn, len(self._followers) * num_rows)
        proposed = late.trees(turn) if self._waits else None
        work = []
        for i, place in enumerate(self._followers):
            tree, row = self._trees[place], self._rows[place]
            if row is not None and proposed is not None:
                tree = self._proposed(proposed[row])
            block = masks[i * num_rows : (i + 1) * num_rows]
            work.append(functools.partial(fill_late, self._sequences[place], tree, block))
        side_by_side(work)
        metrics.LATE_MASKS.inc(len(self._followers))
        metrics.AWAITED_MASKS.inc(self._step.forwarded.query())
        self._running = self._graphs.choose_late(self._step, len(masks))

    def finish(self) -> tuple[StepResult, list[DraftTree]]:
        """See StartedStep."""
        result, trees = super().finish()
        logprobs = self.running.logprobs
        for i, (sequence, outcome) in enumerate(zip(self._sequences, result.outcomes, strict=True)):
            self._tables.counted(sequence, len(outcome.verified.tokens))
            if sequence.sampling.logprobs is not None and logprobs is not None:
                _report(outcome, logprobs, i * self.num_rows, sequence.sampling.logprobs)
        return result, trees

    def _proposed(self, tree: npt.NDArray[np.int32]) -> DraftTree:
        """A draft's tree row by row as the device sees it: what makes no sense there hangs from nothing here."""
        tokens, parents = tree[:, : self.num_rows - 1]
        parents = np.where((tokens >= 0) & (tokens < self._vocab_size), parents, -2)
        return DraftTree(tuple(tokens.tolist()), tuple(parents.tolist()))


def _followers(sequences: Sequence[RequestSequence]) -> list[int]:
    """Which sequences follow a grammar."""
    return [i for i, sequence in enumerate(sequences) if sequence.grammar is not None]


def _packed(sampling: SamplingParams, num_prompt: int) -> bytes:
    return struct.pack(
        "<iifff",
        triton_adjust.kinds(sampling),
        num_prompt + sampling.min_new_tokens,
        sampling.repetition_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
    )


def _report(outcome: Outcome, logprobs: LogProbs, first_row: int, top_n: int) -> None:
    for row in outcome.verified.path:
        own, *values = logprobs.values[first_row + row].tolist()
        best = logprobs.best[first_row + row].tolist()
        outcome.logprobs.append(TokenLogprob(own, best[:top_n], values[:top_n]))
