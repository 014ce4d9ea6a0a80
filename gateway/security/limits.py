"""Limits of one caller's running requests, request rate and tokens: counters and token buckets.

Knows no keys.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from foredraft.config.api_keys import Limits
from gateway import metrics
from gateway.errors import RateLimited

# What a caller that has too much running is told to wait: nobody knows when it ends.
CONCURRENCY_RETRY_SECONDS = 1.0
SECONDS = 60.0  # the limits are per minute


class Bucket:
    """A token bucket: a full one gives `per_minute` at once, and it refills within a minute.

    Args:
        per_minute: Size and refill rate; 0 lets everything through.
        clock: Returns monotonic seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._updated = clock()

    def take(self, amount: float) -> float:
        """Takes an amount and returns 0; if it is not there, returns the seconds to wait.

        A full bucket lets more than a minute's worth through.
        """
        if not self.per_minute:
            return 0.0
        now = self._clock()
        gained = (now - self._updated) * self.per_minute / SECONDS
        self._level = min(self._level + gained, float(self.per_minute))
        self._updated = now
        missing = min(amount, self.per_minute) - self._level
        # The clock's rounding must not cost a second attempt.
        if missing > 1e-6:
            return missing * SECONDS / self.per_minute
        self._level -= amount
        return 0.0

    def give_back(self, amount: float) -> None:
        """Gives back an unused amount; a negative amount takes more than there is."""
        self._level += amount


class Caller:
    """A key's holder, or everybody where there are no keys.

    Args:
        name: Label in metrics, also sent to drafts to keep callers' texts apart; empty without
            keys.
        limits: Limits of the key.
    """

    def __init__(
        self, name: str, limits: Limits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.limits = limits
        self._clock = clock
        self._num_running = 0
        self._requests = Bucket(limits.requests, clock)
        self._tokens = Bucket(limits.tokens, clock)

    def change(self, limits: Limits) -> None:
        """Changes the limits; running requests go on."""
        if limits.requests != self.limits.requests:
            self._requests = Bucket(limits.requests, self._clock)
        if limits.tokens != self.limits.tokens:
            self._tokens = Bucket(limits.tokens, self._clock)
        self.limits = limits

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts one request as running, until the block ends.

        Raises:
            RateLimited: Too many requests run, or too many came in the last minute.
        """
        if self.limits.concurrent and self._num_running >= self.limits.concurrent:
            self._refuse(
                "concurrent",
                _counted(self.limits.concurrent, "request") + " at a time",
                CONCURRENCY_RETRY_SECONDS,
            )
        if wait := self._requests.take(1):
            self._refuse("requests", _counted(self.limits.requests, "request") + " a minute", wait)
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    @contextmanager
    def charge(self, num_prompt_tokens: int, max_output_tokens: int) -> Iterator["Charge"]:
        """Reserves a request's tokens until the block ends, then gives back what was not generated.

        Raises:
            RateLimited: The tokens are not available now.
        """
        reserved = num_prompt_tokens + max_output_tokens
        if wait := self._tokens.take(reserved):
            self._refuse("tokens", _counted(self.limits.tokens, "token") + " a minute", wait)
        charge = Charge()
        try:
            yield charge
        finally:
            self._tokens.give_back(max_output_tokens - charge.num_tokens)
            if self.name:
                metrics.key_tokens.labels(self.name, "prompt").inc(num_prompt_tokens)
                metrics.key_tokens.labels(self.name, "output").inc(charge.num_tokens)

    def _refuse(self, limit: str, message: str, seconds: float) -> None:
        metrics.refused.labels(limit, self.name).inc()
        whose = f"the key {self.name!r} has" if self.name else "all clients together have"
        raise RateLimited(
            f"{whose} a limit: {message}; try again in {math.ceil(seconds)} s", seconds
        )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclass(slots=True)
class Charge:
    """Counts the output tokens of a request, as they are generated."""

    num_tokens: int = 0


NOBODY = Caller("", Limits())
_current: ContextVar[Caller] = ContextVar("caller", default=NOBODY)


def current_caller() -> Caller:
    """Returns the caller whose request is being handled."""
    return _current.get()


@contextmanager
def acting_for(caller: Caller) -> Iterator[None]:
    """Sets the current caller inside the block."""
    token = _current.set(caller)
    try:
        yield
    finally:
        # An asynchronous generator may be closed from another context than the one that opened it.
        try:
            _current.reset(token)
        except ValueError:
            _current.set(NOBODY)
