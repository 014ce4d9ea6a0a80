"""The bundled family under an open-loop load from half to twice the capacity: plain decoding
against speculation.

    python -m benchmarks.poisson_load --device cuda --mps
    python -m benchmarks.poisson_load --device cpu --running 4 --seconds 20 --ttft 1 --loads 0.5 1 2 --rounds 2 --steps

All engines stand side by side and are given the same load in turn, so that a machine that is slow
for a while is slow for all. Requests arrive as a Poisson process: prompts of
`benchmarks/accept_length_prompts.json`, outputs of 32 to 256 tokens, half of them greedy and half
at temperature 1, real acceptance by a draft of the family's. The load is in units of what plain
decoding serves with a full batch, which is measured first. As many requests as run may wait; more
are refused. Time to first token from when a request was due, time between tokens as the mean of a
request's, gaps between one message and the next; goodput is the tokens per second of the requests
that met both limits.
"""  # noqa: E501

import argparse
import contextlib
import json
import os
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.needed import need_gpu
from benchmarks.real_prompts import real_prompts
from benchmarks.results_folder import results_folder
from foredraft.cli import mps
from foredraft.errors import Overloaded
from foredraft.models.registry import BUNDLED_DRAFTS, resolve_model_path
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams
from testing.engine_steps import EngineSteps, report
from testing.engines import Harness, running_engine
from verify_service.engine.live_requests import EngineRequest
from verify_service.outputs import Load, StepOutput

LOADS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
SHORTEST, LONGEST = 32, 256  # tokens of an answer
SETTINGS = ("plain", "adaptive", "always")


