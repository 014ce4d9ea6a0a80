"""The controller in a model of steps: steady states over batch and acceptance, transients, and the
first requests of a fresh stack.

    python -m benchmarks.adaptive --table benchmarks/step_tables/h200.json --tree 3/1/3 --out benchmarks/results

No model runs and no clock is read: steps take what a table says (3 % noise, a stall now and then),
drafted tokens are right with a given probability, drawn from a seeded generator. Ratios are to
plain decoding and to the best fixed size of trees, none included, both computed. Prints tables,
writes JSON and a plot. With --cold it is the first 24 requests of a fresh stack on two cores
(`testing/cold_start.py`), slow or fast ones, for four drafts, quiet and with rivals for the cores,
with guesses recorded on real texts: tokens/s of plain decoding, and of the better of always
drafting and never.
"""  # noqa: E501

import argparse
import itertools
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.results_folder import results_folder
from testing import cold_start
from testing.policy_simulation import Load, simulate
from testing.step_model import TABLES, StepModel
from testing.step_trace import Trace
from verify_service.controller.controller import Controller
from verify_service.controller.costs import CostModel
from verify_service.controller.messages import DraftKind

BATCHES = (1, 2, 4, 8, 16, 32, 64)
LEAST_COLD = 0.95  # minimum share of the better of always drafting and never
ACCEPTANCES = (0.1, 0.3, 0.5, 0.7, 0.9)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--table", type=Path, default=TABLES / "h200.json", help="step times, see step_tables")
    add("--tree", default="3/1/3", help="steps/topk/nodes of the largest tree")
    add("--batch", nargs="+", type=int, default=list(BATCHES))
    add("--acceptance", nargs="+", type=float, default=list(ACCEPTANCES))
    add("--seconds", type=float, default=12.0, help="of each steady state")
    add("--phase", type=float, default=6.0, help="seconds of each phase of a transient")
    add("--settle", type=float, default=2.0, help="not counted of either, at most half of it")
    add("--answer", type=int, default=0, help="tokens of an answer; 7000 on a GPU, 512 on a CPU")
    add("--first", type=float, default=0.0, help="ms that the first steps of each shape take more")
    add("--seed", type=int, default=0)
    add("--pairs", action="store_true", help="instead: every change of acceptance, a phase each")
    add("--cold", action="store_true", help="instead: the first requests of fresh stacks")
    add("--cores", choices=["slow", "fast"], default="slow", help="the two cores of --cold [slow]")
    # Each recorded text comes first in three; standard errors are then 0.005 or less, mostly.
    add("--stacks", type=int, default=96, help="fresh stacks for each cell of --cold")
    add("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    if min(args.seconds, args.phase) < 1:
        parser.error("--seconds and --phase must be at least 1: speeds are those of whole seconds")
    if args.cold:
        return _cold(args.cores, args.stacks)
    if not re.fullmatch(r"\d+/\d+/\d+", args.tree):
        parser.error(f"--tree {args.tree}: not steps/topk/nodes")
    if not args.table.is_file():
        parser.error(f"--table {args.table}: no such file")
    steps, topk, nodes = map(int, args.tree.split("/"))
    model = StepModel.from_json(args.table, (steps, topk, nodes))
    model = replace(model, first=args.first * 1e-3)
    if args.pairs:
        for batch in args.batch:
            _pairs(model, batch, args)
        return 0
    grid = [_steady(model, batch, p, args) for batch in args.batch for p in args.acceptance]
    transients = [
        _transient(model, "load", [(1, 0.5), (64, 0.5), (1, 0.5), (16, 0.5)], args),
        *(
            _transient(model, f"batch {batch}", [(batch, p) for p in (0.9, 0.1, 0.9, 0.3)], args)
            for batch in (1, 8, 32)
        ),
    ]
    _report(grid, transients, args)
    name = f"adaptive_{model.name}_{args.tree.replace('/', '-')}"
    content = {"table": model.name, "tree": args.tree, "grid": grid, "transients": transients}
    (args.out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    _plot(grid, transients, args, args.out / f"{name}.png")
    return 0


def _run(model: StepModel, loads: list[Load], seconds: float, args: argparse.Namespace) -> Trace:
    kind = DraftKind(model.tree[2], model.tree[0], is_beside=model.is_padded)
    policy = Controller(CostModel(model.times(), 3.36e-8 * model.is_padded), [kind])
    answer = args.answer or (7000 if model.is_padded else 512)
    return simulate(model, policy, loads, seconds, seed=args.seed, answer=answer)


def _steady(
    model: StepModel, batch: int, acceptance: float, args: argparse.Namespace
) -> dict[str, Any]:
    load = Load(0.0, batch, (acceptance, acceptance))
    trace = _run(model, [load], args.seconds, args)
    span = (min(args.settle, args.seconds / 2), args.seconds)
    plain = trace.fixed_rate(*span, 0, acceptance)
    return {
        "batch": batch,
        "acceptance": acceptance,
        "rate": trace.rate(*span),
        "of_plain": trace.of_plain(*span),
        "of_best": trace.of_best(*span, acceptance),
        "whole_tree_of_plain": trace.fixed_rate(*span, model.tree[2], acceptance) / plain,
        "steps_by_rows": dict(Counter(step.rows for step in trace.steps if step.end > span[0])),
    }


def _transient(
    model: StepModel, name: str, phases: list[tuple[int, float]], args: argparse.Namespace
) -> dict[str, Any]:
    loads = [Load(i * args.phase, batch, (p, p)) for i, (batch, p) in enumerate(phases)]
    seconds = args.phase * len(loads)
    trace = _run(model, loads, seconds, args)
    windows, settle = trace.windows(), min(args.settle, args.phase / 2)
    settled = [
        trace.of_best(load.start + settle, load.start + args.phase, load.acceptance[0])
        for load in loads
    ]
    return {
        "name": name,
        "phases": [(load.start, load.batch, load.acceptance[0]) for load in loads],
        "lowest_window": min(ratio for _, ratio in windows),
        "settled_from": settle,
        "of_best_when_settled": settled,
        "windows": windows,
    }


def _pairs(model: StepModel, batch: int, args: argparse.Namespace) -> None:
    """Prints the share of the best size's rate that is reached from two seconds after each
    change on.
    """
    values = sorted(args.acceptance)
    walk = values[:1]
    for i, low in enumerate(values):
        for high in values[i + 1 :]:
            walk += [low, high] if walk[-1] != low else [high]
    loads = [Load(i * args.phase, batch, (p, p)) for i, p in enumerate([*walk, *walk[-2::-1]])]
    trace = _run(model, loads, args.phase * len(loads), args)
    found: dict[tuple[float, float], float] = {}
    for before, after in itertools.pairwise(loads):
        pair = before.acceptance[0], after.acceptance[0]
        span = after.start + 2, after.start + args.phase
        found[pair] = min(found.get(pair, 2.0), trace.of_best(*span, pair[1]))
    for new in values:
        cells = [f"{old}: {found[old, new]:.2f}" for old in values if (old, new) in found]
        print(f"batch {batch}, to {new} from " + ", ".join(cells))
    print(f"batch {batch}: lowest second {min(ratio for _, ratio in trace.windows()):.2f} of plain")


def _cold(cores: str, num_stacks: int) -> int:
    """Prints the speed of the first requests; returns 1 where a cell misses the bar."""
    print("| draft | batch | temperature | always, of plain | default, of plain | of the better |")
    print("| --- | --- | --- | --- | --- | --- |")
    lowest, latest = 2.0, 0
    for draft, has_rivals, batch, is_sampled in itertools.product(
        cold_start.FAST_DRAFTS if cores == "fast" else cold_start.DRAFTS,
        (False, True),
        (1, 4),
        (False, True),
    ):
        served = {
            arm: [
                cold_start.serve(draft, batch, is_sampled, has_rivals, arm, seed)
                for seed in range(num_stacks)
            ]
            for arm in cold_start.ARMS
        }
        rates = {arm: sum(one.rate for one in ones) for arm, ones in served.items()}
        of_better = rates["default"] / max(rates["never"], rates["always"])
        lowest = min(lowest, of_better)
        latest = max(latest, *(one.first for one in served["default"]))
        name = f"{draft.name}, rivals" if has_rivals else draft.name
        always, default = (rates[arm] / rates["never"] for arm in ("always", "default"))
        print(
            f"| {name} | {batch} | {int(is_sampled)} | {always:.2f} | {default:.2f} |"
            f" {of_better:.3f} |",
            flush=True,
        )
    print(f"lowest: {lowest:.3f}; the first request drafts in its step {latest} at the latest")
    return int(lowest < LEAST_COLD)


def _report(
    grid: list[dict[str, Any]], transients: list[dict[str, Any]], args: argparse.Namespace
) -> None:
    print("tokens/s of plain decoding / of the best fixed size / (the whole tree always, of plain)")
    print("| batch | " + " | ".join(f"acceptance {p}" for p in args.acceptance) + " |")
    print("| --- |" + " --- |" * len(args.acceptance))
    for batch in args.batch:
        cells = [
            f"{row['of_plain']:.2f} / {row['of_best']:.2f} ({row['whole_tree_of_plain']:.2f})"
            for row in grid
            if row["batch"] == batch
        ]
        print(f"| {batch} | " + " | ".join(cells) + " |")
    print(
        f"lowest: {min(row['of_plain'] for row in grid):.3f} of plain, "
        f"{min(row['of_best'] for row in grid):.3f} of the best"
    )
    settle = transients[0]["settled_from"]
    print(
        f"\n| change | lowest second, of plain | of the best from {settle:g} s after each change |"
    )
    print("| --- | --- | --- |")
    for transient in transients:
        after = ", ".join(f"{ratio:.2f}" for ratio in transient["of_best_when_settled"])
        print(f"| {transient['name']} | {transient['lowest_window']:.2f} | {after} |")


def _plot(
    grid: list[dict[str, Any]],
    transients: list[dict[str, Any]],
    args: argparse.Namespace,
    path: Path,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1 + len(transients), 1, figsize=(8, 2.4 * len(transients) + 3))
    for acceptance in args.acceptance:
        rows = [row for row in grid if row["acceptance"] == acceptance]
        batches = [row["batch"] for row in rows]
        (line,) = axes[0].plot(
            batches, [row["of_plain"] for row in rows], "o-", label=f"{acceptance}"
        )
        whole = [row["whole_tree_of_plain"] for row in rows]
        axes[0].plot(batches, whole, ":", color=line.get_color())
    axes[0].axhline(1.0, color="grey", linewidth=0.8)
    axes[0].set_xscale("log", base=2)
    axes[0].set_xlabel("batch; dotted: always the whole tree")
    axes[0].set_ylabel("of plain decoding")
    axes[0].legend(title="acceptance", fontsize=7)
    for axis, transient in zip(axes[1:], transients, strict=True):
        axis.plot(*zip(*transient["windows"], strict=True))
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.axhline(0.8, color="red", linewidth=0.8)
        for start, batch, acceptance in transient["phases"]:
            axis.axvline(start, color="grey", linestyle=":")
            axis.text(
                start, axis.get_ylim()[1], f"batch {batch}, {acceptance}", fontsize=7, va="bottom"
            )
        axis.set_ylabel("of plain, 1 s")
        axis.set_xlabel(f"{transient['name']}: start of the second")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    print(f"wrote {path} and {path.with_suffix('.json')}")


if __name__ == "__main__":
    sys.exit(main())
