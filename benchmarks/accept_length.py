"""Accept length by algorithm on the bundled family: tokens per verification, the target's own
included.

    python -m benchmarks.accept_length --out benchmarks/results

For each draft, tree, order of children, temperature and batch size: 48 tokens after each of 32
prompts of up to 200 tokens (`accept_length_prompts.json`: pieces of Python files and pages of this
repository, which the family was not trained on), the whole tree verified in each step. These are
counts, not times, so that a busy machine gives the same. What is in the results already, for the
same prompts, is not run again: a stopped run goes on where it was, and a run of some --drafts adds
to them. The table goes to the page between its markers, if --page is given.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.real_prompts import real_prompts
from benchmarks.results_folder import results_folder
from foredraft.models.registry import resolve_model_path
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams
from testing.engines import Harness, Job, accept_length, running_engine

ROOT = Path(__file__).parents[1]
TREES = {"chain 5": (5, 1, 6), "tree 5/4/8": (5, 4, 8)}
BLOCK = {"block 8": (8, 1, 9)}
HEADS = {
    "EAGLE": "eagle",
    "EAGLE3": "eagle3",
    "MTP": "mtp",
    "STANDALONE": "draft",
    "DSPARK": "dspark",
}
WITHOUT_MAP = ("EAGLE3", "DSPARK")  # EAGLE-3 has a map of its own
TEMPERATURES, BATCHES, TOKENS = (0.0, 1.0), (1, 8, 32), 48
MARKERS = "<!-- accept length: begin -->", "<!-- accept length: end -->"
TITLES = {"EAGLE": "EAGLE-2", "EAGLE3": "EAGLE-3", "DSPARK": "DSpark"}


@dataclass(frozen=True, slots=True)
class Case:
    """A draft as it is served, and the batch sizes that it is measured with."""

    draft: str
    tree: str
    order: str
    flags: dict[str, Any] = field(default_factory=dict)
    batches: tuple[int, ...] = BATCHES

    @property
    def name(self) -> str:
        """Key of its results."""
        return f"{self.draft}, {self.tree}, {self.order}"

    @property
    def algorithm(self) -> str:
        """Value of the flag --speculative-algorithm."""
        return self.draft.split(" ")[0]


def cases() -> Iterator[Case]:
    """Returns all cases that are measured."""
    yield Case("NGRAM", "12 rows", "-", {"speculative_ngram_scope": "request"})
    for draft, folder in HEADS.items():
        trees = TREES | BLOCK if draft == "DSPARK" else TREES
        for tree, (steps, topk, rows) in trees.items():
            for order in ("coupled", "topk"):
                flags = {
                    "speculative_draft_model_path": str(ROOT / "models" / f"foredraft-demo-{folder}"),  # noqa: E501
                    "speculative_num_steps": steps,
                    "speculative_eagle_topk": topk,
                    "speculative_num_draft_tokens": rows,
                    "speculative_draft_sampling": order,
                }  # fmt: skip
                yield Case(draft, tree, order, flags)
                if draft not in WITHOUT_MAP and order == "coupled":
                    flags = {**flags, "speculative_token_map": "foredraft-demo-token-map"}
                    yield Case(f"{draft} with token map", tree, order, flags, BATCHES[1:2])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--drafts", nargs="+", choices=("NGRAM", *HEADS), help="default: all")
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    parser.add_argument("--page", type=Path, help="page to write the table to")
    parser.add_argument("--max-minutes", type=float, default=60.0, help="stop after so long")
    args = parser.parse_args()
    target = resolve_model_path("foredraft-demo")
    prompts = real_prompts(Tokenizer.from_dir(target))
    results = Results(args.out / "accept_length.json", prompts)
    ends = time.monotonic() + 60 * args.max_minutes
    # One batch size of everything first: the others are to show that they give the same.
    for batches in (BATCHES[1:2], BATCHES):
        for case in cases():
            wanted = [batch for batch in case.batches if batch in batches]
            if (args.drafts and case.algorithm not in args.drafts) or not results.lacks(
                case, wanted
            ):
                continue
            if time.monotonic() > ends:
                print("stopped by --max-minutes; the same command goes on")
                return 1
            _measure(target, case, wanted, prompts, results)
    table = _table(results)
    print(table)
    _plot(results, args.out / "accept_length.png")
    if args.page:
        text = args.page.read_text()
        before, after = text.split(MARKERS[0])[0], text.split(MARKERS[1])[1]
        args.page.write_text(f"{before}{MARKERS[0]}\n\n{table}\n{MARKERS[1]}{after}")
    return 0


class Results:
    """Accept lengths by case, temperature and batch, kept in a file."""

    def __init__(self, file: Path, prompts: Sequence[Sequence[int]]) -> None:
        self._file = file
        digest = hashlib.sha256(json.dumps([list(p) for p in prompts]).encode()).hexdigest()[:16]
        kept = json.loads(file.read_text()) if file.is_file() else {}
        if not isinstance(kept, dict) or kept.get("prompts") != digest:
            kept = {"prompts": digest, "tokens": TOKENS, "accept_length": {}}
        self._kept = kept

    def lacks(self, case: Case, batches: Sequence[int]) -> bool:
        """Returns whether some result of the case is still to be measured."""
        return any(
            self.get(case, temperature, batch) is None
            for temperature in TEMPERATURES
            for batch in batches
        )

    def get(self, case: Case, temperature: float, batch: int) -> float | None:
        """Returns a result; None where it is not known."""
        value = (
            self._kept["accept_length"].get(case.name, {}).get(f"T={temperature}, batch {batch}")
        )
        return None if value is None else float(value)

    def set(self, case: Case, temperature: float, batch: int, length: float) -> None:
        """Stores a result."""
        of_case = self._kept["accept_length"].setdefault(case.name, {})
        of_case[f"T={temperature}, batch {batch}"] = round(length, 4)
        self._file.write_text(json.dumps(self._kept, indent=1) + "\n")


def _measure(
    target: Path,
    case: Case,
    batches: Sequence[int],
    prompts: list[list[int]],
    results: Results,
) -> None:
    settings = {
        "page_size": 32,
        "max_total_tokens": 32768,
        "draft_step_timeout": 60.0,
        "draft_wait": 120.0,
        **case.flags,
    }
    with running_engine(target, case.algorithm, **settings) as harness:
        for temperature in TEMPERATURES:
            for batch in batches:
                if results.get(case, temperature, batch) is not None:
                    continue
                length = _accept_length(harness, prompts, temperature, batch)
                results.set(case, temperature, batch, length)
                print(f"{case.name}, T={temperature}, batch {batch}: {length:.3f}", flush=True)


def _accept_length(
    harness: Harness, prompts: list[list[int]], temperature: float, batch: int
) -> float:
    jobs = [
        Job(prompt, SamplingParams(temperature=temperature, seed=seed, max_new_tokens=TOKENS, ignore_eos=True))  # noqa: E501
        for seed, prompt in enumerate(prompts)
    ]  # fmt: skip
    batches = (jobs[first : first + batch] for first in range(0, len(jobs), batch))
    return accept_length([result for some in batches for result in harness.run(some, timeout=600)])


def _table(results: Results) -> str:
    """Returns the table in Markdown; the last column shows how much the batch sizes differ."""
    lines = [
        (
            "| draft | tree | T = 0, topk | T = 0, coupled | T = 1, topk | T = 1, coupled | batch"
            " 1, 8, 32 differ by |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows: dict[tuple[str, str], dict[str, Case]] = {}
    for case in cases():
        rows.setdefault((case.draft, case.tree), {})[case.order] = case
    for (draft, tree), orders in rows.items():
        cells, spread = [], []
        for temperature in TEMPERATURES:
            for order in ("topk", "coupled"):
                shown = orders.get(order) or orders.get("-")
                value = results.get(shown, temperature, 8) if shown else None
                cells.append("" if value is None else f"{value:.2f}")
        for case in orders.values():
            for temperature in TEMPERATURES:
                found = [results.get(case, temperature, batch) for batch in BATCHES]
                values = [value for value in found if value is not None]
                if len(values) > 1:
                    spread.append(max(values) / min(values) - 1)
        differ = f"{max(spread):.1%}" if spread else ""
        title = TITLES.get(draft.split(" ")[0], draft.split(" ")[0])
        title += draft[len(draft.split(" ")[0]) :]
        lines.append(f"| {title} | {tree} | {' | '.join(cells)} | {differ} |")
    return "\n".join(lines) + "\n"


def _plot(results: Results, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [case for case in cases() if case.order != "topk" and len(case.batches) > 1]
    figure, axes = pyplot.subplots(figsize=(9, 4))
    for i, temperature in enumerate(TEMPERATURES):
        values = [results.get(case, temperature, 8) or 0 for case in shown]
        axes.bar(
            [x + 0.4 * i for x in range(len(shown))], values, 0.38, label=f"T = {temperature:g}"
        )
    axes.set_xticks([x + 0.2 for x in range(len(shown))])
    names = [f"{TITLES.get(case.draft, case.draft)}\n{case.tree}" for case in shown]
    axes.set_xticklabels(names, fontsize=7)
    axes.set_ylabel("tokens per verify, batch 8")
    axes.set_title("Accept length on the bundled family, coupled drafting")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
