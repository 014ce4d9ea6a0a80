"""Records of single requests: arrival times of tokens, the end, and figures of speculation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from foredraft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Speculation:
    """A server's figures of speculation for one request or for a run.

    Attributes:
        verify_steps: Number of passes of the target that gave tokens.
        emitted_tokens: Number of tokens from these passes.
        drafted_tokens: Number of proposed tokens; None where the server does not report it.
        accepted_tokens: Number of accepted ones; None where the server does not report it.
    """

    verify_steps: int
    emitted_tokens: int
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None


@dataclass(slots=True)
class Record:
    """Records one request. Times are seconds on the clock of its stage.

    Attributes:
        due: Time at which it was due. Latency counts from here, so a late client does not flatter
            the server.
        sent: Time at which it was sent.
        arrivals: (time, tokens) of each read that brought output.
        exact: Whether the server reported the number of tokens of each read; otherwise tokens are
            apportioned by length.
        is_counted: Whether the server reported the number of tokens; otherwise each event with text
            counts as one.
        error: Kind of failure; empty when the answer is complete.
    """

    index: int
    due: float
    sent: float
    end: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    exact: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str = ""
    error: str = ""
    detail: str = ""
    text: str = ""
    speculation: Speculation | None = None
    is_counted: bool = False

    @property
    def ok(self) -> bool:
        """Whether the answer is complete."""
        return not self.error

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None without one."""
        return self.arrivals[0][0] - self.due if self.arrivals else None

    @property
    def latency(self) -> float:
        """Seconds to the end of the answer."""
        return self.end - self.due

    @property
    def gaps(self) -> list[tuple[float, int]]:
        """(seconds, count) of inter-token times. n tokens that came together after a gap are n
        times gap / n.
        """
        return [
            ((now - before) / tokens, tokens)
            for (before, _), (now, tokens) in zip(self.arrivals, self.arrivals[1:], strict=False)
            if tokens
        ]

    @property
    def mean_gap(self) -> float | None:
        """Mean inter-token time in seconds; None for a single arrival."""
        num_tokens = sum(tokens for _, tokens in self.arrivals[1:])
        if not num_tokens:
            return None
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / num_tokens

    def meets(self, objective: "Objective") -> bool:
        """Returns whether the answer is complete and within the objective.

        A single token has no time per token to miss.
        """
        return self.ok and all(
            value is None or value <= limit
            for value, limit in (
                (self.ttft, objective.ttft),
                (self.mean_gap, objective.tpot),
                (self.latency, objective.e2el),
            )
        )


@dataclass(frozen=True, slots=True)
class Objective:
    """Limits in seconds for a request to count as good: first token, mean time per token after it,
    whole answer.
    """

    ttft: float = math.inf
    tpot: float = math.inf
    e2el: float = math.inf

    @classmethod
    def parse(cls, parts: Sequence[str]) -> "Objective":
        """Reads vLLM's form, `ttft:500 tpot:50 e2el:9000`, in milliseconds.

        Raises:
            ConfigError: A part has another form.
        """
        limits = {}
        for part in parts:
            name, _, text = part.partition(":")
            try:
                limits[name] = float(text) / 1e3
            except ValueError:
                limits[name] = math.nan
            if name not in ("ttft", "tpot", "e2el") or not limits[name] > 0:
                raise ConfigError(f"--goodput {part}: not ttft:MS, tpot:MS or e2el:MS")
        return cls(**limits)


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Splits `total` in proportion to weights, by largest remainders; every part gets 1 first if
    there are enough.
    """
    if not weights:
        return []
    floor = 1 if total >= len(weights) else 0
    rest, whole = total - floor * len(weights), sum(weights)
    shares = [rest * (w / whole if whole else 1 / len(weights)) for w in weights]
    parts = [floor + int(share) for share in shares]
    by_remainder = sorted(range(len(weights)), key=lambda i: int(shares[i]) - shares[i])
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts
