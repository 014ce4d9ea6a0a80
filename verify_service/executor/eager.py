"""Runs any step operation by operation; a step is complete when it is submitted."""

import itertools
import time
from collections.abc import Sequence
from typing import Literal

from foredraft.runner.batch import SequenceRows, StepRows
from foredraft.runner.model_runner import ForwardOutput, ModelRunner
from verify_service.executor.base import (
    Executor,
    FinishedStep,
    PendingStep,
    Step,
    StepResult,
    broken_of,
)
from verify_service.executor.choice.sampler import Outcome, Sampler, VerifyRows
from verify_service.executor.choice.scoring import prompt_logprobs
from verify_service.executor.ranks.workers import Ranks
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.step_plan import PrefillChunk


class EagerExecutor(Executor):
    """Runs the target operation by operation, on any device.

    Args:
        runner: Runner of the target.
        sampler: Applies the sampling rule.
        ranks: Ranks that share the target, where there are several; the runner sends them their
            steps.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler, ranks: Ranks | None = None) -> None:
        self._ranks = ranks
        self._runner = runner
        self._sampler = sampler
        self._dynamic_from = runner.model.config.dynamic_from

    def forget(self, sequence: RequestSequence) -> None:
        """See Executor."""
        self._sampler.forget(sequence)

    def close(self) -> None:
        """See Executor."""
        if self._ranks is not None:
            self._ranks.close()

    def submit(self, step: Step) -> PendingStep:
        """See Executor."""
        started = time.perf_counter()
        batch, chunks = step.batch, step.chunks
        num_last = sum(chunk.is_last for chunk in chunks)
        decoding = batch[: len(batch) - num_last]
        sequences = [one.sequence for one in decoding] + [chunk.seq for chunk in chunks]
        rows = [*map(_tree_rows, decoding), *map(self._chunk_rows, chunks)]
        output = self._forward(sequences, rows, step)
        forwarded = time.perf_counter()
        num_logit_rows = len(output.logits)
        first_rows = [0, *itertools.accumulate(len(one.tokens) for one in rows)][:-1]
        scores = [
            prompt_logprobs(chunk, output.hidden, first, self._runner.logits)
            for chunk, first in zip(chunks, first_rows[len(decoding) :], strict=True)
        ]
        outcomes = self._sampler.choose(batch, output.logits)
        self._commit(decoding, outcomes)
        seconds = forwarded - started
        broken, trees = broken_of(outcomes), [one.tree for one in batch]
        return FinishedStep(
            StepResult(outcomes, output, first_rows, num_logit_rows, seconds, broken, trees, scores)
        )

    def _forward(
        self,
        sequences: Sequence[RequestSequence],
        rows: Sequence[StepRows],
        step: Step,
    ) -> ForwardOutput:
        """Computes all rows of a step in one forward."""
        pages = [sequence.pages for sequence in sequences]
        is_scored = any(chunk.seq.score_from is not None for chunk in step.chunks)
        return self._runner.forward(
            list(map(SequenceRows.of, rows, pages)),
            step.capture,
            all_hidden=step.all_hidden or is_scored,
        )

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


def _tree_rows(rows: VerifyRows) -> StepRows:
    sequence, tree = rows.sequence, rows.tree
    tokens = [sequence.tokens[-1], *tree.tokens]
    parents = None if not tree.tokens or tree.is_chain else tree.parents
    return StepRows(sequence.slot or 0, sequence.num_computed, tokens, parents, "all")
