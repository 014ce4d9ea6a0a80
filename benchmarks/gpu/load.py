"""The bundled family on one GPU under an open-loop load from half to twice the capacity: plain decoding against speculation.

    python -m benchmarks.gpu.load --mps

Requests arrive as a Poisson process, the same for all settings: prompts of `benchmarks/accept_length_prompts.json`, outputs of 32 to
256 tokens, real acceptance. The load is in units of what plain decoding can serve (all requests at once). Time to first
token, time between tokens, and goodput: tokens per second of the requests that met both limits.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.cli import mps
from foredraft.models.registry import resolve_model_path
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams
from tests.support.engines import Harness, running_engine
from verify_service.live_requests import EngineRequest
from verify_service.outputs import Load, StepOutput

LOADS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
SETTINGS: dict[str, tuple[str, bool]] = {  # algorithm, and whether everything is drafted
    "plain": ("NONE", False),
    "EAGLE-3, adaptive": ("EAGLE3", False),
    "EAGLE-3, always": ("EAGLE3", True),
}


@dataclass(slots=True)
class Seen:
    """When the tokens of one request came."""

    due: float
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="of each load")
    parser.add_argument("--running", type=int, default=32, help="--max-running-requests")
    parser.add_argument("--ttft", type=float, default=0.2, help="limit in seconds")
    parser.add_argument("--between", type=float, default=0.02, help="limit in seconds, of the mean")
    parser.add_argument("--mps", action="store_true", help="run under a private MPS daemon")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = resolve_model_path("foredraft-demo")
    tokenizer = Tokenizer.from_dir(path)
    texts = json.loads((Path(__file__).parents[1] / "accept_length_prompts.json").read_text())
    prompts = [tokenizer.encode(text)[:200] for text in texts]
    rows: list[dict[str, Any]] = []
    rate = 0.0
    with tempfile.TemporaryDirectory(), mps.running(args.mps) as variables:
        os.environ.update(variables)
        for name, (algorithm, always) in SETTINGS.items():
            flags: dict[str, Any] = {
                "device": "cuda",
                "dtype": "bfloat16",
                "max_total_tokens": 65536,
                "max_running_requests": args.running,
                "chunked_prefill_size": 2048,
                "max_queued_requests": 100_000,
                "draft_step_timeout": 30.0,
                "speculative_adaptive": not always,
            }
            if algorithm != "NONE":
                head = resolve_model_path("foredraft-demo-eagle3")
                flags["speculative_draft_model_path"] = str(head)
            with running_engine(path, algorithm, **flags) as harness:
                _offer(harness, prompts, [0.0] * 64)  # compiles
                if not rate:
                    seen = _offer(harness, prompts, [0.0] * 256)
                    rate = len(seen) / (max(s.times[-1] for s in seen) - seen[0].due)
                    print(f"capacity of plain decoding: {rate:.1f} requests/s", flush=True)
                for load in LOADS:
                    rng = random.Random(1)
                    due, arrivals = 0.0, []
                    while (due := due + rng.expovariate(rate * load)) < args.seconds:
                        arrivals.append(due)
                    row = _summary(_offer(harness, prompts, arrivals), args)
                    rows.append({"setting": name, "load": load, **row})
                    print(json.dumps(rows[-1]), flush=True)
        for variable in variables:
            del os.environ[variable]
    about = {"requests_per_second": rate, "ttft": args.ttft, "between": args.between}
    (args.out / "gpu_load.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1))
    _report(rows)
    _plot(rows, args.out / "gpu_load.png")
    return 0


def _offer(harness: Harness, prompts: list[list[int]], arrivals: list[float]) -> list[Seen]:
    """Submits a request at each of the times and waits for all."""
    rng = random.Random(2)
    started = time.perf_counter()
    seen = [Seen(started + due) for due in arrivals]
    left, done = len(seen), threading.Event()

    def take(outputs: list[StepOutput], load: Load) -> None:
        nonlocal left
        now = time.perf_counter()
        for output in outputs:
            if output.tokens:
                seen[output.tag].times.append(now)
                seen[output.tag].num_tokens += len(output.tokens)
            left -= output.finish is not None
        if left == 0:
            done.set()

    for tag, one in enumerate(seen):
        sampling = SamplingParams(
            temperature=rng.choice((0.0, 1.0)),
            seed=tag,
            max_new_tokens=rng.randrange(32, 257),
            ignore_eos=True,
        )
        if (wait := one.due - time.perf_counter()) > 0:
            time.sleep(wait)
        harness.engine.submit(EngineRequest(tag, rng.choice(prompts), sampling, take))
    if seen and not done.wait(300):
        raise TimeoutError(f"{left} requests have not ended")
    return seen


def _summary(seen: list[Seen], args: argparse.Namespace) -> dict[str, Any]:
    first = np.array([one.times[0] - one.due for one in seen])
    between = np.array(
        [(one.times[-1] - one.times[0]) / max(1, one.num_tokens - 1) for one in seen]
    )
    tokens = np.array([one.num_tokens for one in seen])
    seconds = max(one.times[-1] for one in seen) - seen[0].due
    good = (first <= args.ttft) & (between <= args.between)
    return {
        "requests": len(seen),
        "ttft_p50": float(np.percentile(first, 50)),
        "ttft_p99": float(np.percentile(first, 99)),
        "between_p50": float(np.percentile(between, 50)),
        "between_p99": float(np.percentile(between, 99)),
        "tokens_per_second": float(tokens.sum() / seconds),
        "goodput": float(tokens[good].sum() / seconds),
    }


def _report(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'setting':18} {'load':>5} {'TTFT ms p50':>12} {'p99':>7} {'between ms p50':>15} {'p99':>6} "
        f"{'tokens/s':>9} {'goodput':>8}"
    )
    for row in rows:
        print(
            f"{row['setting']:18} {row['load']:5.2f} {row['ttft_p50'] * 1e3:12.1f} "
            f"{row['ttft_p99'] * 1e3:7.0f} {row['between_p50'] * 1e3:15.2f} "
            f"{row['between_p99'] * 1e3:6.2f} {row['tokens_per_second']:9.0f} {row['goodput']:8.0f}"
        )


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = (
        ("ttft_p99", "time to first token, p99 (s)"),
        ("between_p50", "time between tokens, p50 (s)"),
        ("goodput", "goodput (tokens/s)"),
    )
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for axis, (key, title) in zip(axes, shown, strict=True):
        for name in SETTINGS:
            own = [row for row in rows if row["setting"] == name]
            axis.plot([row["load"] for row in own], [row[key] for row in own], "o-", label=name)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("load, of what plain decoding can serve")
        axis.set_ylim(bottom=0)
    axes[0].set_ylim(bottom=None)
    axes[0].set_yscale("log")
    axes[2].legend(fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
