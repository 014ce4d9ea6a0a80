"""Accept length by algorithm on the bundled family: tokens per verification, the target's own included.

    python -m benchmarks.accept_length --prompts 24 --out benchmarks/results

For each draft, tree, temperature and order of children: 64 tokens of each prompt (the beginning of Python files of
this repository and paragraphs of its documentation), all prompts in one batch, the whole tree verified in each step.
"""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from foredraft.models.registry import resolve_model_path
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams
from tests.support.engines import Job, running_engine

ROOT = Path(__file__).parents[1]
TREES = {"chain 4": (4, 1, 5), "tree 4/4/12": (4, 4, 12)}
TEMPERATURES = (0.0, 0.7, 1.0)
TOKENS = 64


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model-path", default="foredraft-demo")
    parser.add_argument("--draft-model-path", default="foredraft-demo-draft")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    target = resolve_model_path(args.model_path)
    prompts = _prompts(Tokenizer.from_dir(target), args.prompts)
    rows = []
    for name, (steps, topk, tokens) in TREES.items():
        for order in ("topk", "coupled"):
            flags = {
                "speculative_draft_model_path": str(resolve_model_path(args.draft_model_path)),
                "speculative_num_steps": steps,
                "speculative_eagle_topk": topk,
                "speculative_num_draft_tokens": tokens,
                "speculative_draft_sampling": order,
            }
            lengths = _measure(target, "STANDALONE", flags, prompts)
            rows.append(
                {"draft": "STANDALONE", "tree": name, "order": order, "accept_length": lengths}
            )
    lengths = _measure(target, "NGRAM", {"speculative_ngram_scope": "request"}, prompts)
    rows.append({"draft": "NGRAM", "tree": "12 rows", "order": "-", "accept_length": lengths})
    _report(rows, args)
    return 0


def _prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    files = [
        *sorted(ROOT.glob("verify_service/*.py")),
        *sorted(ROOT.glob("gateway/*.py")),
        *sorted(ROOT.glob("docs/*.md")),
    ]
    texts = [file.read_text()[:1500] for file in files if file.stat().st_size > 1500]
    return [tokenizer.encode(text)[:250] for text in texts[:count]]


def _measure(
    target: Path, algorithm: str, flags: dict, prompts: list[list[int]]
) -> dict[str, float]:
    lengths = {}
    settings = {
        "page_size": 32,
        "max_total_tokens": 32768,
        "draft_step_timeout": 30.0,
        "num_threads": None,
        **flags,
    }
    with running_engine(target, algorithm, **settings) as harness:
        harness.engine.draft_everything()
        for temperature in TEMPERATURES:
            jobs = [
                Job(prompt, SamplingParams(temperature=temperature, seed=i, max_new_tokens=TOKENS, ignore_eos=True))
                for i, prompt in enumerate(prompts)
            ]  # fmt: skip
            ends = [result.finish for result in harness.run(jobs, timeout=600)]
            steps = sum(end.verify_steps for end in ends)
            lengths[str(temperature)] = 1 + sum(end.accepted_tokens for end in ends) / steps
    return lengths


def _report(rows: list[dict], args: argparse.Namespace) -> None:
    table = Table(
        "draft", "tree", "order", *(f"T = {t}" for t in TEMPERATURES), title="accept length"
    )
    for row in rows:
        lengths = [f"{row['accept_length'][str(t)]:.2f}" for t in TEMPERATURES]
        table.add_row(row["draft"], row["tree"], row["order"], *lengths)
    Console().print(table)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "accept_length.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    sys.exit(main())
