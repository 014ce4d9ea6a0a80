"""Applies a step's outcome: commits tokens, ends sequences, counts, and queues outputs."""

import logging
import time
from collections.abc import Iterable
from collections.abc import Sequence as AnySequence

from foredraft.errors import ForedraftError, InvalidRequest
from foredraft.types import FinishReason
from verify_service import metrics
from verify_service.drafts.drafts import Drafts
from verify_service.engine.live_requests import LiveRequests
from verify_service.engine.tree_sizes import TreeSizes
from verify_service.executor.base import Executor, StepResult
from verify_service.executor.choice.sampler import Outcome, VerifyRows
from verify_service.outputs import StepOutput, TokenLogprob, VerifiedTree
from verify_service.scheduler.request import Sequence, Status
from verify_service.scheduler.scheduler import Scheduler
from verify_service.scheduler.step_plan import PrefillChunk, StepPlan

logger = logging.getLogger(__name__)


class Outcomes:
    """Applies outcomes to all parts of the engine. Belongs to the engine's thread.

    Args:
        executor: Runs the target's part of each step.
        scheduler: The scheduler.
        drafts: The drafts.
        sizes: Chooses the sizes of trees.
        speculation: Metrics of speculation.
        live: Requests, and the outputs for their submitters.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        drafts: Drafts,
        sizes: TreeSizes,
        speculation: metrics.AnyMetrics,
        live: LiveRequests,
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._drafts = drafts
        self._sizes = sizes
        self._speculation = speculation
        self._live = live

    def settle(self, plan: StepPlan) -> None:
        """Updates drafts, submitters and metrics for the sequences that left or joined."""
        self._drafts.release(plan.released_slots)
        now = time.monotonic()
        for sequence in plan.admitted:
            live = self._live[sequence]
            if sequence.num_preemptions == 0 and not live.request.is_probe:
                live.queue_seconds = now - live.submitted
                metrics.QUEUE_SECONDS.observe(live.queue_seconds)
                metrics.PROMPT_TOKENS.inc(sequence.num_prompt)
                metrics.CACHED_TOKENS.inc(sequence.num_cached)
        metrics.PREEMPTIONS.inc(len(plan.preempted))
        for sequence in plan.preempted:
            self._drafts.preempted(sequence)
        for sequence in plan.ended:
            assert sequence.finish_reason is not None
            self.finish(sequence, sequence.finish_reason)

    def break_off(self, sequences: Iterable[Sequence]) -> None:
        """Ends sequences with NaN or infinite logits, for which no token can be chosen."""
        for sequence in sequences:
            if sequence.status is Status.RUNNING:
                error = ForedraftError(
                    f"the model's logits for token {len(sequence.tokens)} of this text are not"
                    " finite numbers, so no token can be chosen; another --dtype may help"
                )
                logger.error("request %s: %s", sequence.request_id, error)
                metrics.BROKEN_LOGITS.inc()
                self._scheduler.finish(sequence, FinishReason.ERROR)
                self.finish(sequence, FinishReason.ERROR, error)

    def queue_prompt_logprobs(
        self, chunks: AnySequence[PrefillChunk], found: AnySequence[list[TokenLogprob]]
    ) -> None:
        """Queues the log-probabilities of prompt tokens that a step computed."""
        for chunk, logprobs in zip(chunks, found, strict=True):
            if logprobs:
                live = self._live[chunk.seq]
                self._live.queue(live, StepOutput(live.request.tag, prompt_logprobs=logprobs))
                chunk.seq.scored(chunk.start + chunk.num_tokens)

    def commit_step(
        self, plan: StepPlan, batch: AnySequence[VerifyRows], result: StepResult
    ) -> None:
        """Commits a step that was not overlapped.

        Args:
            plan: The step's plan.
            batch: Sequences that tokens were chosen for: decoding ones, then ends of prompts.
            result: Result of the step.
        """
        self.queue_prompt_logprobs(plan.prefill, result.prompt_logprobs)
        for chunk in plan.prefill:
            if not chunk.is_last:
                self._scheduler.on_committed(chunk.seq, chunk.num_tokens)
        self.break_off(batch[i].sequence for i in result.broken)
        num_decoding = len(plan.decode)
        self.commit_all(batch[:num_decoding], result.outcomes[:num_decoding])
        last_chunks = [chunk for chunk in plan.prefill if chunk.is_last]
        for chunk, rows, outcome in zip(
            last_chunks, batch[num_decoding:], result.outcomes[num_decoding:], strict=True
        ):
            if chunk.seq.status is Status.RUNNING:
                self.commit(rows, outcome, chunk.num_tokens)

    def commit_all(self, batch: Iterable[VerifyRows], outcomes: Iterable[Outcome]) -> None:
        """Commits the outcomes of sequences that decode; skips those that have ended since."""
        num_decoded, num_off, running = 0, 0, Status.RUNNING
        is_looked_at = self._sizes.records_all
        for rows, outcome in zip(batch, outcomes, strict=True):
            sequence = rows.sequence
            if sequence.status is not running:
                continue
            if is_looked_at or rows.tree.tokens or sequence.grammar is not None:
                self.commit(rows, outcome, None)
            else:
                is_counted = self._commit_token(sequence, outcome)
                num_decoded += is_counted
                num_off += is_counted and sequence.speculation.is_off
        if num_decoded:
            figures = self._speculation.of("")
            figures.decoded(num_decoded)
            figures.turned_off(num_off)

    def _commit_token(self, sequence: Sequence, outcome: Outcome) -> bool:
        """Commits one token of a step without a tree; returns whether metrics count it."""
        tokens, live = outcome.verified.tokens, self._live.by_number[sequence.request_id]
        reason = sequence.append_token(tokens[0])
        self._scheduler.on_token(sequence)
        sequence.num_steps += 1
        request = live.request
        output = StepOutput(request.tag, tokens, [False], outcome.logprobs)
        if reason is None:
            self._live.queue(live, output)
        else:
            self._scheduler.finish(sequence)
            self.finish(sequence, reason, output=output)
        return not request.is_probe

    def commit(self, rows: VerifyRows, outcome: Outcome, num_chunk_tokens: int | None) -> None:
        """Commits the outcome of one sequence.

        Args:
            rows: The sequence and its verified tree.
            outcome: Tokens chosen by the sampling rule.
            num_chunk_tokens: Number of rows of the prompt chunk that ended with the chosen token;
                None after a verification.
        """
        sequence, tree, verified = rows.sequence, rows.tree, outcome.verified
        live = self._live[sequence]
        path = verified.path
        accepted = [row - 1 for row in path[1:]] if len(path) > 1 else []
        num_kept, reason = sequence.append_tokens(verified.tokens)
        error = _grammar_failure(sequence)
        if error is not None:
            reason = sequence.finish_reason = FinishReason.ERROR
            if not num_kept:
                self._scheduler.finish(sequence)
                self.finish(sequence, reason, error)
                return
        tokens = verified.tokens[:num_kept]
        self._scheduler.on_committed(sequence, num_chunk_tokens or num_kept)
        figures = self._speculation.of(self._drafts.name_of(sequence))
        request = live.request
        if not request.is_probe:
            self._speculation.generated(num_kept)
        num_accepted = min(len(accepted), num_kept)
        is_lossy = outcome.first_lossy is not None and outcome.first_lossy < num_kept
        if num_chunk_tokens is None:
            sequence.count_step(len(tree.tokens), num_accepted)
            if not request.is_probe:
                figures.verified(len(tree.tokens), num_accepted, is_lossy)
                figures.turned_off(sequence.speculation.is_off)
            live.count(num_accepted, is_lossy)
            self._sizes.record(rows, accepted, tokens)
        verified_tree = None
        if request.return_provenance and tree.tokens:
            kept = accepted[:num_accepted]
            verified_tree = VerifiedTree(tree.tokens, tree.parents, kept, figures.algorithm)
        drafted = [True] * num_accepted + [False] * (num_kept - num_accepted)
        logprobs = outcome.logprobs[:num_kept]
        output = StepOutput(request.tag, tokens, drafted, logprobs, verified_tree)
        if reason is None:
            self._live.queue(live, output)
            return
        self._scheduler.finish(sequence)
        self.finish(sequence, reason, error, output)

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: ForedraftError | None = None,
        output: StepOutput | None = None,
    ) -> None:
        """Queues the last output of a sequence that has left the scheduler, and drops its state."""
        self._executor.forget(sequence)
        self._sizes.forget(sequence)
        self._drafts.forget(sequence)
        self._live.finish(sequence, reason, error, output)


def _grammar_failure(sequence: Sequence) -> InvalidRequest | None:
    """Returns why a sequence cannot follow its grammar any further; None while it can."""
    if sequence.grammar is None or sequence.grammar.failure is None:
        return None
    why = sequence.grammar.failure
    if sequence.limits is not None:
        why += "; bad_words and allowed_token_ids may leave nothing that it allows"
    return InvalidRequest("grammar", why)
