"""Decoding speed with every kind of draft at the shape of Qwen3-8B, in one table.

    python -m benchmarks.gpu.block_drafters --batch 1 8 32 --mps

Weights are random, so the accept lengths are SIMULATED: the published ones of DeepSpec's heads for
MT-Bench, chains of 7, trained by one trainer on the same data. P-EAGLE has none there and gets
EAGLE-3's; EAGLE-3's tree of 32 rows gets the chain's times 1.15, about what it gains on the
bundled family. Verifier and draft are two processes on one GPU. 256-token prompts, 256 output
tokens, temperature 0. The floor is the time in which an H200 reads the weights of target and draft
once for each of their forwards.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.needed import need_gpu
from benchmarks.gpu.runs import time_decoding
from benchmarks.gpu.shapes import (
    BANDWIDTH,
    QWEN3_8B,
    QWEN_DRAFTS,
    draft_flags,
    engine_flags,
    qwen_draft_bytes,
    target_bytes,
    write_qwen_checkpoints,
)
from foredraft.cli import mps
from testing.engines import running_engine

# Draft, steps, topk, draft tokens, and the accept length that is simulated.
CASES: dict[str, tuple[str, int, int, int, float]] = {
    "plain": ("", 0, 0, 0, 1.0),
    "EAGLE-3, chain 7": ("eagle3", 7, 1, 8, 2.66),
    "EAGLE-3, tree 5/8/32": ("eagle3", 5, 8, 32, 3.06),
    "P-EAGLE, 7": ("peagle", 7, 1, 8, 2.66),
    "DFlash, block 8": ("dflash", 7, 1, 8, 3.11),
    "DSpark, block 8": ("dspark", 7, 1, 8, 3.72),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--mps", action="store_true", help="run under a private MPS daemon")
    parser.add_argument("--flags", type=json.loads, default={}, help="more flags, as JSON")
    args = parser.parse_args()
    need_gpu()
    print("accept lengths above 1 are SIMULATED; ms a step (floor), tokens/s")
    print(f"| draft | accept length | {' | '.join(f'batch {batch}' for batch in args.batch)} |")
    print("| --- " * (len(args.batch) + 2) + "|", flush=True)
    # Before anything opens the card; see benchmarks.gpu.decode.
    with tempfile.TemporaryDirectory() as folder, mps.running(args.mps) as variables:
        os.environ.update(variables)
        for title in args.cases:
            cells = _measure(title, Path(folder), args)
            print(f"| {title} | {CASES[title][-1]:.2f} | {' | '.join(cells)} |", flush=True)
        for name in variables:
            del os.environ[name]
    return 0


def _measure(title: str, folder: Path, args: argparse.Namespace) -> list[str]:
    name, steps, topk, tokens, length = CASES[title]
    target, head = write_qwen_checkpoints(folder, name or "eagle3")
    flags = engine_flags(max(args.batch), args.prompt + args.output)
    algorithm, draft_bytes = "NONE", 0
    if name:
        algorithm = QWEN_DRAFTS[name][0]
        flags |= draft_flags(head, steps, topk, tokens, length)
        draft_bytes = qwen_draft_bytes(name, steps)
    floor = target_bytes(QWEN3_8B) + draft_bytes
    cells = []
    with running_engine(target, algorithm, **flags, **args.flags) as harness:
        for batch in args.batch:
            run = time_decoding(harness, batch, args.prompt, args.output)
            cells.append(
                f"{run.ms_per_step:.2f} ({floor / BANDWIDTH * 1e3:.2f}),"
                f" {run.tokens_per_second:.0f}"
            )
    return cells


if __name__ == "__main__":
    sys.exit(main())
