"""Adaptive speculation on one GPU: steady states over batch and acceptance, and transients, beside plain and fixed trees.

    python -m benchmarks.gpu.adaptive --mode chain --batch 1 8 32 64 --mps

8B shape with random weights, as in `benchmarks.gpu.decode`; whether a drafted token is right is SIMULATED, with the same
probability at each depth. All settings run in one engine on the same sequences, one after the other, so that contexts and
the KV pool are the same; plain decoding is also measured in an engine without a draft. Prints a table, writes JSON and a plot.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.decode import MODES, flags_of
from benchmarks.gpu.shapes import write_checkpoints
from foredraft.cli import mps
from foredraft.types import FinishReason, SamplingParams
from tests.support.engines import Harness, running_engine
from verify_service.draft_plan import Plan, Want
from verify_service.draft_policy import DraftPolicy
from verify_service.engine import Engine
from verify_service.live_requests import EngineRequest
from verify_service.outputs import Load, StepOutput

LONGEST = 8000  # tokens of an answer
ACCEPTANCES = (0.1, 0.3, 0.5, 0.7, 0.9)


class FixedRows(DraftPolicy):
    """The same number of rows for every sequence in every step."""

    def __init__(self, rows: int) -> None:
        super().__init__(None, max(rows - 1, 1), 1)
        self._fixed = rows

    def plan(self, wanted: Sequence[Want], other_rows: int = 0) -> Plan:
        """See DraftPolicy."""
        return Plan([min(want.limit, self._fixed - 1) for want in wanted], self._fixed)


class Meter:
    """Keeps a number of sequences running and counts their tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers: list[int] = []
        self._size = 0
        self.arrivals: list[tuple[float, int]] = []

    def resize(self, count: int) -> None:
        """Starts or cancels sequences, and waits until all have begun to decode."""
        self._size = count
        while len(self._numbers) > count:
            self._engine.cancel(self._numbers.pop())
        while len(self._numbers) < count:
            self._numbers.append(self._submit(len(self._numbers)))
        deadline = time.perf_counter() + 60
        while self._engine.load().running != count or self._engine.load().waiting:
            if time.perf_counter() > deadline:
                raise TimeoutError(f"not {count} but {self._engine.load()}")
            time.sleep(0.001)
        time.sleep(0.05)

    def _submit(self, tag: int) -> int:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=LONGEST, ignore_eos=True)
        prompt = [1000 + 7 * tag + i for i in range(256)]
        return self._engine.submit(EngineRequest(tag, prompt, sampling, self._take))

    def rate(self, seconds: float) -> float:
        """Tokens per second from now on."""
        first = len(self.arrivals)
        time.sleep(seconds)
        return rate_of(self.arrivals[first:])

    def _take(self, outputs: list[StepOutput], load: Load) -> None:
        self.arrivals.append((time.perf_counter(), sum(len(one.tokens) for one in outputs)))
        for one in outputs:
            if one.finish and one.finish.reason is FinishReason.LENGTH and one.tag < self._size:
                self._numbers[one.tag] = self._submit(one.tag)


def rate_of(arrivals: Sequence[tuple[float, int]]) -> float:
    """Tokens per second between the first arrival and the last."""
    if len(arrivals) < 2:
        return 0.0
    seconds = arrivals[-1][0] - arrivals[0][0]
    return sum(tokens for _, tokens in arrivals[1:]) / seconds


