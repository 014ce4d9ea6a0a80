"""Where texts with and without speculation part in bfloat16, and how near the two tokens were to each other there.

    python -m benchmarks.gpu.divergence

The bundled model, plain and with its EAGLE-3 head, greedy and sampled at temperature 1 with the same seeds; 256 tokens after each of
32 prompts (`benchmarks/accept_length_prompts.json`). In float32 they are equal (`tests/e2e/test_gpu.py`); in bfloat16 a step of
several rows rounds otherwise than one of a single row. The gap is by how much the rule prefers plain decoding's token to the other
one in float64 (transformers on the CPU); beside it, the distance of neighbouring bfloat16 numbers at the size of that logit.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from benchmarks.real_prompts import real_prompts
from foredraft.models.registry import resolve_model_path
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams
from testing.engines import Job, accept_length, running_engine
from testing.ties import Reference, first_difference

TREES = {"chain": (3, 1, 4), "tree": (5, 4, 12)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    path = resolve_model_path("foredraft-demo")
    tokenizer = Tokenizer.from_dir(path)
    jobs = [
        Job(
            prompt,
            SamplingParams(
                temperature=temperature, seed=i, max_new_tokens=args.tokens, ignore_eos=True
            ),
        )
        for temperature in (0.0, 1.0)
        for i, prompt in enumerate(real_prompts(tokenizer)[: args.prompts])
    ]
    reference = Reference(path)
    plain, _ = _texts(path, jobs, "NONE", args)
    report: dict[str, Any] = {}
    print(f"{args.dtype}, {len(jobs)} texts of {args.tokens} tokens")
    print(
        f"{'':6} {'prompt':>6} {'T':>3} {'at':>4} {'plain':>14} {'speculative':>14} {'gap':>8} {'spacing':>8}"
    )
    for tree in TREES:
        found, length = _texts(path, jobs, "EAGLE3", args, tree)
        rows = []
        for number, (job, ours, theirs) in enumerate(zip(jobs, plain, found, strict=True)):
            at = first_difference(ours, theirs)
            if at is None:
                continue
            before = [*job.prompt, *ours[:at]]
            one, other = reference.preferences(before, job.sampling, [ours[at], theirs[at]])
            logit = max(map(abs, reference.logits(before, [ours[at], theirs[at]])))
            spacing = 2.0 ** (math.floor(math.log2(logit)) - 7)
            row = {
                "prompt": number % args.prompts,
                "temperature": job.sampling.temperature,
                "at": at,
                "gap": one - other,
                "spacing": spacing,
            }
            rows.append(row)
            words = [repr(tokenizer.decode([tokens[at]])) for tokens in (ours, theirs)]
            print(
                f"{tree:6} {row['prompt']:6} {job.sampling.temperature:3.0f} {at:4} {words[0]:>14} "
                f"{words[1]:>14} {one - other:8.4f} {spacing:8.4f}"
            )
        report[tree] = {"rows": rows, "texts": len(jobs), "accept_length": length}
        gaps = [abs(row["gap"]) for row in rows]
        print(
            f"{tree}: {len(rows)} of {len(jobs)} texts part, accept length {length:.2f}, "
            f"first at token {min((row['at'] for row in rows), default='-')}, "
            f"largest gap {max(gaps, default=0.0):.4f}"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu_divergence.json").write_text(json.dumps(report, indent=1))
    return 0


def _texts(
    path: Path, jobs: list[Job], algorithm: str, args: argparse.Namespace, tree: str = ""
) -> tuple[list[list[int]], float]:
    flags: dict[str, Any] = {
        "device": args.device,
        "dtype": args.dtype,
        "max_total_tokens": 16384,
        "max_running_requests": 16,
        "draft_step_timeout": 60.0,
    }
    if tree:
        steps, topk, tokens = TREES[tree]
        flags |= {
            "speculative_draft_model_path": str(resolve_model_path("foredraft-demo-eagle3")),
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": tokens,
        }
    with running_engine(path, algorithm, **flags) as harness:
        results = harness.run(jobs, timeout=600)
    return [result.tokens for result in results], accept_length(results)


if __name__ == "__main__":
    sys.exit(main())
