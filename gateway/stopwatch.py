"""Measures one continuation: latencies, tokens, outcome, trace span."""

import time

from foredraft.telemetry import tracing
from foredraft.telemetry.metrics import observe_many
from foredraft.types import FinishReason
from gateway import metrics
from gateway.decoding import Completion
from gateway.errors import OUTCOMES, outcome
from gateway.security.limits import Charge

# A counter that begins at 1 has no rate: the first error of a kind would be in no graph.
for _, _label in OUTCOMES:
    metrics.requests.labels(_label)


class Stopwatch:
    """Measures one continuation from its start to `stop`.

    Args:
        name: Name of the request.
        arrived: time.monotonic() of the request's arrival.
        timeout: Seconds from the arrival to the deadline.
        traceparent: Trace context that the client sent; empty without one.
        charge: Counter of the caller's tokens.
    """

    def __init__(
        self, name: str, arrived: float, timeout: float, traceparent: str, charge: Charge
    ) -> None:
        self._name = name
        self._arrived = arrived
        self._deadline = arrived + timeout
        self._charge = charge
        self._num_tokens = 0  # of the present attempt
        self._last = 0.0  # time of the newest token; 0 before the first
        self._outcome: str | None = None
        self._first: float | None = None
        self._figures: dict[str, tracing.Value] = {}
        self.span = tracing.begin("generate", "server", traceparent)
        metrics.queued_requests.inc()

    def remaining(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - time.monotonic()

    def tokens(self, count: int) -> None:
        """Counts tokens that came together."""
        if not count:
            return
        self._charge.num_tokens += count
        self._num_tokens += count
        now = time.monotonic()
        if not self._last:
            self._first = now - self._arrived
            metrics.first_token_seconds.observe(self._first)
            metrics.queued_requests.dec()
            metrics.running_requests.inc()
            self._last = now
            count -= 1
        if count:
            gap = (now - self._last) / count
            observe_many(metrics.inter_token_seconds, gap, count)
        self._last = now

    def start_again(self) -> None:
        """Takes the tokens so far off the caller's account: their verifier was lost, and nobody has
        got them.
        """
        self._charge.num_tokens -= self._num_tokens
        self._num_tokens = 0

    def finish(self, completion: Completion) -> None:
        """Records the end of the continuation."""
        reason = completion.reason
        self._outcome = "abort" if reason is FinishReason.CANCELLED else reason.value
        metrics.end_to_end_seconds.observe(time.monotonic() - self._arrived)
        metrics.prompt_tokens.inc(completion.account.prompt_tokens)
        metrics.cached_tokens.inc(completion.account.cached_tokens)
        metrics.output_tokens.inc(completion.completion_tokens)
        account = completion.account
        self._figures = {
            "gen_ai.usage.input_tokens": account.prompt_tokens,
            "gen_ai.usage.output_tokens": completion.completion_tokens,
            "gen_ai.response.finish_reasons": self._outcome,
            "foredraft.verify_steps": account.verify_steps,
            "foredraft.drafted_tokens": account.drafted_tokens,
            "foredraft.accepted_tokens": account.accepted_tokens,
        }

    def fail(self, error: BaseException) -> None:
        """Records an error as the outcome, unless the continuation has ended already."""
        self._outcome = self._outcome or outcome(error)

    def stop(self) -> None:
        """Counts the outcome and ends the span."""
        name = self._outcome or "cancelled"
        metrics.requests.labels(name).inc()
        error = "" if self._figures else name
        self._figures["gen_ai.request.id"] = self._name
        if self._first is not None:
            self._figures["gen_ai.server.time_to_first_token"] = self._first
        self.span.end(self._figures, error=error)
        (metrics.running_requests if self._last else metrics.queued_requests).dec()