@dataclass(slots=True)
class Bench:
    """An engine with simulated acceptance whose policy can be exchanged.

    Attributes:
        adaptive: The policy that the engine was made with.
    """

    engine: Engine
    adaptive: DraftPolicy
    meter: Meter

    @classmethod
    def of(cls, harness: Harness) -> "Bench":
        """For a running engine."""
        engine = harness.engine
        return cls(engine, engine._sizes.policy, Meter(engine))

    def use(self, policy: DraftPolicy, acceptance: float) -> None:
        """Between two steps."""
        self.engine._inbox.put(lambda: setattr(self.engine._sizes, "policy", policy))
        target: Any = self.engine._target
        simulated = getattr(target, "_simulated", None) or target._chooser._simulated
        simulated.acceptance = acceptance

    def grid(
        self, batches: Sequence[int], rows: Callable[[int], Sequence[int]], args: argparse.Namespace
    ) -> list[dict[str, Any]]:
        """Steady states: tokens per second of the policy, of plain decoding and of every fixed number of rows."""
        found = []
        for batch in batches:
            self.meter.resize(batch)
            plain = []
            for acceptance in args.acceptance:
                self.use(FixedRows(1), acceptance)
                time.sleep(0.1)
                plain.append(self.meter.rate(args.seconds / 2))
                fixed = {}
                for size in rows(batch)[1:]:
                    self.use(FixedRows(size), acceptance)
                    time.sleep(0.15)
                    fixed[size] = self.meter.rate(args.seconds / 2)
                self.use(self.adaptive, acceptance)
                time.sleep(args.settle)
                rate = self.meter.rate(args.seconds)
                row = {
                    "batch": batch,
                    "acceptance": acceptance,
                    "adaptive": rate,
                    "plain": plain[-1],
                    "fixed": fixed,
                }
                found.append(row)
                print(json.dumps(row), flush=True)
            self.meter.resize(0)
        return found

    def transient(
        self, name: str, phases: Sequence[tuple[int, float]], seconds: float
    ) -> dict[str, Any]:
        """Phases of (batch, acceptance), `seconds` each: tokens per second in every window of a second, and plain's."""
        plain: dict[int, float] = {}
        for batch, _ in phases:
            if batch not in plain:
                self.meter.resize(batch)
                self.use(FixedRows(1), 0.0)
                time.sleep(0.15)
                plain[batch] = self.meter.rate(0.5)
        self.meter.resize(phases[0][0])
        self.use(self.adaptive, phases[0][1])
        time.sleep(1.0)
        windows, changes = [], []
        started = time.perf_counter()
        for batch, acceptance in phases:
            self.use(self.adaptive, acceptance)
            self.meter.resize(batch)
            begun, first = time.perf_counter(), len(self.meter.arrivals)
            changes.append({"at": begun - started, "batch": batch, "acceptance": acceptance})
            time.sleep(seconds)
            arrivals = self.meter.arrivals[first:]
            step = 0.1
            for i in range(int((seconds - 1.0) / step) + 1):
                inside = [a for a in arrivals if begun + i * step <= a[0] <= begun + i * step + 1]
                windows.append(
                    {
                        "start": begun - started + i * step,
                        "ratio": rate_of(inside) / plain[batch],
                    }
                )
        self.meter.resize(0)
        lowest = min(window["ratio"] for window in windows)
        print(f"{name}: lowest window {lowest:.2f} of plain", flush=True)
        return {
            "name": name, "phases": changes, "plain": plain, "windows": windows, "lowest": lowest
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--mode", default="chain", choices=[mode for mode in MODES if mode != "none"])
    add("--batch", nargs="+", type=int, default=[1, 8, 32, 64])
    add("--acceptance", nargs="+", type=float, default=list(ACCEPTANCES))
    add("--seconds", type=float, default=0.8, help="measured of a steady state")
    add("--settle", type=float, default=0.7, help="before that")
    add("--phase", type=float, default=3.0, help="seconds of each phase of a transient")
    add("--layers", type=int, default=32, help="fewer for debugging")
    add("--mps", action="store_true", help="run under a private MPS daemon")
    add("--without-none", action="store_true", help="leave the engine without a draft out")
    add("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    most = max(args.batch)
    with tempfile.TemporaryDirectory() as folder, mps.running(args.mps) as variables:
        os.environ.update(variables)
        target, head = write_checkpoints(Path(folder), args.layers)
        algorithm, flags = flags_of(args.mode, head, most, LONGEST // 4)
        flags["context_length"] = 2 * LONGEST
        flags["simulate_accept_length"] = 1.0
        with running_engine(target, algorithm, speculative_adaptive=True, **flags) as harness:
            harness.wait_for_draft()
            result = measure(Bench.of(harness), args)
        if not args.without_none:
            for name in ("num_steps", "eagle_topk", "num_draft_tokens", "draft_sampling"):
                del flags[f"speculative_{name}"]
            del flags["speculative_draft_model_path"], flags["speculative_draft_load_format"]
            with running_engine(target, "NONE", **flags) as harness:
                result["none"] = _plain(Meter(harness.engine), args)
        for name in variables:
            del os.environ[name]
    report(result, args)
    return 0


def measure(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Everything of one engine."""
    times: Any = bench.adaptive._times
    result: dict[str, Any] = {
        "grid": bench.grid(args.batch, times.rows, args),
        "transients": [
            bench.transient(
                "load", [(1, 0.5), (max(args.batch), 0.5), (1, 0.5), (8, 0.5)], args.phase
            )
        ],
    }
    for batch in args.batch[::2]:
        result["transients"].append(
            bench.transient(
                f"acceptance, batch {batch}",
                [(batch, 0.9), (batch, 0.1), (batch, 0.9), (batch, 0.3)],
                args.phase,
            )
        )
    result["times"] = {f"{b}x{r}": s * 1e3 for (b, r), s in times.table().items()}
    return result


def _plain(meter: Meter, args: argparse.Namespace) -> dict[int, float]:
    found = {}
    for batch in args.batch:
        meter.resize(batch)
        time.sleep(0.2)
        found[batch] = meter.rate(args.seconds)
        meter.resize(0)
    return found


def report(result: dict[str, Any], args: argparse.Namespace) -> None:
    """Table, JSON and plot."""
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"gpu_adaptive_{args.mode}.json"
    path.write_text(json.dumps({"mode": args.mode, "layers": args.layers, **result}, indent=1))
    print("acceptance is SIMULATED; ratios to plain decoding / to the best of plain and fixed rows")
    print("batch  " + "".join(f"{acceptance:>16}" for acceptance in args.acceptance))
    for batch in args.batch:
        cells = []
        for row in result["grid"]:
            if row["batch"] == batch:
                best = max(row["plain"], *row["fixed"].values())
                cells.append(f"{row['adaptive'] / row['plain']:.3f} / {row['adaptive'] / best:.3f}")
        print(f"{batch:<7}" + "".join(f"{cell:>16}" for cell in cells))
    for batch, rate in result.get("none", {}).items():
        plain = [row["plain"] for row in result["grid"] if row["batch"] == batch]
        ratios = ", ".join(f"{value / rate:.3f}" for value in plain)
        print(
            f"plain in the engine with a draft, of the engine without one, batch {batch}: {ratios}"
        )
    for transient in result["transients"]:
        print(f"{transient['name']}: lowest window of a second {transient['lowest']:.2f} of plain")
    _plot(result, args.out / f"gpu_adaptive_{args.mode}.png")


def _plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    count = len(result["transients"])
    figure, axes = plt.subplots(count, 1, figsize=(8, 2.2 * count), squeeze=False)
    for axis, transient in zip(axes[:, 0], result["transients"], strict=True):
        windows = transient["windows"]
        axis.plot([w["start"] for w in windows], [w["ratio"] for w in windows], ".-")
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.axhline(0.8, color="red", linewidth=0.8)
        for phase in transient["phases"]:
            label = f"batch {phase['batch']}, acceptance {phase['acceptance']}"
            axis.axvline(phase["at"], color="grey", linestyle=":")
            axis.text(phase["at"], axis.get_ylim()[1], label, fontsize=7, va="bottom")
        axis.set_ylabel("of plain, 1 s")
        axis.set_xlabel(f"{transient['name']}: seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
