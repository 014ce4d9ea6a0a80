"""Helpers of GPU benchmarks: batches of random prompts, and the times of an engine's waits."""

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any

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
