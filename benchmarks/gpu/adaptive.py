"""Adaptive speculation on one GPU: steady states over batch and acceptance, and transients, beside
plain and fixed trees.

    python -m benchmarks.gpu.adaptive --mode chain --batch 1 8 32 64 --mps

8B shape with random weights, as in `benchmarks.gpu.decode`; whether a drafted token is right is
SIMULATED, with the same probability at each depth. All settings run in one engine on the same
sequences. Since steps become slower as answers become longer, each setting is compared with what
steps of fixed sizes took at the same context length. Prints tables, writes JSON and a plot.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.needed import need_gpu
from benchmarks.gpu.shapes import MODES, flags_of, write_checkpoints
from benchmarks.gpu.step_costs import (
    LONGEST,
    SETTLE_STEPS,
    Costs,
    Meter,
    mean_tokens,
    rate_of,
)
from benchmarks.results_folder import results_folder
from foredraft.cli import mps
from testing.engine_steps import Step
from testing.engines import Harness, running_engine
from verify_service.controller.controller import Controller
from verify_service.controller.messages import Candidate, DraftKind, Plan
from verify_service.engine.engine import Engine
from verify_service.executor.choice.simulation import SimulatedAcceptance

ACCEPTANCES = (0.1, 0.3, 0.5, 0.7, 0.9)
POOL_TOKENS = 4000  # room for each sequence
ENOUGH_STEPS, LONGEST_FIXED = (
    SETTLE_STEPS + 4,
    1.5,
)  # of a fixed size, and seconds that these may take
LONG = LONGEST / 2  # tokens of sequences that others take the place of between two changes
BAD = 0.8  # share of the best fixed size's rate; sizes that were worse are not timed again


class FixedRows(Controller):
    """Verifies the same number of rows for every sequence in every step; with one row, the
    draft is sent nothing.
    """

    def __init__(self, rows: int) -> None:
        super().__init__(None, [DraftKind(max(rows - 1, 1), 1)])
        self._fixed, self.is_drafting = rows, [rows > 1]

    def plan(
        self, candidates: Sequence[Candidate], other_rows: int = 0, is_ahead: bool = False
    ) -> Plan:
        """See Controller."""
        return Plan([min(one.limits[0], self._fixed - 1) for one in candidates], self._fixed)


@dataclass(slots=True)
class Bench:
    """An engine with simulated acceptance whose policy can be exchanged.

    Attributes:
        adaptive: Policy that the engine was made with.
        depth: Depth of the largest tree.
    """

    engine: Engine
    adaptive: Controller
    meter: Meter
    depth: int
    costs: Costs = field(default_factory=Costs)
    num_cells: int = 0

    @classmethod
    def of(cls, harness: Harness) -> "Bench":
        """Creates the bench of a running engine."""
        engine = harness.engine
        return cls(
            engine,
            engine._sizes.controller,
            Meter(engine),
            engine._sizes.controller.drafts[0].depth,
        )

    def use(self, policy: Controller, acceptance: float) -> None:
        """Exchanges the policy between two steps."""
        self.engine._inbox.put(lambda: setattr(self.engine._sizes._decider, "controller", policy))
        _simulated(self.engine).acceptance = acceptance

    def run(self, policy: Controller, acceptance: float, seconds: float) -> list[Step]:
        """Runs steps for some seconds under a policy; returns the steps."""
        self.use(policy, acceptance)
        return self.meter.during(seconds)

    def cell(
        self, batch: int, acceptance: float, rows: Sequence[int], args: argparse.Namespace
    ) -> dict[str, Any]:
        """Measures one steady state.

        Fixed sizes are timed before it or after it, plain decoding before and after.
        """
        self.meter.resize(0)
        self.meter.resize(batch)
        # Alternately before and after, so that fits cover short and long contexts.
        is_odd = bool(self.num_cells % 2)
        for size in (1,) if is_odd else rows:
            self.fixed(batch, size, acceptance, args.fixed)
        self.run(self.adaptive, acceptance, args.settle)
        steps = self.run(self.adaptive, acceptance, args.seconds)
        for size in rows if is_odd else (1,):
            self.fixed(batch, size, acceptance, args.fixed)
        self.num_cells += 1
        return {"batch": batch, "acceptance": acceptance, "steps": steps}

    def fixed(self, batch: int, rows: int, acceptance: float, seconds: float) -> None:
        """Times steps of one size."""
        self.costs.add(batch, rows, self.steps_of(rows, acceptance, seconds))

    def steps_of(self, rows: int, acceptance: float, seconds: float) -> list[Step]:
        """Returns steps of one size, enough of them and over some seconds."""
        steps = self.run(FixedRows(rows), acceptance, seconds)
        while len(steps) < ENOUGH_STEPS and sum(step.seconds for step in steps) < LONGEST_FIXED:
            steps += self.meter.during(seconds)
        return steps

    def transient(
        self, name: str, phases: Sequence[tuple[int, float]], seconds: float, timed: float
    ) -> dict[str, Any]:
        """Runs phases of (batch, acceptance), `seconds` each.

        Returns the speed over plain decoding in every window of a second.

        Behind each phase fixed sizes are timed, `timed` seconds each, since sequences of uneven
        length take longer.
        """
        self.meter.resize(0)
        self.meter.resize(phases[0][0])
        self.run(self.adaptive, phases[0][1], 1.0)
        steps: list[Step] = []
        changes, slower, after, left_out = [], {}, [], 0.0
        started = self.meter.log.clock
        for batch, acceptance in phases:
            self.use(self.adaptive, acceptance)
            at = self.meter.log.clock - started - left_out
            changes.append({"at": at, "batch": batch, "acceptance": acceptance})
            first = len(self.meter.log.steps)
            self.meter.resize(batch)
            self.meter.during(seconds)
            before = self.meter.log.clock
            own = [
                step._replace(end=step.end - started - left_out) for step in self.meter.since(first)
            ]
            steps += own
            late = [step for step in own if step.end > at + 2 and step.batch == batch]
            rates, slower[batch] = self.rates_here(late, acceptance, timed)
            after.append(self.mean_rate(late, acceptance) / max(rates.values()))
            if self.meter.log.steps[-1].context > LONG * batch:  # an answer might end
                self.meter.resize(0)
                self.meter.resize(batch)
            self.run(self.adaptive, acceptance, 0.5)
            left_out += self.meter.log.clock - before
        windows = self.costs.windows(steps, slower)
        lowest = min(ratio for _, ratio in windows)
        print(f"{name}: lowest window {lowest:.2f} of plain", flush=True)
        return {
            "name": name, "phases": changes, "windows": windows, "lowest": lowest, "of_best_after_2_seconds": after  # noqa: E501
        }  # fmt: skip

    def rates_here(
        self, late: Sequence[Step], acceptance: float, timed: float
    ) -> tuple[dict[int, float], float]:
        """Returns tokens per second of fixed sizes with the present sequences.

        Also returns how much slower plain steps are than with sequences of equal length.
        """
        known, batch = self.rates(late, acceptance), late[0].batch
        found = {}
        for size in sorted(known, reverse=True):
            if size == 1 or known[size] > BAD * max(known.values()):
                steps = self.steps_of(size, acceptance, timed)[SETTLE_STEPS:]
                seconds = statistics.median(step.seconds for step in steps if step.rows == size)
                found[size] = batch * mean_tokens(size, self.depth, acceptance) / seconds
        plain = self.costs.line(batch, 1).seconds(steps[-1].context)
        return found, seconds / plain

    def rates(self, steps: Sequence[Step], acceptance: float) -> dict[int, float]:
        """Returns tokens per second of every fixed size."""
        rows = self.adaptive._costs.table.rows(steps[0].batch)  # type: ignore[union-attr]
        return {
            size: self.costs.rate(steps, size, mean_tokens(size, self.depth, acceptance))
            for size in rows
            if self.costs.knows(steps[0].batch, size)  # so slow that no step ended in time
        }

    def mean_rate(self, steps: Sequence[Step], acceptance: float) -> float:
        """Returns tokens per second if every step gave the mean tokens of its size; chance
        would change a second by several percent.
        """
        return rate_of(steps, lambda s: s.batch * mean_tokens(s.rows, self.depth, acceptance))

    def ratios(self, cell: dict[str, Any]) -> dict[str, Any]:
        """Returns the figures of a cell, once all sizes were timed."""
        steps, batch, acceptance = cell["steps"], cell["batch"], cell["acceptance"]
        rates = self.rates(steps, acceptance)
        rate = self.mean_rate(steps, acceptance)
        return {
            "batch": batch,
            "acceptance": acceptance,
            "rate": rate,
            "as_drawn": rate_of(steps, lambda step: step.tokens),
            "of_plain": rate / rates[1],
            "of_best": rate / max(rates.values()),
            "fixed": rates,
            "context": steps[-1].context / batch,
            "steps_by_rows": dict(Counter(step.rows for step in steps)),
            "slowest_ms": [round(s.seconds * 1e3, 1) for s in sorted(steps, key=by_seconds)[-4:]],
        }


def _simulated(engine: Engine) -> SimulatedAcceptance:
    target: Any = engine._executor
    found: SimulatedAcceptance = getattr(target, "_simulated", None) or target._sampler._simulated
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--mode", default="chain", choices=[mode for mode in MODES if mode != "none"])
    add("--batch", nargs="+", type=int, default=[1, 8, 32, 64])
    add("--acceptance", nargs="+", type=float, default=list(ACCEPTANCES))
    add("--seconds", type=float, default=1.5, help="measured of a steady state")
    add("--settle", type=float, default=1.3, help="before that")
    add(
        "--fixed",
        type=float,
        default=0.15,
        help="seconds that every fixed size is timed for, each time",
    )
    add("--no-transients", action="store_true", help="steady states alone")
    add("--phase", type=float, default=3.0, help="seconds of each phase of a transient")
    add("--layers", type=int, default=32, help="fewer for debugging")
    add("--mps", action="store_true", help="run under a private MPS daemon")
    add("--none", action="store_true", help="also time plain decoding in an engine without a draft")
    add(
        "--steps",
        type=Path,
        help="file for all steps: kind, end, seconds, batch, rows, ... as JSON",
    )
    add("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    need_gpu()
    most = max(args.batch)
    result: dict[str, Any] = {
        "mode": args.mode,
        "layers": args.layers,
        "grid": [],
        "transients": [],
    }
    with tempfile.TemporaryDirectory() as folder, mps.running(args.mps) as variables:
        os.environ.update(variables)
        target, head = write_checkpoints(Path(folder), args.layers)
        algorithm, flags = flags_of(args.mode, head, most, POOL_TOKENS)
        flags |= {"context_length": 8192, "simulate_accept_length": 1.0}
        try:
            with running_engine(target, algorithm, speculative_adaptive=True, **flags) as harness:
                measure(Bench.of(harness), args, result)
            if args.none:
                _, flags = flags_of("none", head, most, POOL_TOKENS)
                flags["context_length"] = 8192
                with running_engine(target, "NONE", **flags) as harness:
                    measure_none(Meter(harness.engine), args, result)
        finally:  # keep the measurements made so far
            report(result, args)
        for name in variables:
            del os.environ[name]
    return 0


def measure(bench: Bench, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measures everything of one engine, and writes it into `result` as it comes."""
    times: Any = bench.adaptive._costs.table
    gc.collect()
    gc.freeze()  # as the service does
    result["measured_at_start_ms"] = {f"{b}x{r}": s * 1e3 for (b, r), s in times.measured.items()}
    for batch in args.batch:  # warms up
        bench.meter.resize(batch)
        for size in (1, times.rows(batch)[-1], 1, times.rows(batch)[-1]):
            bench.fixed(batch, size, 0.5, 0.15)
    bench.costs = Costs()
    for batch in args.batch:
        cells = [
            bench.cell(batch, acceptance, times.rows(batch), args) for acceptance in args.acceptance
        ]
        for cell in cells:
            if not cell["steps"]:
                print(f"batch {batch}, acceptance {cell['acceptance']}: no step ended in time")
                continue
            row = bench.ratios(cell)
            result["grid"].append(row)
            print(json.dumps(row), flush=True)
        result.setdefault("lines_ms", {}).update(
            {
                f"{batch}x{rows}": [line.base * 1e3, line.slope * 1e3]
                for rows in times.rows(batch)
                if bench.costs.knows(batch, rows) and (line := bench.costs.line(batch, rows))
            }
        )
    if not args.no_transients:
        _transients(bench, args, result)
    bench.meter.resize(0)
    if args.steps:
        lines = (json.dumps(step._asdict()) for step in bench.meter.log.steps)
        args.steps.write_text("\n".join(lines) + "\n")


