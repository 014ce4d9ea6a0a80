"""Drafting ahead on a second GPU: steps of a target with a standalone draft, with and without
--speculative-draft-ahead, and how often the next chain was ready.

    python -m benchmarks.gpu.draft_ahead --drafts 0.5b 1b 1.7b --batch 1 2 8
    python -m benchmarks.gpu.draft_ahead --shape llama-70b --quantization fp8 --drafts 1b 1.7b

Weights are random, but what follows a token is related (`benchmarks.gpu.successors`): acceptance
and hits are real, at rates that were chosen. The target is on the first visible GPU, the draft on
the second. 256-token prompts, temperature 0, everything drafted.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import successors
from benchmarks.gpu.runs import time_decoding
from benchmarks.gpu.shapes import LLAMA_8B, TARGETS, engine_flags, write_checkpoints
from testing.drafts import DraftProcess
from testing.engines import running_engine
from testing.stack import free_port

AHEAD_STEPS = "foredraft_drafter_ahead_steps_total"
OUTCOMES = ("hit", "miss")
DEVICE_STEPS = 'foredraft_drafter_device_steps_total{algorithm="STANDALONE"}'
DRAFTS: dict[str, dict[str, int]] = {
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": 24,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_hidden_layers": 16,
    },
    "1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 28,
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", default="llama-8b", choices=list(TARGETS))
    parser.add_argument("--quantization", default="unquant", choices=["unquant", "fp8"])
    parser.add_argument("--drafts", nargs="+", default=list(DRAFTS), choices=list(DRAFTS))
    parser.add_argument("--steps", nargs="+", type=int, default=[3], help="tokens of a chain")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 8])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=384)
    parser.add_argument("--layers", type=int, default=0, help="fewer for debugging; 0 for all")
    args = parser.parse_args()
    # This process keeps to the cards that it has counted; drafts see the second alone.
    torch.cuda.init()
    assert torch.cuda.device_count() > 1, "needs two NVIDIA GPUs"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1"
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[1]
    successors.install(is_draft=False)
    DraftProcess.module = "benchmarks.gpu.successors"
    with tempfile.TemporaryDirectory() as folder:
        target, _ = write_checkpoints(Path(folder), args.layers, args.shape)
        _measure(args, target, "none", None, 0, False)
        for name in args.drafts:
            path = Path(folder) / name
            path.mkdir()
            (path / "config.json").write_text(json.dumps({**LLAMA_8B, **DRAFTS[name]}))
            for steps in args.steps:
                for is_ahead in (False, True):
                    _measure(args, target, name, path, steps, is_ahead)
    return 0


def _measure(
    args: argparse.Namespace,
    target: Path,
    name: str,
    draft: Path | None,
    steps: int,
    is_ahead: bool,
) -> None:
    """Runs one engine, and prints a line for each batch."""
    flags: dict[str, Any] = engine_flags(max(args.batch), args.prompt + args.output)
    flags["quantization"] = args.quantization
    port = free_port()
    if draft is not None:
        flags |= {
            "speculative_draft_model_path": str(draft),
            "speculative_draft_load_format": "dummy",
            "speculative_num_steps": steps,
            "speculative_draft_ahead": is_ahead,
            "metrics_port": port,
        }
    with running_engine(target, "STANDALONE" if draft else "NONE", **flags) as harness:
        for batch in args.batch:
            before = _counts(port) if draft else {}
            one = time_decoding(harness, batch, args.prompt, args.output)
            after = _counts(port) if draft else {}
            found = {key: after[key] - before.get(key, 0.0) for key in after}
            assert draft is None or found.get(DEVICE_STEPS), (
                "the draft cannot map the target's memory"
            )
            hits, misses = (
                found.get(f'{AHEAD_STEPS}{{outcome="{name}"}}', 0.0) for name in OUTCOMES
            )
            row = {
                "draft": name,
                "steps": steps,
                "ahead": is_ahead,
                "batch": batch,
                "ms_per_step": round(one.ms_per_step, 3),
                "tokens_per_second": round(one.tokens_per_second, 1),
                "accept_length": round(one.accept_length, 3),
                "hits": round(hits / (hits + misses), 3) if hits + misses else None,
            }
            print(json.dumps(row), flush=True)


def _counts(port: int) -> dict[str, float]:
    """Returns the draft's counters of steps, by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        text = page.read().decode()
    lines = re.findall(r"^(foredraft_drafter_\w+_steps_total\S*) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in lines}


if __name__ == "__main__":
    sys.exit(main())
