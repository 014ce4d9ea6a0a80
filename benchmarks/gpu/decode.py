"""Decoding speed on one GPU, or by ranks on several, at the shape of Llama-3.1-8B or of a larger
model, with simulated acceptance, beside the floor and SGLang.

    python -m benchmarks.gpu.decode --modes none chain tree --batch 1 8 32 --mps --peer /opt/sglpeer
    python -m benchmarks.gpu.decode --modes none chain --batch 1 8 32 --mps --tp 2 --shape qwen3-32b
    python -m benchmarks.gpu.decode --modes none --tp 2 --shape llama-70b --quantization fp8

Random weights accept nothing, so the accept length is SIMULATED (`--simulate-accept-length`):
drafting, verification and the moves of KV are real, only their result is replaced. Verifier and
draft are two processes, as in production. 256-token prompts, 512 output tokens, temperature 0. The
peer runs flashinfer attention.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.needed import need_gpu
from benchmarks.gpu.runs import time_decoding
from benchmarks.gpu.shapes import (
    BANDWIDTH,
    BITS,
    MODES,
    TARGETS,
    flags_of,
    head_bytes,
    target_bytes,
    target_of,
    write_checkpoints,
)
from benchmarks.gpu.timeline import Timeline
from benchmarks.gpu.timeline import report as report_timelines
from benchmarks.results_folder import results_folder
from foredraft.cli import mps
from testing.engines import Harness, running_engine

TIMELINE_TOKENS = 160
PEER_MODES = {"none": "none", "chain": "eagle3_chain", "tree": "eagle3_tree"}


@dataclass(slots=True)
class Row:
    """A measurement; accept lengths above 1 are simulated."""

    mode: str
    batch: int
    ms_per_step: float
    tokens_per_second: float
    accept_length: float
    p99_ms: float
    floor_ms: float
    peer_tokens_per_second: float | None = None
    peer_ms_per_step: float | None = None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--shape", default="llama-8b", choices=list(TARGETS))
    parser.add_argument("--quantization", default="unquant", choices=list(BITS))
    parser.add_argument("--layers", type=int, default=0, help="fewer for debugging; 0 for all")
    parser.add_argument("--tp", type=int, default=1, help="ranks of the target, each on its GPU")
    parser.add_argument("--mps", action="store_true", help="run under a private MPS daemon")
    parser.add_argument("--peer", type=Path, help="folder of the SGLang bundle")
    parser.add_argument(
        "--timeline",
        action="store_true",
        help="also draw each engine's time line; see benchmarks.gpu.timeline",
    )
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    parser.add_argument("--flags", type=json.loads, default={}, help="more flags, as JSON")
    args = parser.parse_args()
    need_gpu()
    if args.peer and (args.shape != "llama-8b" or args.quantization != "unquant"):
        parser.error("--peer: the bundle runs the shape of Llama-3.1-8B in bfloat16")
    # Before anything opens the card: a process that has opened it cannot become the daemon's
    # client.
    with tempfile.TemporaryDirectory() as folder, mps.running(args.mps) as variables:
        os.environ.update(variables)
        target, head = write_checkpoints(Path(folder), args.layers, args.shape)
        timeline = Timeline(Path(folder) / "draft.json") if args.timeline else None
        rows, timelines = [], []
        for mode in args.modes:
            measured, seen = _measure(mode, target, head, args, timeline)
            gc.collect()  # the weights of an engine that has ended
            rows += measured
            timelines += seen
        for name in variables:
            del os.environ[name]
    if args.peer:
        for mode in args.modes:
            _measure_peer(mode, [row for row in rows if row.mode == mode], args)
    about = ("shape", "quantization", "mps", "layers", "tp", "prompt")
    report(rows, args.out, {name: getattr(args, name) for name in about})
    if timelines:
        report_timelines(timelines, args.out)
    return 0


def _measure(
    mode: str, target: Path, head: Path, args: argparse.Namespace, timeline: Timeline | None
) -> tuple[list[Row], list[dict[str, Any]]]:
    algorithm, flags = flags_of(mode, head, max(args.batch), args.prompt + args.output)
    rows = []
    flags |= {"tensor_parallel_size": args.tp, "quantization": args.quantization, **args.flags}
    with running_engine(target, algorithm, **flags) as harness:
        for batch in args.batch:
            best: Row | None = None
            for _ in range(args.repeats):
                row = _run(harness, mode, batch, args)
                if best is None or row.tokens_per_second > best.tokens_per_second:
                    best = row
            assert best is not None
            print(json.dumps(asdict(best)), flush=True)
            rows.append(best)
        seen = [
            timeline.of(harness, mode, batch, args.prompt, TIMELINE_TOKENS)
            for batch in (args.batch if timeline else ())
        ]
    return rows, seen


def _run(harness: Harness, mode: str, batch: int, args: argparse.Namespace) -> Row:
    measured = time_decoding(harness, batch, args.prompt, args.output)
    depth, _, _, _ = MODES[mode]
    config = target_of(args.shape, args.layers)
    step_bytes, extend_bytes = head_bytes(config)
    floor = target_bytes(config, BITS[args.quantization]) / args.tp
    floor += extend_bytes + (depth - 1) * step_bytes if depth else 0
    return Row(
        mode,
        batch,
        measured.ms_per_step,
        measured.tokens_per_second,
        measured.accept_length,
        measured.p99_ms,
        floor / BANDWIDTH * 1e3,
    )


def _measure_peer(mode: str, rows: list[Row], args: argparse.Namespace) -> None:
    batches = " ".join(str(batch) for batch in args.batch)
    length = MODES[mode][3]
    command = (
        f". {args.peer}/env.sh; cd {args.peer}; python3 bench_sgl.py {PEER_MODES[mode]} {batches}"
        f" --acc-len {length if mode != 'none' else 0} --prompt-len {args.prompt} --out-len"
        f" {args.output} --log-level error"
    )
    if args.tp > 1:
        command += f" --set tp_size={args.tp} --set disable_custom_all_reduce=false"
    if args.layers:
        command += f" --layers {args.layers}"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment, check=False
    )
    results = [
        json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")
    ]
    if not results:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    for result in results:
        print("peer", json.dumps(result), flush=True)
        for row in rows:
            if row.batch == result.get("bs", result.get("batch_size")):
                row.peer_tokens_per_second = result["decode_tok_s"]
                row.peer_ms_per_step = result["ms_per_step"]


def report(rows: list[Row], out: Path, about: dict[str, Any]) -> None:
    """Table, JSON and plot."""
    (out / "gpu_decode.json").write_text(
        json.dumps({"about": about, "rows": [asdict(row) for row in rows]}, indent=1)
    )
    print("accept lengths above 1 are SIMULATED", about)
    print(
        f"{'mode':6} {'batch':>5} {'ms/step':>8} {'p99':>7} {'tokens/s':>9} {'accept':>6} "
        f"{'floor':>6} {'x floor':>7} {'peer t/s':>9} {'ratio':>6}"
    )
    for row in rows:
        peer = row.peer_tokens_per_second
        print(
            f"{row.mode:6} {row.batch:5} {row.ms_per_step:8.2f} {row.p99_ms:7.2f} "
            f"{row.tokens_per_second:9.0f} {row.accept_length:6.2f} {row.floor_ms:6.2f} "
            f"{row.ms_per_step / row.floor_ms:7.2f} "
            + (f"{peer:9.0f} {row.tokens_per_second / peer:6.2f}" if peer else f"{'-':>9} {'-':>6}")
        )
    _plot(rows, out / "gpu_decode.png")


def _plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    labels = [f"{row.mode} {row.batch}" for row in rows]
    x = np.arange(len(rows))
    figure, axes = plt.subplots(figsize=(8, 3.5))
    axes.bar(x - 0.2, [row.tokens_per_second for row in rows], 0.4, label="Foredraft")
    axes.bar(x + 0.2, [row.peer_tokens_per_second or 0 for row in rows], 0.4, label="SGLang")
    axes.set_xticks(x, labels, rotation=45)
    axes.set_ylabel("tokens/s (simulated acceptance)")
    axes.set_yscale("log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