def _transients(bench: Bench, args: argparse.Namespace, result: dict[str, Any]) -> None:
    small, second, most = args.batch[0], args.batch[min(1, len(args.batch) - 1)], args.batch[-1]
    load = [(small, 0.5), (most, 0.5), (small, 0.5), (second, 0.5)]
    result["transients"].append(bench.transient("load", load, args.phase, args.fixed))
    for batch in args.batch[::2]:
        phases = [(batch, acceptance) for acceptance in (0.9, 0.1, 0.9, 0.3)]
        name = f"acceptance, batch {batch}"
        result["transients"].append(bench.transient(name, phases, args.phase, args.fixed))


def by_seconds(step: Step) -> float:
    """Sort key that finds the longest steps."""
    return step.seconds


def measure_none(meter: Meter, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Plain decoding without a draft, as milliseconds of a step, and of a plain step beside a
    draft.
    """
    costs = Costs()
    for batch in args.batch:
        meter.resize(0)
        meter.resize(batch)
        steps = meter.during(args.seconds)
        costs.add(batch, 1, steps)
        context = steps[-1].context
        base, slope = result["lines_ms"][f"{batch}x1"]
        pair = (costs.line(batch, 1).seconds(context) * 1e3, base + slope * context)
        result.setdefault("none_ms", {})[batch] = pair
    meter.resize(0)


def report(result: dict[str, Any], args: argparse.Namespace) -> None:
    """Table, JSON and plot."""
    path = args.out / f"gpu_adaptive_{args.mode}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(
        "acceptance is SIMULATED; ratios to plain decoding / to the best of plain and fixed sizes"
    )
    print("| batch | " + " | ".join(f"acceptance {one}" for one in args.acceptance) + " |")
    print("| --- |" + " --- |" * len(args.acceptance))
    for batch in args.batch:
        rows = [row for row in result["grid"] if row["batch"] == batch]
        cells = [f"{row['of_plain']:.2f} / {row['of_best']:.2f}" for row in rows]
        print(f"| {batch} | " + " | ".join(cells) + " |")
    if result["grid"]:
        lowest = [min(row[key] for row in result["grid"]) for key in ("of_plain", "of_best")]
        print(f"lowest: {lowest[0]:.3f} of plain, {lowest[1]:.3f} of the best")
    for batch, (alone, beside) in result.get("none_ms", {}).items():
        print(
            f"plain step, batch {batch}: {alone:.3f} ms without a draft, {beside:.3f} ms beside one"
        )
    for transient in result["transients"]:
        after = ", ".join(f"{ratio:.2f}" for ratio in transient["of_best_after_2_seconds"])
        print(
            f"{transient['name']}: lowest window of a second {transient['lowest']:.2f} of plain; "
            f"from 2 s after each change on {after} of the best"
        )
    if result["transients"]:
        _plot(result, args.out / f"gpu_adaptive_{args.mode}.png")


def _plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    count = 1 + len(result["transients"])
    figure, axes = plt.subplots(count, 1, figsize=(8, 2.4 * count))
    for acceptance in sorted({row["acceptance"] for row in result["grid"]}):
        rows = [row for row in result["grid"] if row["acceptance"] == acceptance]
        batches = [row["batch"] for row in rows]
        (line,) = axes[0].plot(
            batches, [row["of_plain"] for row in rows], "o-", label=f"{acceptance}"
        )
        whole = [list(row["fixed"].values())[-1] / row["fixed"][1] for row in rows]
        axes[0].plot(batches, whole, ":", color=line.get_color())
    axes[0].axhline(1.0, color="grey", linewidth=0.8)
    axes[0].set_xscale("log", base=2)
    axes[0].set_xlabel("batch; dotted: always the whole tree")
    axes[0].set_ylabel("of plain decoding")
    axes[0].legend(title="acceptance", fontsize=7)
    for axis, transient in zip(axes[1:], result["transients"], strict=True):
        axis.plot(*zip(*transient["windows"], strict=True))
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.axhline(0.8, color="red", linewidth=0.8)
        for phase in transient["phases"]:
            label = f"batch {phase['batch']}, {phase['acceptance']}"
            axis.axvline(phase["at"], color="grey", linestyle=":")
            axis.text(phase["at"], axis.get_ylim()[1], label, fontsize=7, va="bottom")
        axis.set_ylabel("of plain, 1 s")
        axis.set_xlabel(f"{transient['name']}: start of the second")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    sys.exit(main())
