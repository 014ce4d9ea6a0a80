"""Time to first token of long prompts on one GPU, and of steps behind them, at the shape of
Llama-3.1-8B.

    python -m benchmarks.gpu.long_contexts --lengths 8192 32768 130000 --variants strict off

Random weights, rotary embeddings scaled as Llama 3.1's. Each prompt runs alone, with the default
chunk, and then again with its prefix cached, for `--output` tokens: that is a step's time. Variants
are `strict`, `off` (`--exactness off`) and `flashinfer` (`off`, with prompts by flashinfer); each may
be followed by `-chain` (EAGLE-3, 3 levels, accept length 2.8 simulated).
"""  # noqa: E501

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.needed import need_gpu
from benchmarks.gpu.shapes import flags_of, write_checkpoints
from benchmarks.results_folder import results_folder
from foredraft.types import SamplingParams
from testing.engines import Harness, Job, running_engine

LONGEST = 131072
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "strict": {},
    "off": {"exactness": "off"},
    "flashinfer": {"exactness": "off", "attention_backend": "flashinfer"},
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768, 130000])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--output", type=int, default=97, help="tokens behind each prompt")
    parser.add_argument("--layers", type=int, default=32, help="fewer for debugging")
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    need_gpu()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        target, head = write_checkpoints(Path(folder), args.layers)
        for path in (target, head):
            file = path / "config.json"
            changed = {"max_position_embeddings": LONGEST, "rope_scaling": ROPE}
            file.write_text(json.dumps(json.loads(file.read_text()) | changed))
        for variant in args.variants:
            rows += _measure(variant, target, head, args)
    (args.out / "long_contexts.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _measure(
    variant: str, target: Path, head: Path, args: argparse.Namespace
) -> list[dict[str, Any]]:
    name, _, mode = variant.partition("-")
    longest = max(args.lengths) + args.output
    algorithm, flags = flags_of(mode or "none", head, 1, longest)
    flags |= VARIANTS[name] | {
        "context_length": LONGEST,
        "chunked_prefill_size": None,
        "disable_radix_cache": False,
    }
    rng, rows = random.Random(1), []
    with running_engine(target, algorithm, **flags) as harness:
        _run(harness, [rng.randrange(1000, 128000) for _ in range(9000)], args.output)
        for length in args.lengths:
            prompt = [rng.randrange(1000, 128000) for _ in range(length)]
            first = _run(harness, prompt, 1)
            step = _run(harness, prompt, args.output)
            rows.append(
                {
                    "variant": variant,
                    "length": length,
                    "first_token_ms": first * 1e3,
                    "prompt_tokens_per_second": length / first,
                    "token_ms": step * 1e3 / args.output,
                }
            )
            print(
                f"{variant:16} {length:6} tokens: first token {first * 1e3:8.1f} ms,"
                f" {length / first:6.0f} tokens/s, then {rows[-1]['token_ms']:6.2f} ms a token",
                flush=True,
            )
    return rows


def _run(harness: Harness, prompt: list[int], output_tokens: int) -> float:
    """Returns the seconds of one greedy request."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=output_tokens, ignore_eos=True)
    started = time.perf_counter()
    harness.run([Job(prompt, sampling)], timeout=300)
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
