"""What becomes of a step's outcome: tokens kept, sequences that end or leave, their accounts, and news for submitters."""

import logging
import time
from collections.abc import Iterable

from foredraft.errors import ForedraftError, InvalidRequest
from foredraft.types import FinishReason
from verify_service import metrics
from verify_service.drafts.drafting import Drafting
from verify_service.drafts.several import Drafts
from verify_service.engine.live_requests import LiveRequests
from verify_service.engine.tree_sizes import TreeSizes
from verify_service.executor.sampler import Outcome, VerifyRows
from verify_service.executor.target_step import TargetStep
from verify_service.outputs import StepOutput, VerifiedTree
from verify_service.scheduler.request import Sequence, Status
from verify_service.scheduler.scheduler import Scheduler
from verify_service.scheduler.step_plan import StepPlan

logger = logging.getLogger(__name__)


class Outcomes:
    """Takes them, in the engine's thread, and tells everybody whom they concern.

    Args:
        live: Requests, and the news for their submitters.
    """

    def __init__(
        self,
        target: TargetStep,
        scheduler: Scheduler,
        drafting: Drafting | Drafts | None,
        sizes: TreeSizes,
        speculation: metrics.AnyMetrics,
        live: LiveRequests,
    ) -> None:
        self._target = target
        self._scheduler = scheduler
        self._drafting = drafting
        self._sizes = sizes
        self._speculation = speculation
        self._live = live

    def settle(self, plan: StepPlan) -> None:
        """Tells draft, submitters and metrics which sequences left or joined."""
        if self._drafting is not None:
            self._drafting.release(plan.released_slots)
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
            if self._drafting is not None:
                self._drafting.preempted(sequence)
        for sequence in plan.ended:
            assert sequence.finish_reason is not None
            self.finish(sequence, sequence.finish_reason)

    def break_off(self, sequences: Iterable[Sequence]) -> None:
        """Ends sequences for which nothing can be chosen, because their logits are NaN or infinite."""
        for sequence in sequences:
            if sequence.status is Status.RUNNING:
                error = ForedraftError(
                    f"the model's logits for token {len(sequence.tokens)} of this text are not finite "
                    "numbers, so no token can be chosen; another --dtype may help"
                )
                logger.error("request %s: %s", sequence.request_id, error)
                metrics.BROKEN_LOGITS.inc()
                self._scheduler.finish(sequence, FinishReason.ERROR)
                self.finish(sequence, FinishReason.ERROR, error)

    def commit_all(self, batch: Iterable[VerifyRows], outcomes: Iterable[Outcome]) -> None:
        """Takes what the rule gave for sequences that decode; those that have ended meanwhile are left out."""
        num_decoded, num_off, running = 0, 0, Status.RUNNING
        is_looked_at = self._sizes.records_all
        for rows, outcome in zip(batch, outcomes, strict=True):
            sequence = rows.sequence
            if sequence.status is not running:
                continue
            if is_looked_at or rows.tree.tokens or sequence.grammar is not None or outcome.is_lossy:
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
        """`commit` of a step without a tree; gives whether it is in the metrics."""
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
        """Takes what the rule gave for one sequence.

        Args:
            num_chunk_tokens: Rows of the prompt chunk that ended with the chosen token, or None after a
                verification.
        """
        sequence, tree, verified = rows.sequence, rows.tree, outcome.verified
        live = self._live[sequence]
        path = verified.path
        accepted = [row - 1 for row in path[1:]] if len(path) > 1 else []
        num_kept, reason = sequence.append_tokens(verified.tokens)
        if sequence.grammar is not None and sequence.grammar.failure is not None:
            error = InvalidRequest("grammar", sequence.grammar.failure)
            self._scheduler.finish(sequence, FinishReason.ERROR)
            self.finish(sequence, FinishReason.ERROR, error)
            return
        tokens = verified.tokens[:num_kept]
        self._scheduler.on_committed(sequence, num_chunk_tokens or num_kept)
        figures = self._speculation.of(self._sizes.draft_of(sequence))
        request = live.request
        if not request.is_probe:
            self._speculation.generated(num_kept)
        num_accepted = min(len(accepted), num_kept)
        if num_chunk_tokens is None:
            sequence.count_step(len(tree.tokens), num_accepted)
            if not request.is_probe:
                figures.verified(len(tree.tokens), len(accepted), outcome.is_lossy)
                figures.turned_off(sequence.speculation.is_off)
            live.count(len(accepted), outcome.is_lossy)
            self._sizes.record(rows, accepted, tokens)
        verified_tree = None
        if request.return_provenance and tree.tokens:
            verified_tree = VerifiedTree(tree.tokens, tree.parents, accepted, figures.algorithm)
        drafted = [True] * num_accepted + [False] * (num_kept - num_accepted)
        logprobs = outcome.logprobs[:num_kept]
        output = StepOutput(request.tag, tokens, drafted, logprobs, verified_tree)
        if reason is None:
            self._live.queue(live, output)
            return
        self._scheduler.finish(sequence)
        self.finish(sequence, reason, output=output)

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: ForedraftError | None = None,
        output: StepOutput | None = None,
    ) -> None:
        """The last output of a sequence that has left the scheduler."""
        self._target.forget(sequence)
        self._sizes.forget(sequence)
        if self._drafting is not None:
            self._drafting.forget(sequence)
        self._live.finish(sequence, reason, error, output)