@dataclass(slots=True)
class Seen:
    """Records the times of one request's tokens.

    Attributes:
        due: Due time of the request, in seconds of `perf_counter` as all times.
        times: Times of its messages.
    """

    due: float
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    is_refused: bool = False

    @property
    def between(self) -> float:
        """Returns the mean seconds from token to token."""
        return (self.times[-1] - self.times[0]) / max(1, self.num_tokens - 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--loads", type=float, nargs="+", default=list(LOADS))
    add("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    add("--draft", default="EAGLE3", choices=["NGRAM", *BUNDLED_DRAFTS])
    add("--seconds", type=float, default=6.0, help="of each load and round")
    add("--rounds", type=int, default=1, help="of each load, all settings in each")
    add("--running", type=int, default=32, help="--max-running-requests; as many may wait")
    add("--threads", type=int, default=1, help="of verifier and draft each, on a CPU")
    add("--ttft", type=float, default=0.2, help="limit in seconds")
    add(
        "--between",
        type=float,
        help=(
            "limit in seconds, of a request's mean (default: twice plain decoding's with a full"
            " batch)"
        ),
    )
    add("--steps", action="store_true", help="print what steps chose, expected and took")
    add("--mps", action="store_true", help="run under a private MPS daemon")
    add("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    need_gpu(args.device)
    path = resolve_model_path("foredraft-demo")
    tokenizer = Tokenizer.from_dir(path)
    prompts = real_prompts(tokenizer)
    rows: list[dict[str, Any]] = []
    rate = 0.0
    with mps.running(args.mps) as variables, contextlib.ExitStack() as stack:
        os.environ.update(variables)
        try:
            harnesses = {
                name: stack.enter_context(_engine(path, name, args))
                for name in ("plain", *(name for name in args.settings if name != "plain"))
            }
            for harness in harnesses.values():  # warms up
                _offer(harness, prompts, [0.0] * 2 * args.running)
            full = _offer(harnesses["plain"], prompts, [0.0] * 4 * args.running, 4)
            rate = _capacity(full)
            args.between = args.between or 2 * float(np.median([one.between for one in full]))
            print(f"capacity of plain decoding: {rate:.2f} requests/s", flush=True)
            print(f"limits: {args.ttft:g} s, then {args.between * 1e3:.2f} ms a token", flush=True)
            listeners = {
                name: EngineSteps(harness.engine, expects=True)
                for name, harness in harnesses.items()
                if args.steps
            }
            for load in args.loads:
                seen: dict[str, list[list[Seen]]] = {name: [] for name in args.settings}
                for number in range(args.rounds):
                    due = _arrivals(rate * load, args.seconds, number)
                    for name in args.settings[:: -1 if number % 2 else 1]:
                        seen[name].append(_offer(harnesses[name], prompts, due, 2 + number))
                for name, rounds in seen.items():
                    label = name if name == "plain" else f"{args.draft}, {name}"
                    rows.append({"setting": label, "load": load, **_summary(rounds, args)})
                    print(json.dumps(rows[-1]), flush=True)
            for name, listener in listeners.items():
                report(name, listener.steps)
        finally:  # keep the measurements made so far
            _report(rows, rate, args)
        for variable in variables:
            del os.environ[variable]
    return 0


def _engine(
    path: Path, setting: str, args: argparse.Namespace
) -> contextlib.AbstractContextManager[Harness]:
    algorithm = "NONE" if setting == "plain" else args.draft
    flags: dict[str, Any] = {
        "device": args.device,
        "dtype": "bfloat16" if args.device == "cuda" else "float32",
        "num_threads": args.threads,
        "max_total_tokens": 512 * args.running,
        "max_running_requests": args.running,
        "chunked_prefill_size": 2048 if args.device == "cuda" else 256,
        "max_queued_requests": args.running,
        "draft_step_timeout": 30.0,
        "speculative_adaptive": setting == "adaptive",
    }
    if model := BUNDLED_DRAFTS.get(algorithm):
        flags["speculative_draft_model_path"] = str(resolve_model_path(model))
    return running_engine(path, algorithm, **flags)


def _arrivals(rate: float, seconds: float, number: int) -> list[float]:
    rng = random.Random(1 + number)
    due = 0.0
    arrivals: list[float] = []
    while (due := due + rng.expovariate(rate)) < seconds or not arrivals:
        arrivals.append(due)
    return arrivals


def _offer(
    harness: Harness, prompts: list[list[int]], arrivals: list[float], seed: int = 2
) -> list[Seen]:
    """Submits a request at each of the times and waits for all; requests due at once wait their
    turn and are never refused.
    """
    rng = random.Random(seed)
    seen = [Seen(due) for due in arrivals]
    left, changed = len(seen), threading.Condition()
    patient, most = arrivals[-1] == 0.0, harness.engine.limits.max_running_requests

    def take(outputs: list[StepOutput], load: Load) -> None:
        nonlocal left
        now = time.perf_counter()
        num_ended = 0
        for output in outputs:
            one = seen[output.tag]
            if output.tokens:
                one.times.append(now)
                one.num_tokens += len(output.tokens)
            if output.finish is not None:
                one.is_refused = output.finish.error is not None
                num_ended += 1
        if num_ended:
            with changed:
                left -= num_ended
                changed.notify()

    started = time.perf_counter()
    for tag, one in enumerate(seen):
        one.due += started
        sampling = SamplingParams(
            temperature=rng.choice((0.0, 1.0)),
            seed=tag,
            max_new_tokens=rng.randrange(SHORTEST, LONGEST + 1),
            ignore_eos=True,
        )
        request = EngineRequest(tag, rng.choice(prompts), sampling, take)
        if (wait := one.due - time.perf_counter()) > 0:
            time.sleep(wait)
        while patient and tag - (len(seen) - left) >= most:
            time.sleep(0.0005)
        try:
            harness.engine.submit(request)
        except Overloaded:
            one.is_refused = True
            with changed:
                left -= 1
    with changed:
        if not changed.wait_for(lambda: left == 0, 300):
            raise TimeoutError(f"{left} requests have not ended")
    return seen


def _capacity(seen: list[Seen]) -> float:
    """Returns requests per second while the batch was full: between a quarter and three
    quarters of the time.
    """
    first, last = min(one.times[0] for one in seen), max(one.times[-1] for one in seen)
    start, end = first + (last - first) / 4, last - (last - first) / 4
    tokens = sum(
        one.num_tokens * sum(start <= at <= end for at in one.times) / len(one.times)
        for one in seen
    )
    return tokens / (end - start) / (sum(one.num_tokens for one in seen) / len(seen))


def _summary(rounds: list[list[Seen]], args: argparse.Namespace) -> dict[str, Any]:
    everyone = [one for seen in rounds for one in seen]
    served = [one for one in everyone if not one.is_refused]
    first = np.array([one.times[0] - one.due for one in served])
    between = np.array([one.between for one in served])
    gaps = np.concatenate([np.diff(one.times) for one in served])
    tokens = np.array([one.num_tokens for one in served])
    seconds = sum(
        max(one.times[-1] for one in seen if not one.is_refused) - min(one.due for one in seen)
        for seen in rounds
    )
    good = (first <= args.ttft) & (between <= args.between)
    row: dict[str, Any] = {"requests": len(everyone), "refused": len(everyone) - len(served)}
    for name, values in (("ttft", first), ("between", between), ("gap", gaps)):
        for percent in (50, 90, 99):
            row[f"{name}_p{percent}"] = float(np.percentile(values, percent))
    row["tokens_per_second"] = float(tokens.sum() / seconds)
    row["goodput"] = float(tokens[good].sum() / seconds)
    return row


def _report(rows: list[dict[str, Any]], rate: float, args: argparse.Namespace) -> None:
    about = {"requests_per_second": rate, "ttft": args.ttft, "between": args.between}
    about |= {"device": args.device, "running": args.running, "seconds": args.seconds}
    name = f"poisson_load_{args.device}"
    (args.out / f"{name}.json").write_text(json.dumps({"about": about, "rows": rows}) + "\n")
    print(
        "| setting | load | TTFT ms p50, p90, p99 | between tokens ms p50, p90, p99 | gap ms p99 "
        "| refused | tokens/s | goodput |"
    )
    print("| --- " * 8 + "|")
    for row in rows:
        ttft, between = (
            ", ".join(f"{row[f'{what}_p{percent}'] * 1e3:.{digits}f}" for percent in (50, 90, 99))
            for what, digits in (("ttft", 0), ("between", 2))
        )
        print(
            f"| {row['setting']} | {row['load']:g} | {ttft} | {between} |"
            f" {row['gap_p99'] * 1e3:.1f} | {row['refused'] / row['requests']:.0%} |"
            f" {row['tokens_per_second']:.0f} | {row['goodput']:.0f} |"
        )
    if rows:
        _plot(rows, args.out / f"{name}.png")


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = (
        ("ttft", "time to first token (ms)", 1e3),
        ("between", "time between tokens (ms)", 1e3),
        ("goodput", "goodput (tokens/s)", 1.0),
    )
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for axis, (key, title, unit) in zip(axes, shown, strict=True):
        for name in dict.fromkeys(row["setting"] for row in rows):
            own = [row for row in rows if row["setting"] == name]
            loads = [row["load"] for row in own]
            if key == "goodput":
                axis.plot(loads, [row[key] for row in own], "o-", label=name)
                continue
            (line,) = axis.plot(loads, [row[f"{key}_p50"] * unit for row in own], "o-")
            axis.plot(
                loads, [row[f"{key}_p99"] * unit for row in own], "o:", color=line.get_color()
            )
            title += " p50, dotted p99" if "p50" not in title else ""
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("load, of what plain decoding can serve")
        if key == "ttft":
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
    axes[2].legend(fontsize=8)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    sys.exit(main())
