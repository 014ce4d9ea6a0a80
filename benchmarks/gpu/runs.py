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
from verify_service.outputs import Load


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
    """Measures one batch of random prompts behind a short one that compiles its kernels."""
    rng = random.Random(1)

    def jobs(num_tokens: int) -> list[Job]:
        return random_jobs(rng, batch, prompt_tokens, num_tokens)

    harness.run(jobs(48), timeout=600)
    started = time.perf_counter()
    harness.run(jobs(1), timeout=600)
    prefill = time.perf_counter() - started
    arrivals: list[float] = []
    live = harness.engine._live
    emit = live.emit

    def timed(load: Load) -> None:
        arrivals.append(time.perf_counter())
        emit(load)

    live.emit = timed  # type: ignore[method-assign]
    started = time.perf_counter()
    results = harness.run(jobs(output_tokens), timeout=600)
    seconds = time.perf_counter() - started - prefill
    live.emit = emit  # type: ignore[method-assign]
    num_tokens = sum(len(result.tokens) for result in results)
    verifies = [result.finish.verify_steps for result in results if result.finish]
    gaps = np.diff(arrivals[2:]) * 1e3
    return Decoding(
        seconds / max(verifies) * 1e3,
        (num_tokens - batch) / seconds,
        (num_tokens - batch) / sum(verifies),
        float(np.percentile(gaps, 99)),
    )
