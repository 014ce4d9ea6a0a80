"""Measures decode steps whose requests ask for more than the sampling rule, at the shape of
Llama-3.1-8B on one GPU.

    python -m benchmarks.gpu.asked --batch 32

Random weights, no speculation. Each line is a batch in which nobody, one or all ask for something;
beside it the same with steps that wait for one another, as with --disable-overlap-schedule. A
grammar's masks are made by the host.
"""

import argparse
import dataclasses
import random
import string
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance

from benchmarks.gpu.needed import need_gpu
from benchmarks.gpu.runs import random_jobs
from benchmarks.gpu.shapes import flags_of, write_checkpoints
from testing.engines import Harness, Job, running_engine
from verify_service.grammar.matcher import CompiledGrammar
from verify_service.metrics import AWAITED_MASKS

VOCAB = 128_256
REGEX = "([a-z]{1,12}[ ,.])+"


class Syllables:
    """A vocabulary as large as the model's: single bytes, then short words of letters."""

    is_tokenizer_wrapper = True
    bos_token_id, eos_token_id, special_token_ids = None, VOCAB - 1, (VOCAB - 1,)

    def __init__(self) -> None:
        rng = random.Random(0)
        words = [
            "".join(rng.choices(string.ascii_letters, k=3 + i % 5)) for i in range(VOCAB - 256)
        ]
        self.tokens = [bytes([i]) for i in range(256)] + [word.encode() for word in words]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--layers", type=int, default=32, help="fewer for debugging")
    args = parser.parse_args()
    need_gpu()
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer(Syllables()), llguidance.LLMatcher.grammar_from_regex(REGEX)
    )
    assert not matcher.is_error(), matcher.get_error()
    grammar = CompiledGrammar(matcher, VOCAB)
    print(f"{'':34} {'batch':>5} {'ms/step':>8} {'waited':>6} {'in turn':>8}")
    with tempfile.TemporaryDirectory() as folder:
        target, head = write_checkpoints(Path(folder), args.layers)
        algorithm, flags = flags_of("none", head, max(args.batch), 256 + args.output)
        with running_engine(target, algorithm, **flags) as harness:
            for batch in args.batch:
                for name, jobs in variants(batch, args.output, grammar):
                    ahead = seconds_per_step(harness, jobs)
                    harness.engine._steps._overlaps = False
                    in_turn, _ = seconds_per_step(harness, jobs)
                    harness.engine._steps._overlaps = True
                    print(
                        f"{name:34} {batch:5} {ahead[0] * 1e3:8.2f} {ahead[1]:6.0f}"
                        f" {in_turn * 1e3:8.2f}",
                        flush=True,
                    )


def variants(
    batch: int, num_tokens: int, grammar: CompiledGrammar
) -> Iterator[tuple[str, list[Job]]]:
    """Yields batches of jobs, named by the parameters that their requests use."""
    plain = random_jobs(random.Random(1), batch, 256, num_tokens)

    def asking(count: int, **fields: Any) -> list[Job]:
        changed = [
            dataclasses.replace(job, sampling=dataclasses.replace(job.sampling, **fields))
            for job in plain[:count]
        ]
        return changed + plain[count:]

    def following(count: int) -> list[Job]:
        made = asking(count, ignore_eos=False)
        return [
            dataclasses.replace(job, grammar=grammar if i < count else None)
            for i, job in enumerate(made)
        ]

    yield "nothing", plain
    yield "temperature 1, all", asking(batch, temperature=1.0)
    yield "top-p 0.9, all", asking(batch, temperature=1.0, top_p=0.9)
    yield "top-k 20, top-p 0.95, all", asking(batch, temperature=0.6, top_k=20, top_p=0.95)
    yield "repetition penalty, one", asking(1, repetition_penalty=1.2)
    yield "repetition penalty, all", asking(batch, repetition_penalty=1.2)
    yield "5 log-probabilities, one", asking(1, logprobs=5)
    yield "grammar, one", following(1)
    yield "grammar, all", following(batch)


def seconds_per_step(harness: Harness, jobs: list[Job]) -> tuple[float, float]:
    """Returns seconds of a step without the time of prompts, and the number of steps in which
    the GPU waited for masks; warm.
    """
    short = [
        dataclasses.replace(job, sampling=dataclasses.replace(job.sampling, max_new_tokens=4))
        for job in jobs
    ]
    harness.run(short, timeout=120)
    started = time.perf_counter()
    harness.run(short, timeout=120)
    prompts = time.perf_counter() - started
    waited = AWAITED_MASKS._value.get()
    started = time.perf_counter()
    results = harness.run(jobs, timeout=120)
    seconds = time.perf_counter() - started - prompts
    longest = max(len(result.tokens) for result in results)
    return seconds / (longest - 4), AWAITED_MASKS._value.get() - waited


if __name__ == "__main__":
    main()
