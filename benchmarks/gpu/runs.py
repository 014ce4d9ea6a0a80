"""Helpers of GPU benchmarks: batches of random prompts, and the times of an engine's waits."""

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from foredraft.types import SamplingParams
from testing.engines import Harness, Job
from verify_service.engine.overlap import OverlapScheduler


def random_jobs(
    rng: random.Random, batch: int, prompt_tokens: int, output_tokens: int
) -> list[Job]:
    """Returns greedy requests of one length."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=output_tokens, ignore_eos=True)
    prompts = [[rng.randrange(128000) for _ in range(prompt_tokens)] for _ in range(batch)]
    return [Job(prompt, sampling) for prompt in prompts]


def run_batch(harness: Harness, batch: int, prompt_tokens: int, output_tokens: int) -> None:
    """Runs one batch of jobs to its end."""
    harness.run(random_jobs(random.Random(1), batch, prompt_tokens, output_tokens), timeout=600)


@contextlib.contextmanager
def watched_waits() -> Iterator[list[tuple[float, float]]]:
    """Records begin and end of the engine's waits for started steps, in seconds of
    `perf_counter`.
    """
    waits: list[tuple[float, float]] = []
    finish = OverlapScheduler.finish

    def timed(self: OverlapScheduler, running: Any) -> Any:
        started = time.perf_counter()
        result = finish(self, running)
        waits.append((started, time.perf_counter()))
        return result

    OverlapScheduler.finish = timed  # type: ignore[method-assign]
    try:
        yield waits
    finally:
        OverlapScheduler.finish = finish  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class Decoding:
    """Speed of a batch without its prompts; an accept length above 1 is simulated."""

    ms_per_step: float
    tokens_per_second: float
    accept_length: float
    p99_ms: float


def time_decoding(harness: Harness, batch: int, prompt_tokens: int, output_tokens: int) -> Decoding:
    """Measures one batch of random prompts behind a short one that compiles its kernels.

    Time and tokens count from when all sequences have their first token, so no prompt is part of
    them.

    Raises:
        ValueError: A sequence ended before the last one had its first token.
    """
    rng = random.Random(1)
    for num_tokens in (48, output_tokens):
        jobs = random_jobs(rng, batch, prompt_tokens, num_tokens)
        results = harness.run(jobs, timeout=600)
    started = max(result.arrivals[0][0] for result in results)
    later = [[one for one in result.arrivals if one[0] > started] for result in results]
    if not all(later):
        raise ValueError(f"{output_tokens} output tokens are too few for these prompts")
    seconds = max(arrivals[-1][0] for arrivals in later) - started
    num_tokens = sum(count for arrivals in later for _, count in arrivals)
    num_steps = [len(arrivals) for arrivals in later]
    longest = max(later, key=len)
    gaps = np.diff([started, *(when for when, _ in longest)]) * 1e3
    return Decoding(
        seconds / max(num_steps) * 1e3,
        num_tokens / seconds,
        num_tokens / sum(num_steps),
        float(np.percentile(gaps, 99)),
    )
