"""Measures n-grams over a head: accept length on text that is copied, and on text that is not.

    python -m benchmarks.ngram_override --prompts mt_bench.jsonl gsm8k.jsonl

The first turns of the files' lines (JSON, `turns`) are prompts of the bundled model. "copied" are
dialogues in which the assistant says the user's words again, twice, and is to do so a third time:
what answers that quote, edit or extract do. "tables" are rows that differ in one word, which the
model goes on with. "free" are the same turns, answered as the model likes. EAGLE-3 drafts a chain
of 5 alone, and with n-grams over it from several shortest matches on; n-grams draft alone, as many
nodes. A request's own text is matched. Tokens per verify, the target's own included, and tokens per
second, which say little on a busy machine.
"""

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.needed import need_gpu
from benchmarks.real_prompts import first_turns, seeded_jobs
from foredraft.models.registry import BUNDLED_DRAFTS, resolve_model_path
from foredraft.text.tokenizer import Tokenizer
from testing.engines import Harness, accept_length, running_engine

TEMPERATURES = (0.0, 1.0)
_WORDS = ("alpha", "omega", "delta")
CHAIN = {
    "speculative_num_steps": 5,
    "speculative_eagle_topk": 1,
    "speculative_draft_model_path": str(resolve_model_path(BUNDLED_DRAFTS["EAGLE3"])),
}
OVER = {**CHAIN, "speculative_ngram_override": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "EAGLE-3": ("EAGLE3", CHAIN),
    "n-grams of 2 or more over it": (
        "EAGLE3",
        {**OVER, "speculative_ngram_override_min_match": 2},
    ),
    "n-grams of 4 or more over it": ("EAGLE3", OVER),
    "n-grams of 8 or more over it": (
        "EAGLE3",
        {**OVER, "speculative_ngram_override_min_match": 8},
    ),
    "n-grams": ("NGRAM", {}),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--each", type=int, default=8, help="prompts of each file [8]")
    parser.add_argument("--tokens", type=int, default=48, help="written after each [48]")
    parser.add_argument("--batch", type=int, default=4, help="requests at a time [4]")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    need_gpu(args.device)
    target = resolve_model_path("foredraft-demo")
    kinds = prompts_of(target, args.prompts, args.each)
    heads = [f"{kind}, T = {temperature:g}" for kind in kinds for temperature in TEMPERATURES]
    print(f"| drafted by | {' | '.join(heads)} |")
    print("| --- " * (len(heads) + 1) + "|", flush=True)
    for title in args.cases:
        algorithm, flags = CASES[title]
        cells = []
        settings: dict[str, Any] = {
            "device": args.device,
            "page_size": 32,
            "max_total_tokens": 16384,
            "draft_step_timeout": 60.0,
            "draft_wait": 120.0,
            "speculative_num_draft_tokens": 6,
            "speculative_ngram_scope": "request",
            **flags,
        }
        with running_engine(target, algorithm, **settings) as harness:
            for prompts in kinds.values():
                for temperature in TEMPERATURES:
                    if args.device == "cuda":  # compiles the kernels of these sizes
                        measure(harness, prompts[: args.batch], temperature, 8, args.batch)
                    length, speed = measure(harness, prompts, temperature, args.tokens, args.batch)
                    cells.append(f"{length:.2f}, {speed:.0f}/s")
        print(f"| {title} | {' | '.join(cells)} |", flush=True)
    return 0


def prompts_of(target: Path, files: list[Path], each: int) -> dict[str, list[list[int]]]:
    """Token ids by kind of text."""
    tokenizer = Tokenizer.from_dir(target)
    turns = [turn[:240] for file in files for turn in first_turns(file, each)]
    copied = [
        f"User: {turn}\nAssistant: {turn}\n" * 2 + f"User: {turn}\nAssistant:" for turn in turns
    ]
    free = [f"User: {turn}\nAssistant:" for turn in turns]
    rng = random.Random(1)
    tables = [
        "".join(f"| {word} | {rng.uniform(1, 9):.2f} | 3.69 | 4.52 |\n" for word in _WORDS) * 3
        for _ in turns
    ]
    return {
        "copied": [tokenizer.encode(text) for text in copied],
        "tables": [tokenizer.encode(text) for text in tables],
        "free": [tokenizer.encode(text) for text in free],
    }


def measure(
    harness: Harness, prompts: list[list[int]], temperature: float, tokens: int, batch: int
) -> tuple[float, float]:
    """Tokens per verify, and tokens per second."""
    jobs = seeded_jobs(prompts, temperature, tokens)
    began = time.monotonic()
    results = []
    for first in range(0, len(jobs), batch):
        results += harness.run(jobs[first : first + batch], timeout=600)
    return accept_length(results), len(jobs) * tokens / (time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
