"""Measures the cost of metrics: times the metric calls of steps of a given length.

python -m benchmarks.metrics_overhead --batch 8 --step-ms 2
"""

import argparse
import sys
import time
from collections.abc import Callable

from foredraft.telemetry import metrics as telemetry
from verify_service import metrics

REPEATS = 2000


def step(speculation: metrics.SpeculationMetrics, batch: int) -> None:
    """Makes the metric calls of one step of `batch` sequences that drafted four tokens and got
    two accepted.
    """
    for _ in range(batch):
        speculation.verified(4, 2, False)
        speculation.generated(3)
    for histogram in (
        metrics.DRAFT_SECONDS,
        metrics.DRAFT_WAIT_SECONDS,
        metrics.FORWARD_SECONDS,
        metrics.VERIFY_SECONDS,
        metrics.STEP_SECONDS,
    ):
        histogram.observe(0.003)


def publish(speculation: metrics.SpeculationMetrics) -> None:
    """Makes the metric calls that the engine makes every PUBLISH_SECONDS."""
    for gauge in (metrics.RUNNING, metrics.WAITING, metrics.PAGES_CACHED, metrics.PAGES_USED):
        gauge.set(3)
    speculation.flush()
    speculation.available.set(1)


def steps(speculation: metrics.SpeculationMetrics, batch: int, count: int) -> None:
    """Makes the calls of all steps between two publications, and of one publication."""
    for _ in range(count):
        step(speculation, batch)
    publish(speculation)


def best_seconds(call: Callable[[], object], repeats: int) -> float:
    """Returns the shortest of five means, in processor time, which a busy machine changes least."""
    means = []
    for _ in range(5):
        started = time.process_time()
        for _ in range(repeats):
            call()
        means.append((time.process_time() - started) / repeats)
    return min(means)


def main() -> int:
    """Prints microseconds and their share of a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--step-ms", type=float, default=2.0, help="length of a step")
    arguments = parser.parse_args()
    speculation = metrics.SpeculationMetrics("NGRAM")
    count = max(1, round(metrics.PUBLISH_SECONDS / (arguments.step_ms * 1e-3)))
    repeats = max(1, REPEATS // count)
    counted = best_seconds(lambda: steps(speculation, arguments.batch, count), repeats) / count
    page = best_seconds(telemetry.render, 50)
    part = 100 * counted / (arguments.step_ms * 1e-3)
    print(
        f"a step of {arguments.batch}: {counted * 1e6:.1f} us, {part:.2f} % of"
        f" {arguments.step_ms:g} ms"
    )
    print(f"a page for Prometheus: {page * 1e3:.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
