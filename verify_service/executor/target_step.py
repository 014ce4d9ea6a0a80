"""Runs the target for one engine step: forward, choice of tokens, and the KV of accepted rows moved to its place.

Which sequences take part and what becomes of their tokens is the engine's.
"""

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from foredraft.runner.batch import SequenceRows, StepRows
from foredraft.runner.model_runner import ForwardOutput, ModelRunner
from foredraft.trees.draft_tree import DraftTree
from foredraft.types import NO_TOKEN
from verify_service.controller.tables import GridTable
from verify_service.executor.sampler import Chooser, Outcome, VerifyRows
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.step_plan import PrefillChunk


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step of the target gave.

    Attributes:
        outcomes: One for each of the rows that choose, in their order.
        output: Hidden states and captured streams; valid until the next step.
        first_rows: Where in `output` each sequence's rows begin, in the order of the step.
        num_logit_rows: Rows whose logits were computed.
        forward_seconds: Until the logits were there.
        broken: Which of the outcomes are none, because logits were NaN or infinite.
    """

    outcomes: list[Outcome]
    output: ForwardOutput
    first_rows: Sequence[int]
    num_logit_rows: int
    forward_seconds: float
    broken: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class DeviceOutcome:
    """Where on the device the outcome of a step will be that has been started.

    Attributes:
        num_sequences: Of the step, padding included.
        accepted: int32 [num_sequences, 1 + P]: how many tokens were emitted, and these.
        index: int64 [num_sequences * P]: the rows of `output` that chose them.
        output: Hidden states of the step.
    """

    num_sequences: int
    accepted: torch.Tensor
    index: torch.Tensor
    output: ForwardOutput


@dataclass(slots=True)
class AheadRows:
    """A sequence in a step that begins where the step before it, not known yet, leaves the sequence.

    Attributes:
        tree: Row of the trees that `fetch` brings; None to verify none.
    """

    sequence: RequestSequence
    tree: int | None


class StartedStep(ABC):
    """A step under way. `choose` is called before anything is started behind it, and before `finish`.

    Attributes:
        num_rows: Rows of each sequence.
        outcome: For a draft on the same device.
    """

    num_rows: int
    outcome: DeviceOutcome

    @property
    def is_ready(self) -> bool:
        """Whether `choose` would not wait."""
        return True

    @abstractmethod
    def choose(self) -> None:
        """Starts the choice of tokens, if that needs to know what the step before gave. Called once that is committed."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether `finish` would not wait."""

    @abstractmethod
    def finish(self) -> tuple[StepResult, list[DraftTree]]:
        """Waits for the outcome; and the trees that were verified.

        A tree in which something made no sense is given as an empty one.
        """


class TargetStep:
    """Runs any step, operation by operation.

    Args:
        runner: Of the target.
        chooser: Applies the sampling rule.
    """

    def __init__(self, runner: ModelRunner, chooser: Chooser) -> None:
        self._runner = runner
        self._chooser = chooser
        self._dynamic_from = runner.model.config.dynamic_from

    def forget(self, sequence: RequestSequence) -> None:
        """Says that a sequence has ended."""
        self._chooser.forget(sequence)

    def measure(self) -> GridTable | None:
        """What steps of each shape take; None where steps have no fixed shapes."""
        return None

    def can_start(self, batch: Sequence[VerifyRows]) -> bool:
        """Whether `start` can run a step, and another one be started before this one is done."""
        return False

    def start(self, batch: Sequence[VerifyRows], capture: Sequence[int]) -> StartedStep:
        """Starts a step that only decodes; see `run`."""
        raise NotImplementedError

    def start_ahead(
        self,
        batch: Sequence[AheadRows],
        capture: Sequence[int],
        num_rows: int,
        fetch: Callable[[torch.Tensor], None] | None,
    ) -> StartedStep:
        """Starts a step behind one that is under way.

        Args:
            num_rows: Of each sequence, the root included; a tree that has more nodes is cut.
            fetch: Brings the trees, into int32 [n, 2, N] on the device; None where none are verified.
        """
        raise NotImplementedError

    def run(
        self,
        batch: Sequence[VerifyRows],
        chunks: Sequence[PrefillChunk],
        capture: Sequence[int],
    ) -> StepResult:
        """Computes one step.

        Args:
            batch: Sequences that verify a tree, then those of `chunks` that are their last.
            chunks: Prompt tokens, computed after the trees.
            capture: Layers whose entering residual stream is wanted.
        """
        started = time.perf_counter()
        num_last = sum(chunk.is_last for chunk in chunks)
        decoding = batch[: len(batch) - num_last]
        sequences = [one.sequence for one in decoding] + [chunk.seq for chunk in chunks]
        rows = [*map(_tree_rows, decoding), *map(self._chunk_rows, chunks)]
        output = self._forward(sequences, rows, capture)
        forwarded = time.perf_counter()
        num_logit_rows = len(output.logits)
        outcomes = self._chooser.choose(batch, output.logits)
        self._commit(decoding, outcomes)
        first_rows = [0, *itertools.accumulate(len(one.tokens) for one in rows)][:-1]
        seconds = forwarded - started
        broken = broken_of(outcomes)
        return StepResult(outcomes, output, first_rows, num_logit_rows, seconds, broken)

    def _forward(
        self,
        sequences: Sequence[RequestSequence],
        rows: Sequence[StepRows],
        capture: Sequence[int],
    ) -> ForwardOutput:
        """Computes all rows of a step, of each sequence some."""
        pages = [sequence.pages for sequence in sequences]
        return self._runner.forward(list(map(SequenceRows.of, rows, pages)), capture)

    def _chunk_rows(self, chunk: PrefillChunk) -> StepRows:
        sequence, start = chunk.seq, chunk.start
        tokens = sequence.tokens[start : start + chunk.num_tokens]
        logits: Literal["last", "none"] = "last" if chunk.is_last else "none"
        longest = self._dynamic_from
        is_dynamic = longest is not None and sequence.num_prompt > longest
        reach = sequence.num_prompt if is_dynamic else 0
        return StepRows(sequence.slot or 0, start, tokens, None, logits, reach)

    def _commit(self, decoding: Sequence[VerifyRows], outcomes: Sequence[Outcome]) -> None:
        """Moves the KV of accepted rows to follow the committed keys."""
        self._runner.commit_paths(
            [
                (one.sequence.pages, one.sequence.num_computed, outcome.verified.path)
                for one, outcome in zip(decoding, outcomes, strict=False)
                if one.tree.tokens
            ]
        )


def broken_of(outcomes: Sequence[Outcome]) -> list[int]:
    """Which of the chooser's outcomes end without a token."""
    return [i for i, one in enumerate(outcomes) if one.verified.tokens[-1] == NO_TOKEN]


def _tree_rows(rows: VerifyRows) -> StepRows:
    sequence, tree = rows.sequence, rows.tree
    tokens = [sequence.tokens[-1], *tree.tokens]
    parents = None if not tree.tokens or tree.is_chain else tree.parents
    return StepRows(sequence.slot or 0, sequence.num_computed, tokens, parents, "all")
