"""Time from prompt to first token at the shape of Llama-3.1-8B or of a larger model, on one GPU or
by ranks on several, beside steps run operation by operation and SGLang.

    python -m benchmarks.gpu.prompts --peer /opt/sglpeer
    python -m benchmarks.gpu.prompts --tp 2 --shape qwen3-32b --lengths 8000 --batch 1

Random weights, no speculation, empty prefix cache, medians of `--rounds` requests or batches that
are sent when the engine idles; the engine's caller measures the time: Foredraft's in the
verifier's process, SGLang's in another one than its scheduler's, as its Engine is made. SGLang
runs flashinfer attention, with and without its own graphs of prompts.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.needed import need_gpu
from benchmarks.gpu.runs import random_jobs
from benchmarks.gpu.shapes import BITS, TARGETS, flags_of, write_checkpoints
from benchmarks.results_folder import results_folder
from testing.engines import running_engine
from verify_service.executor.captured.mixed import MixedGraphs

OWN = "Foredraft"
LENGTHS, BATCHES, WARM_UP = (32, 128, 256, 512, 1024), (1, 8), 3
# Run in the peer's folder and environment; children that it starts import the file anew.
PEER = """
import json, random, sys, time
import bench_sgl
if __name__ == "__main__":
    lengths, batches, rounds, is_captured = json.loads(sys.argv.pop())
    sys.argv += [str(batch) for batch in batches] + ["--log-level", "error"] + ["--prefill-graph"] * is_captured
    options = bench_sgl.parse()
    import dataclasses, sglang
    from sglang.srt.server_args import ServerArgs
    known = {field.name for field in dataclasses.fields(ServerArgs)}
    options.prompt_len = max(lengths)
    engine = sglang.Engine(**{k: v for k, v in bench_sgl.engine_args(options).items() if k in known})
    rng = random.Random(1)
    for batch in batches:
        for length in lengths:
            seconds = []
            for _ in range(rounds):
                ids = [[rng.randrange(1000, 30000) for _ in range(length)] for _ in range(batch)]
                started = time.perf_counter()
                engine.generate(input_ids=ids, sampling_params={"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True})
                seconds.append(time.perf_counter() - started)
            print("RESULT", json.dumps([batch, length, seconds]), flush=True)
    engine.shutdown()
"""  # noqa: E501


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), help="tokens")
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--layers", type=int, default=0, help="fewer for debugging; 0 for all")
    parser.add_argument("--shape", default="llama-8b", choices=list(TARGETS))
    parser.add_argument("--quantization", default="unquant", choices=list(BITS))
    parser.add_argument("--tp", type=int, default=1, help="ranks of the target, each on its GPU")
    parser.add_argument("--skip-eager", action="store_true", help="only captured steps")
    parser.add_argument("--peer", type=Path, help="folder of the SGLang bundle")
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    need_gpu()
    if args.peer and (args.shape != "llama-8b" or args.quantization != "unquant"):
        parser.error("--peer: the bundle runs the shape of Llama-3.1-8B in bfloat16")
    columns = {OWN: _measure(args)}
    if not args.skip_eager:
        columns[f"{OWN}, op by op"] = _measure(args, captured=False)
    if args.peer:
        columns["SGLang, its graphs"] = _peer(args, captured=True)
        columns["SGLang"] = _peer(args, captured=False)
    report(columns, args)
    return 0


Medians = dict[tuple[int, int], float]  # milliseconds by batch and length


def _measure(args: argparse.Namespace, captured: bool = True) -> Medians:
    longest, largest = max(args.lengths), max(args.batch)
    takes: Callable[..., bool] = MixedGraphs.takes
    with tempfile.TemporaryDirectory() as folder:
        target, head = write_checkpoints(Path(folder), args.layers, args.shape)
        algorithm, flags = flags_of("none", head, largest, longest)
        flags["chunked_prefill_size"] = max(4096, longest * largest)
        flags["context_length"] = max(4096, longest + 1)
        flags |= {"tensor_parallel_size": args.tp, "quantization": args.quantization}
        if not captured:
            MixedGraphs.takes = lambda self, rows: False  # type: ignore[method-assign]
        rng, found = random.Random(1), {}
        try:
            with running_engine(target, algorithm, **flags) as harness:
                for batch in args.batch:
                    for length in args.lengths:
                        seconds = []
                        for _ in range(args.rounds):
                            jobs = random_jobs(rng, batch, length, 1)
                            started = time.perf_counter()
                            harness.run(jobs, timeout=600)
                            seconds.append(time.perf_counter() - started)
                        found[batch, length] = _milliseconds(seconds)
        finally:
            MixedGraphs.takes = takes  # type: ignore[method-assign]
    return found


def _peer(args: argparse.Namespace, captured: bool) -> Medians:
    asked = json.dumps([args.lengths, args.batch, args.rounds, captured])
    layers = f"--layers {args.layers}" if args.layers else ""
    script = args.peer / "prompts_of_foredraft.py"
    script.write_text(PEER)
    command = f". {args.peer}/env.sh; cd {args.peer}; python3 {script} none {layers} '{asked}'"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment, check=False
    )
    lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return {(batch, length): _milliseconds(s) for batch, length, s in map(json.loads, lines)}


def _milliseconds(seconds: list[float]) -> float:
    return statistics.median(seconds[WARM_UP:] or seconds) * 1e3


def report(columns: dict[str, Medians], args: argparse.Namespace) -> None:
    """Table, JSON and plot; ratios to Foredraft's captured steps."""
    rows: list[dict[str, Any]] = [
        {"batch": batch, "length": length, **{n: of.get((batch, length)) for n, of in columns.items()}}  # noqa: E501
        for batch in args.batch
        for length in args.lengths
    ]  # fmt: skip
    (args.out / "gpu_prompts.json").write_text(json.dumps(rows, indent=1) + "\n")
    print("milliseconds from prompt to first token (in brackets times Foredraft's)")
    print("| prompts | tokens of each | " + " | ".join(columns) + " |")
    print("| --- " * (2 + len(columns)) + "|")
    for row in rows:
        own = row[OWN]
        cells = [
            "-" if row[name] is None else f"{row[name]:.2f} ({row[name] / own:.2f})"
            for name in columns
        ]
        print(f"| {row['batch']} | {row['length']} | " + " | ".join(cells) + " |")
    _plot(rows, list(columns), args)


def _plot(rows: list[dict[str, Any]], names: list[str], args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(args.batch), figsize=(4.5 * len(args.batch), 3.5))
    for axis, batch in zip([axes] if len(args.batch) == 1 else axes, args.batch, strict=True):
        own = [row for row in rows if row["batch"] == batch]
        for name in names:
            axis.plot([row["length"] for row in own], [row[name] for row in own], "o-", label=name)
        axis.set_title(f"{batch} at once", fontsize=9)
        axis.set_xlabel("tokens of a prompt")
        axis.set_ylabel("ms to the first token")
        axis.set_ylim(bottom=0)
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(args.out / "gpu_prompts.png", dpi=110)


if __name__ == "__main__":
    sys.exit(main())
