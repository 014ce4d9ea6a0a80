"""The bundled family on one GPU with real acceptance: every algorithm's speed over plain decoding, beside what its accept length
and the times of its stages predict.

    python -m benchmarks.gpu.family --mps

bfloat16, one request at a time, 32 prompts (`benchmarks/accept_length_prompts.json`). The prediction is accept length x a plain step /
the step that its stages give: with a draft on the device the longer one of the GPU's part (the target's graph and the draft's
graphs, by the GPU's clock) and the host's, which runs beside it; with n-grams the host's part and the target's graph, one after the
other. Plain decoding is shown beside the bare replay of its graph, so that no ratio is bought with a slow plain path.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.runs import watched_waits
from foredraft.cli import mps
from foredraft.models.registry import resolve_model_path
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams
from tests.support.drafts import DraftProcess
from tests.support.engines import Harness, Job, running_engine

HEADS = {"STANDALONE": "draft", "EAGLE": "eagle", "EAGLE3": "eagle3", "MTP": "mtp"}
TREES = {"chain": (3, 1, 4), "tree": (5, 4, 8)}
TOKENS = 96


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--algorithms", nargs="+", default=["NGRAM", *HEADS])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--mps", action="store_true", help="run under a private MPS daemon")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, mps.running(args.mps) as variables:
        os.environ.update(variables)
        rows = _measure_all(args, Path(folder) / "draft.json")
        for name in variables:
            del os.environ[name]
    (args.out / "gpu_family.json").write_text(json.dumps(rows, indent=1))
    _report(rows)
    return 0


def _measure_all(args: argparse.Namespace, draft_file: Path) -> list[dict[str, Any]]:
    from benchmarks.gpu.stamps import Stamps

    stamps = Stamps()
    stamps.start()
    os.environ["STAMPS_FILE"] = str(draft_file)
    DraftProcess.module = "benchmarks.gpu.stamps"
    path = resolve_model_path("foredraft-demo")
    tokenizer = Tokenizer.from_dir(path)
    texts = json.loads((Path(__file__).parents[1] / "accept_length_prompts.json").read_text())
    prompts = [tokenizer.encode(text)[:200] for text in texts[: args.prompts]]
    rows = []
    for algorithm in ("NONE", *args.algorithms):
        trees = {"12 rows": (1, 1, 12)} if algorithm == "NGRAM" else TREES
        for tree, shape in ({"": (0, 0, 0)} if algorithm == "NONE" else trees).items():
            for order in ("coupled", "topk") if algorithm in HEADS else ("",):
                flags = _flags(algorithm, shape, order)
                with running_engine(path, algorithm, **flags) as harness:
                    harness.engine.draft_everything()
                    for temperature in (0.0, 1.0):
                        if order == "topk" and temperature == 0.0:
                            continue  # the same as coupled
                        row = _measure(harness, prompts, temperature, stamps, draft_file)
                        row |= {"algorithm": algorithm, "tree": tree, "order": order}
                        print(json.dumps(row), flush=True)
                        rows.append(row)
    plain = {row["temperature"]: row for row in rows if row["algorithm"] == "NONE"}
    for row in rows:
        one = plain[row["temperature"]]
        row["ratio"] = row["tokens_per_second"] / one["tokens_per_second"]
        if row["algorithm"] == "NGRAM":
            step = row["target_ms"] + row["host_ms"]
        else:
            step = max(row["target_ms"] + row["draft_ms"], row["host_ms"])
        row["predicted"] = row["accept_length"] * one["step_ms"] / step
    return rows


def _flags(algorithm: str, shape: tuple[int, int, int], order: str) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_total_tokens": 8192,
        "max_running_requests": 1,
        "disable_radix_cache": True,
        "draft_step_timeout": 30.0,
    }
    if algorithm == "NGRAM":
        flags |= {"speculative_ngram_scope": "request"}
    elif algorithm != "NONE":
        steps, topk, tokens = shape
        head = resolve_model_path(f"foredraft-demo-{HEADS[algorithm]}")
        flags |= {
            "speculative_draft_model_path": str(head),
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": tokens,
            "speculative_draft_sampling": order,
        }
    return flags


def _measure(
    harness: Harness, prompts: list[list[int]], temperature: float, stamps: Any, draft_file: Path
) -> dict[str, Any]:
    from benchmarks.gpu.stamps import draft_spans

    def jobs(num_tokens: int) -> list[Job]:
        sampling = SamplingParams(
            temperature=temperature, seed=1, max_new_tokens=num_tokens, ignore_eos=True
        )
        return [Job(prompt, sampling) for prompt in prompts]

    harness.run(jobs(8), timeout=300)
    started = time.perf_counter()
    harness.run(jobs(1), timeout=300)
    prefill = time.perf_counter() - started
    stamps.spans()
    stamps.clear()
    if harness.draft is not None:
        draft_spans(harness, draft_file)
    with watched_waits() as waits:
        started = time.perf_counter()
        results = harness.run(jobs(TOKENS), timeout=300)
        seconds = time.perf_counter() - started - prefill
    host = [begin - end for (_, end), (begin, _) in itertools.pairwise(waits)]
    verifies = sum(result.finish.verify_steps for result in results if result.finish)
    num_tokens = sum(len(result.tokens) for result in results) - len(results)
    target = [end - begin for begin, end in stamps.spans()]
    draft = [end - begin for begin, end in draft_spans(harness, draft_file)]
    return {
        "temperature": temperature,
        "tokens_per_second": num_tokens / seconds,
        "accept_length": num_tokens / verifies,
        "step_ms": seconds / verifies * 1e3,
        "target_ms": float(np.median(target)) / 1e3,
        "draft_ms": sum(draft) / verifies / 1e3,
        "host_ms": float(np.median(host)) * 1e3,
    }


def _report(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'':10} {'tree':8} {'order':8} {'T':>3} {'tokens/s':>9} {'accept':>6} {'step ms':>8} "
        f"{'target':>7} {'draft':>6} {'host':>6} {'ratio':>6} {'predicted':>9}"
    )
    for row in rows:
        print(
            f"{row['algorithm']:10} {row['tree']:8} {row['order']:8} {row['temperature']:3.0f} "
            f"{row['tokens_per_second']:9.0f} {row['accept_length']:6.2f} {row['step_ms']:8.3f} "
            f"{row['target_ms']:7.3f} {row['draft_ms']:6.3f} {row['host_ms']:6.3f} {row['ratio']:6.2f} "
            f"{row['predicted']:9.2f}"
        )


if __name__ == "__main__":
    sys.exit(main())
