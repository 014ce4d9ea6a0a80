"""Drafting ahead: steps of a target without a draft, with a standalone draft, with one that drafts
ahead while that is faster, and with one that always does; how many steps it prepared for, and how
often the next chain was ready.

    python -m benchmarks.gpu.draft_ahead --draft 0.5b
    python -m benchmarks.gpu.draft_ahead --draft 0.5b --draft-device 0 --mps
    python -m benchmarks.gpu.draft_ahead --shape llama-70b --quantization fp8 --tp 2 --batch 1 2

Weights are random, but what follows a token is related (`testing.successors`): acceptance
and hits are real, at rates that were chosen; a draft that drafts ahead has the accept length of one
that does not. Each batch runs until the draft has judged what is faster. 256-token prompts,
temperature 0, everything drafted.
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

from benchmarks.gpu.needed import need_gpu
from benchmarks.gpu.runs import run_batch, time_decoding
from benchmarks.gpu.shapes import LLAMA_8B, TARGETS, engine_flags, write_checkpoints
from draft_service.drafters.ahead_policy import NUM_TURNS, TURN_STEPS
from foredraft.cli import mps
from testing import successors
from testing.drafts import DraftProcess, card_variables
from testing.engines import running_engine
from testing.stack import free_port
from verify_service.executor.ranks.workers import Workers

AHEAD_STEPS = "foredraft_drafter_ahead_steps_total"
OUTCOMES = ("hit", "miss")
ENGINES = ("none", "waits", "ahead", "always")
# Steps in which a draft has judged: half of them may have another batch size, or come first.
JUDGED_STEPS = 4 * NUM_TURNS * TURN_STEPS
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
    parser.add_argument("--tp", type=int, default=1, help="ranks of the target, each on its GPU")
    parser.add_argument("--draft-device", type=int, help="GPU of the draft; the next by default")
    parser.add_argument("--mps", action="store_true", help="run under a private MPS daemon")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--draft", default="1b", choices=list(DRAFTS))
    parser.add_argument("--steps", type=int, default=3, help="tokens of a chain")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 8])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=384)
    parser.add_argument("--layers", type=int, default=0, help="fewer for debugging; 0 for all")
    args = parser.parse_args()
    need_gpu()
    with tempfile.TemporaryDirectory() as folder, mps.running(args.mps) as variables:
        os.environ.update(variables)
        number = args.tp if args.draft_device is None else args.draft_device
        DraftProcess.module = Workers.module = "testing.successors"
        successors.install(is_draft=False)
        target, _ = write_checkpoints(Path(folder), args.layers, args.shape)
        draft = Path(folder) / args.draft
        draft.mkdir()
        (draft / "config.json").write_text(json.dumps({**LLAMA_8B, **DRAFTS[args.draft]}))
        for engine in args.engines:
            always = {"ALWAYS_AHEAD": "1"} if engine == "always" else {}
            DraftProcess.variables = card_variables(number) | always
            _measure(args, target, draft, engine)
    return 0


def _measure(args: argparse.Namespace, target: Path, draft: Path, engine: str) -> None:
    """Runs one engine, and prints a line for each batch."""
    flags: dict[str, Any] = engine_flags(max(args.batch), args.prompt + args.output)
    flags |= {"quantization": args.quantization, "tensor_parallel_size": args.tp}
    port, drafts = free_port(), engine != "none"
    if drafts:
        flags |= {
            "speculative_draft_model_path": str(draft),
            "speculative_draft_load_format": "dummy",
            "speculative_num_steps": args.steps,
            "speculative_draft_ahead": engine in ("ahead", "always"),
            "metrics_port": port,
        }
    with running_engine(target, "STANDALONE" if drafts else "NONE", **flags) as harness:
        for batch in args.batch:
            if engine == "ahead":
                last = _counts(port).get(DEVICE_STEPS, 0.0) + JUDGED_STEPS
                while _counts(port).get(DEVICE_STEPS, 0.0) < last:
                    run_batch(harness, batch, args.prompt, args.output)
            before = _counts(port) if drafts else {}
            one = time_decoding(harness, batch, args.prompt, args.output)
            after = _counts(port) if drafts else {}
            found = {key: after[key] - before.get(key, 0.0) for key in after}
            assert not drafts or found.get(DEVICE_STEPS), "the draft cannot map the target's memory"
            hits, misses = (
                found.get(f'{AHEAD_STEPS}{{outcome="{name}"}}', 0.0) for name in OUTCOMES
            )
            row = {
                "engine": engine,
                "draft": args.draft if drafts else "none",
                "steps": args.steps,
                "batch": batch,
                "ms_per_step": round(one.ms_per_step, 3),
                "tokens_per_second": round(one.tokens_per_second, 1),
                "accept_length": round(one.accept_length, 3),
                "prepared": round((hits + misses) / found[DEVICE_STEPS], 3) if drafts else None,
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
