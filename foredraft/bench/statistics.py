"""Figures of a stage's records: percentiles, rates, goodput, accept length.

Keys are named as in SGLang's bench_serving where it has them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foredraft.bench.load import StageResult
from foredraft.bench.records import Objective, Record, Speculation

PERCENTILES = (50.0, 90.0, 99.0)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distribution of a quantity in seconds; percentiles by linear interpolation, as numpy's.

    All fields are zero without values.
    """

    count: int
    mean: float
    std: float
    max: float
    percentiles: dict[float, float]

    @classmethod
    def of(cls, values: Sequence[float], counts: Sequence[int] | None = None) -> "Distribution":
        """Computes the distribution of values; each stands for `counts` equal ones."""
        if not len(values):
            return cls(0, 0.0, 0.0, 0.0, dict.fromkeys(PERCENTILES, 0.0))
        array = np.asarray(values, dtype=np.float64)
        if counts is not None:
            array = np.repeat(array, counts)
        points = np.percentile(array, PERCENTILES).tolist()
        return cls(
            len(array),
            float(array.mean()),
            float(array.std()),
            float(array.max()),
            dict(zip(PERCENTILES, points, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a stage. Times in seconds; latencies of complete answers only.

    Attributes:
        seconds: Length of the stage.
        num_sent: Number of requests.
        num_ok: Number of complete answers.
        errors: Number of failures by kind.
        input_tokens: Prompt tokens of complete answers, as the server counted.
        output_tokens: Output tokens of complete answers.
        ttft: Time from a request's due time to its first token.
        tpot: Mean time per token after the first, by request.
        itl: Time between tokens, by token: n tokens that came together after a gap are n times gap
            / n.
        e2el: Time from a request's due time to the end of its answer.
        good_requests: Number of requests within the objective; None without one.
        speculation: Totals of speculation, where the server reports them.
        is_exact: Whether the server reported the number of tokens of each read, for every answer.
        is_counted: Whether the server reported the number of tokens of every answer.
        concurrency: Mean number of requests at the server.
        cpu_share: Share of one core that the client used.
        cpu_per_token: Client's processor seconds for each output token.
        lag: Seconds between a request's planned and actual sending.
    """

    name: str
    seconds: float
    num_sent: int
    num_ok: int
    errors: dict[str, int]
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2el: Distribution
    good_requests: int | None
    speculation: Speculation | None
    is_exact: bool
    is_counted: bool
    concurrency: float
    cpu_share: float
    cpu_per_token: float
    lag: Distribution

    @property
    def request_rate(self) -> float:
        """Complete answers per second."""
        return self.num_ok / self.seconds if self.seconds else 0.0

    @property
    def output_rate(self) -> float:
        """Output tokens of complete answers per second."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def goodput(self) -> float | None:
        """Requests per second within the objective."""
        if self.good_requests is None:
            return None
        return self.good_requests / self.seconds if self.seconds else 0.0

    @property
    def accept_length(self) -> float | None:
        """Tokens per verification, the target's own included."""
        told = self.speculation
        return told.emitted_tokens / told.verify_steps if told and told.verify_steps else None

    @property
    def accept_rate(self) -> float | None:
        """Accepted over drafted tokens."""
        told = self.speculation
        if told is None or not told.drafted_tokens or told.accepted_tokens is None:
            return None
        return told.accepted_tokens / told.drafted_tokens

    def to_json(self) -> dict[str, Any]:
        """Returns a flat object; times in milliseconds, `duration` in seconds. Times that no answer
        has are None, as those between tokens of answers of one token.
        """
        told: dict[str, Any] = {
            "load": self.name,
            "duration": self.seconds,
            "num_requests": self.num_sent,
            "completed": self.num_ok,
            "failures": self.errors,
            "total_input_tokens": self.input_tokens,
            "total_cached_tokens": self.cached_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.request_rate,
            "output_throughput": self.output_rate,
            "request_goodput": self.goodput,
            "concurrency": self.concurrency,
            "accept_length": self.accept_length,
            "accept_rate": self.accept_rate,
            "exact_token_times": self.is_exact,
            "exact_token_counts": self.is_counted,
            "client_cpu_share": self.cpu_share,
            "client_cpu_us_per_token": self.cpu_per_token * 1e6,
        }
        named = (
            ("ttft", self.ttft),
            ("tpot", self.tpot),
            ("itl", self.itl),
            ("e2e_latency", self.e2el),
            ("client_lag", self.lag),
        )
        for name, one in named:
            figures = {"mean": one.mean, "std": one.std, "max": one.max}
            for point, value in one.percentiles.items():
                figures["median" if point == 50 else f"p{point:g}"] = value
            for key, value in figures.items():
                told[f"{key}_{name}_ms"] = value * 1e3 if one.count else None
        return told


def summarize(
    result: StageResult,
    objective: Objective | None = None,
    counters: tuple[Speculation | None, Speculation | None] = (None, None),
) -> Summary:
    """Computes a stage's figures.

    Args:
        objective: Limits of a good request.
        counters: The server's own totals of speculation before and after, for servers whose answers
            have none.
    """
    records = result.records
    ok = [record for record in records if record.ok]
    gaps = [gap for record in ok for gap in record.gaps]
    tokens = sum(record.output_tokens for record in ok)
    busy = sum(record.end - record.sent for record in records)
    return Summary(
        name=result.stage.name,
        seconds=result.seconds,
        num_sent=len(records),
        num_ok=len(ok),
        errors=dict(Counter(record.error for record in records if record.error)),
        input_tokens=sum(record.prompt_tokens for record in ok),
        cached_tokens=sum(record.cached_tokens for record in ok),
        output_tokens=tokens,
        ttft=Distribution.of(_known(record.ttft for record in ok)),
        tpot=Distribution.of(_known(record.mean_gap for record in ok)),
        itl=Distribution.of([gap for gap, _ in gaps], [count for _, count in gaps]),
        e2el=Distribution.of([record.latency for record in ok]),
        good_requests=(
            None if objective is None else sum(record.meets(objective) for record in records)
        ),
        speculation=_speculation(ok) or _difference(*counters),
        is_exact=bool(ok) and all(record.exact for record in ok),
        is_counted=bool(ok) and all(record.is_counted for record in ok),
        concurrency=busy / result.seconds if result.seconds else 0.0,
        cpu_share=result.cpu_seconds / result.seconds if result.seconds else 0.0,
        cpu_per_token=result.cpu_seconds / tokens if tokens else 0.0,
        lag=Distribution.of(result.lags),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _speculation(records: Sequence[Record]) -> Speculation | None:
    """Sums over all records that have figures; drafted and accepted tokens only if all of them
    have these.
    """
    told = [record.speculation for record in records if record.speculation]
    if not told:
        return None
    drafted = [one.drafted_tokens for one in told]
    accepted = [one.accepted_tokens for one in told]
    return Speculation(
        sum(one.verify_steps for one in told),
        sum(one.emitted_tokens for one in told),
        None if None in drafted else sum(filter(None, drafted)),
        None if None in accepted else sum(filter(None, accepted)),
    )


def _difference(before: Speculation | None, after: Speculation | None) -> Speculation | None:
    if before is None or after is None or after.verify_steps <= before.verify_steps:
        return None
    return Speculation(
        after.verify_steps - before.verify_steps,
        after.emitted_tokens - before.emitted_tokens,
        (after.drafted_tokens or 0) - (before.drafted_tokens or 0),
        (after.accepted_tokens or 0) - (before.accepted_tokens or 0),
    )
