"""Accept length of the bundled family's drafts on sets of prompts, at equal draft cost and at equal
depth.

    python -m benchmarks.accept_length_sets --prompts gsm8k.jsonl mt_bench.jsonl --out results

A set is a file of JSON lines with `turns`, as the question files that papers on drafts evaluate on:
the first turn of each is put as a user's message of the bundled model's chat. "held-out" is the
prompts of `benchmarks.accept_length`. The cost of a proposal is the number of weights that are read
for it: what a draft takes where memory is the bound. A chain "of equal cost" has as many levels as
come nearest to --cost, whose default is the one forward of a DSpark block of two layers of the
bundled model's width; a block drafter proposes its whole block. Counts, not times: a busy machine
gives the same. What is in the results for the same prompts is not run again.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from benchmarks.real_prompts import first_turns, real_prompts, seeded_jobs
from benchmarks.results_folder import results_folder
from foredraft.models.head_config import HeadConfig
from foredraft.models.registry import BUNDLED_DRAFTS, resolve_model_path
from foredraft.text.tokenizer import Tokenizer
from testing.engines import Harness, accept_length, running_engine

BLOCKS = ("DSPARK", "DFLASH", "PEAGLE")
TEMPERATURES = (0.0, 1.0)
DEPTH, TOPK, ROWS = 5, 4, 8  # of the chain and the tree of equal depth
# Tensors that are read by row, or for committed tokens alone.
NOT_READ = ("embed_tokens", "markov_w1", "confidence_head")
FUSING = "fc."  # prefix of the projection in all drafts that fuse several streams of the target
HELD_OUT = "held-out"


@dataclass(frozen=True, slots=True)
class Case:
    """A draft, of the algorithm `draft`, and the tree that is verified."""

    draft: str
    path: Path
    tree: str
    steps: int
    topk: int
    rows: int

    @property
    def name(self) -> str:
        """Key of its results."""
        return f"{self.draft}, {self.tree}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help=".jsonl with `turns`")
    parser.add_argument("--each", type=int, default=16, help="prompts of each set [16]")
    parser.add_argument("--tokens", type=int, default=32, help="written after each [32]")
    parser.add_argument(
        "--drafts",
        nargs="+",
        default=list(BUNDLED_DRAFTS),
        help="algorithms of the bundled family, or ALGORITHM=PATH of other heads [the family's]",
    )
    parser.add_argument("--cost", type=float, default=5.2, help="weights read, in millions [5.2]")
    parser.add_argument("--trees", nargs="+", choices=("cost", "chain", "tree"))
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    parser.add_argument("--max-minutes", type=float, default=60.0, help="stop after so long")
    args = parser.parse_args()
    target = resolve_model_path("foredraft-demo")
    sets = prompt_sets(target, args.prompts, args.each)
    file = args.out / "accept_length_sets.json"
    results = json.loads(file.read_text()) if file.is_file() else {}
    ends = time.monotonic() + 60 * args.max_minutes
    found = cases(target, args.drafts, args.cost)
    wanted = [case for case in found if _is_wanted(case, args.trees)]
    for case in wanted:
        lacking = [
            (key, prompts, temperature)
            for name, prompts in sets.items()
            for temperature in TEMPERATURES
            if (key := _key(case, name, prompts, temperature, args.tokens)) not in results
        ]
        if lacking and time.monotonic() > ends:
            print("stopped by --max-minutes; the same command goes on")
            return 1
        if not lacking:
            continue
        with _engine(target, case) as harness:
            for key, prompts, temperature in lacking:
                results[key] = round(_measure(harness, prompts, temperature, args.tokens), 4)
                print(f"{key}: {results[key]:.3f}", flush=True)
                file.write_text(json.dumps(results, indent=1) + "\n")
    print(_table(target, wanted, sets, results, args.tokens))
    return 0


def prompt_sets(target: Path, files: list[Path], each: int) -> dict[str, list[list[int]]]:
    """Token ids of the prompts of each set."""
    tokenizer = Tokenizer.from_dir(target)
    sets = {HELD_OUT: real_prompts(tokenizer)[: 2 * each : 2]}
    for file in files:
        turns = first_turns(file, each)
        sets[file.stem] = [tokenizer.encode(f"User: {turn}\nAssistant:") for turn in turns]
    return sets


def cases(target: Path, drafts: list[str], cost: float) -> Iterator[Case]:
    """All that is measured of some drafts."""
    for name in drafts:
        draft, _, given = name.partition("=")
        path = resolve_model_path(given or BUNDLED_DRAFTS[draft])
        if draft in BLOCKS:
            steps = HeadConfig.from_dir(path, draft).num_drafted or DEPTH  # type: ignore[arg-type]
        else:
            steps = max(1, round(cost / proposal_cost(target, draft, path, 1)))
        yield Case(draft, path, "chain of equal cost", steps, 1, steps + 1)
        yield Case(draft, path, f"chain {DEPTH}", DEPTH, 1, DEPTH + 1)
        yield Case(draft, path, f"tree {DEPTH}/{TOPK}/{ROWS}", DEPTH, TOPK, ROWS)


def proposal_cost(target: Path, draft: str, path: Path, steps: int) -> float:
    """Weights read for a proposal of some levels, in millions."""
    num_weights, has_head = 0, draft == "STANDALONE"
    not_read = (*NOT_READ, FUSING) if draft in (*BLOCKS, "EAGLE3") else NOT_READ
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                shape = tensors.get_slice(name).get_shape()
                has_head |= "lm_head" in name
                is_read = draft == "STANDALONE" or not any(part in name for part in not_read)
                if len(shape) == 2 and is_read:
                    num_weights += shape[0] * shape[1]
    if not has_head:  # the target's
        config = json.loads((target / "config.json").read_text())
        num_weights += config["vocab_size"] * config["hidden_size"]
    return num_weights * (1 if draft in BLOCKS else steps) / 1e6


def _is_wanted(case: Case, trees: list[str] | None) -> bool:
    kind = "cost" if "cost" in case.tree else case.tree.split()[0]
    return not trees or kind in trees


def _engine(target: Path, case: Case) -> AbstractContextManager[Harness]:
    return running_engine(
        target,
        case.draft,
        page_size=32,
        max_total_tokens=16384,
        draft_step_timeout=60.0,
        draft_wait=120.0,
        speculative_draft_model_path=str(case.path),
        speculative_num_steps=case.steps,
        speculative_eagle_topk=case.topk,
        speculative_num_draft_tokens=case.rows,
    )


def _measure(harness: Harness, prompts: list[list[int]], temperature: float, tokens: int) -> float:
    jobs = seeded_jobs(prompts, temperature, tokens)
    return accept_length(harness.run(jobs, timeout=600))


def _key(case: Case, name: str, prompts: list[list[int]], temperature: float, tokens: int) -> str:
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:8]
    return f"{case.name} ({case.steps}), {name} {digest}, {tokens} tokens, T={temperature:g}"


def _table(
    target: Path,
    wanted: list[Case],
    sets: dict[str, list[list[int]]],
    results: dict[str, float],
    tokens: int,
) -> str:
    head = ["draft", "verified", "weights read, millions"]
    head += [f"{name}, T = {temperature:g}" for name in sets for temperature in TEMPERATURES]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for case in wanted:
        shape = f"chain {case.steps}" if "cost" in case.tree else case.tree
        cells = [
            case.draft,
            shape,
            f"{proposal_cost(target, case.draft, case.path, case.steps):.1f}",
        ]
        for name, prompts in sets.items():
            for temperature in TEMPERATURES:
                value = results.get(_key(case, name, prompts, temperature, tokens))
                cells.append("" if value is None else f"{value:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
