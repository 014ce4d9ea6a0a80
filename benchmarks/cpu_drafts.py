"""Decoding speed of every draft on the CPU, as ratios to plain decoding, and the counts that
explain them.

    python -m benchmarks.cpu_drafts --out benchmarks/results
    python -m benchmarks.cpu_drafts --model-path demo-gemma --heads EAGLE3=path/to/head --out benchmarks/results

One engine and one draft process for each algorithm, float32. Every algorithm runs under the default
policy, which drafts what pays, and with `forced` drafting of the whole tree. More answers than the
batch has sequences are asked for at once, so that the batch stays full. Each round runs an
algorithm and plain decoding in turns, step by step, so that a machine that is busy for a while
slows both; the ratio is of the time of their steps, and its median over the rounds is reported,
with the values between which it lies at a confidence of 95 %. Where others use the machine,
OMP_PROC_BIND=close OMP_PLACES='{0},{1}' keeps the threads on their cores. Since verifier and draft
take turns, with --threads 1 the ratio in CPU time of both processes is what a machine with nothing
else to do would show. With --token-map the draft's own CPU time shows what FR-Spec saves. --text
new takes prompts of random tokens, which nothing repeats. A second table counts what a row of the
target and a level of each draft read and compute.
"""  # noqa: E501

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from benchmarks.accept_length import HEADS, ROOT
from benchmarks.cpu_serving import PROMPTS
from benchmarks.model_paths import model_directory
from benchmarks.results_folder import results_folder
from draft_service.models.shared_weights import read_token_map
from foredraft.models.config import ModelConfig
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams
from testing.engines import Harness, Job, running_engine
from testing.turns import Turns, median_within

ANSWERS = 3  # times the batch, in a round, at least
CODE = (ROOT / "verify_service/scheduler/page_pool.py", ROOT / "foredraft/trees/draft_tree.py")


class Case(NamedTuple):
    """Draft, batch size and temperature that a ratio is measured for."""

    draft: str
    batch: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Times and counts of one pass over the prompts."""

    tokens: int
    seconds: float  # time of steps
    cpu_seconds: float  # time of all threads of both processes
    draft_seconds: float  # part of it that the draft took
    verifies: int
    drafted: int

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def cpu_rate(self) -> float:
        """Tokens per second of CPU time."""
        return self.tokens / self.cpu_seconds

    @property
    def accept_length(self) -> float:
        """Tokens per verification."""
        return self.tokens / max(self.verifies, 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--model-path", default="foredraft-demo")
    add("--heads", nargs="*", help="ALGORITHM=path; default: those of the bundled family")
    add(
        "--token-map",
        default="",
        help="for EAGLE, MTP and STANDALONE, measured beside the full vocabulary",
    )
    add("--only", nargs="*", help="measure these alone, such as NGRAM 'EAGLE3, forced'")
    add("--tokens", type=int, default=64)
    add("--batch", type=int, nargs="+", default=[1, 8])
    add("--rounds", type=int, default=5)
    add("--text", choices=["usual", "new"], default="usual")
    add("--threads", type=int, default=2)
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    add("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    target = model_directory(args.model_path)
    drafts = _drafts(args)
    prompts = _random_prompts() if args.text == "new" else _prompts(target)
    results: dict[Case, list[tuple[Timing, Timing]]] = {}
    for batch in args.batch:
        num_answers = max(len(prompts), ANSWERS * batch)
        asked = list(itertools.islice(itertools.cycle(prompts), num_answers))
        with contextlib.ExitStack() as stack:
            engines = {
                name: stack.enter_context(_engine(target, flags, batch, args.threads))
                for name, flags in drafts.items()
            }
            none = {"algorithm": "NONE"}
            plain = stack.enter_context(_engine(target, none, batch, args.threads))
            for temperature in args.temperature:
                for harness in engines.values():
                    # Warms up, and teaches the policy.
                    _run((plain, harness), asked, min(24, args.tokens), temperature)
                for _, (name, harness) in itertools.product(range(args.rounds), engines.items()):
                    timings = _run((plain, harness), asked, args.tokens, temperature)
                    case = Case(name, batch, temperature)
                    results.setdefault(case, []).append(timings)
                    print(*case, round(timings[1].rate / timings[0].rate, 3), file=sys.stderr)
    rows = []
    for case, pairs in results.items():
        ratios = [timing.rate / before.rate for before, timing in pairs]
        cpu_ratios = [timing.cpu_rate / before.cpu_rate for before, timing in pairs]
        timings = [timing for _, timing in pairs]
        ratio, low, high = median_within(ratios)
        rows.append(
            {
                **case._asdict(),
                "plain": statistics.median(before.rate for before, _ in pairs),
                "rate": statistics.median(timing.rate for timing in timings),
                "ratio": ratio,
                "ratio_low": low,
                "ratio_high": high,
                "cpu_ratio": statistics.median(cpu_ratios),
                "ratios": [round(ratio, 3) for ratio in ratios],
                "cpu_ratios": [round(ratio, 3) for ratio in cpu_ratios],
                "accept_length": statistics.median(t.accept_length for t in timings),
                "drafted_per_verify": statistics.median(
                    t.drafted / max(t.verifies, 1) for t in timings
                ),
                "draft_ms_per_verify": statistics.median(
                    t.draft_seconds / max(t.verifies, 1) * 1e3 for t in timings
                ),
                "timings": [[asdict(before), asdict(timing)] for before, timing in pairs],
            }
        )
    _report(rows, _counts(target, drafts), args)
    return 0


def _counts(target: Path, drafts: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Returns the weights that a row of the target, or a level of a draft, multiplies:

    2 FLOPs and 4 bytes each.
    """
    whole, output = _weights(target)
    counts = {"target, one row": whole}
    for name, flags in drafts.items():
        path = flags.get("speculative_draft_model_path")
        if path is None or "," in name:
            continue
        own, own_output = _weights(Path(path))
        kept = 1.0
        if "speculative_token_map" in flags:
            vocab_size = ModelConfig.from_dir(target).vocab_size
            kept = len(read_token_map(flags["speculative_token_map"], vocab_size)) / vocab_size
        lm_head = own_output if own_output else output
        counts[f"{name}, one level"] = int(own - own_output + kept * lm_head)
    return counts


def _weights(path: Path) -> tuple[int, int]:
    """Returns the number of weights that a row multiplies, and how many of them are its own LM
    head's (0 without one).
    """
    sizes: dict[str, int] = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                shape = tensors.get_slice(name).get_shape()
                sizes[name.removeprefix("model.")] = prod(shape) if len(shape) == 2 else 0
    embedding = sizes.pop("embed_tokens.weight", 0)
    if "lm_head.weight" not in sizes and embedding:
        sizes["lm_head.weight"] = embedding  # tied
    return sum(sizes.values()), sizes.get("lm_head.weight", 0)


def _drafts(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns the flags of each draft, with and without `forced`."""
    heads = {
        name: str(ROOT / "models" / f"foredraft-demo-{folder}") for name, folder in HEADS.items()
    }
    if args.heads is not None:
        heads = dict(given.split("=", 1) for given in args.heads)
    drafts: dict[str, dict[str, Any]] = {
        "NGRAM": {"algorithm": "NGRAM", "speculative_ngram_scope": "request"}
    }
    for name, path in heads.items():
        flags = {"algorithm": name, "speculative_draft_model_path": path}
        drafts[name] = flags
        drafts[f"{name}, forced"] = {**flags, "forced": True}
        if args.token_map and name != "EAGLE3":
            mapped = {**flags, "speculative_token_map": args.token_map}
            drafts[f"{name} with token map"] = mapped
            drafts[f"{name} with token map, forced"] = {**mapped, "forced": True}
    return {name: drafts[name] for name in args.only} if args.only else drafts


@contextlib.contextmanager
def _engine(target: Path, flags: dict[str, Any], batch: int, threads: int) -> Iterator[Harness]:
    flags = dict(flags)
    algorithm, forced = flags.pop("algorithm"), flags.pop("forced", False)
    # With OMP_PROC_BIND this thread is kept on one, and the draft's process would be too.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with running_engine(
        target,
        algorithm,
        page_size=32,
        num_threads=threads,
        max_running_requests=batch,
        max_total_tokens=max(4096, 512 * batch),
        draft_step_timeout=60.0,
        draft_wait=300.0,
        speculative_adaptive=not forced,
        **flags,
    ) as harness:
        yield harness


def _prompts(target: Path) -> list[list[int]]:
    """Returns code to continue, and the texts of `cpu_serving`."""
    tokenizer = Tokenizer.from_dir(target)
    texts = [file.read_text()[start : start + 900] for file in CODE for start in (0, 1200)]
    texts += [PROMPTS[name] for name in ("copy code", "list", "essay", "story")]
    return [tokenizer.encode(text)[-256:] for text in texts]


def _random_prompts() -> list[list[int]]:
    """Returns tokens in which hardly any pair repeats."""
    rng = random.Random(0)
    return [[rng.randrange(300, 8000) for _ in range(256)] for _ in range(8)]


def _run(
    pair: tuple[Harness, Harness],
    prompts: list[list[int]],
    tokens: int,
    temperature: float,
) -> tuple[Timing, Timing]:
    """Lets two engines give the same answers side by side."""
    jobs = [
        Job(prompt, SamplingParams(temperature=temperature, max_new_tokens=tokens, ignore_eos=True, seed=i))  # noqa: E501
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip
    for harness in pair:
        harness.engine.flush_cache().result(60)
    before = [_draft_seconds(harness) for harness in pair]
    with contextlib.ExitStack() as stack:
        turns = stack.enter_context(Turns([harness.engine for harness in pair]))
        clients = stack.enter_context(ThreadPoolExecutor(len(pair)))
        results = list(clients.map(lambda harness: harness.run(jobs, timeout=600), pair))
    timings = []
    for i, harness in enumerate(pair):
        finishes = [one.finish for one in results[i] if one.finish is not None]
        assert len(finishes) == len(jobs)
        draft_seconds = _draft_seconds(harness) - before[i]
        timings.append(
            Timing(
                sum(len(one.tokens) for one in results[i]),
                turns.seconds[i],
                turns.cpu_seconds[i] + draft_seconds,
                draft_seconds,
                sum(finish.verify_steps for finish in finishes),
                sum(finish.drafted_tokens for finish in finishes),
            )
        )
    return timings[0], timings[1]


def _draft_seconds(harness: Harness) -> float:
    """Returns the CPU time of the draft's process."""
    if harness.draft is None:
        return 0.0
    tasks = Path(f"/proc/{harness.draft.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) * 1e-9


def _report(rows: list[dict[str, Any]], counts: dict[str, int], args: argparse.Namespace) -> None:
    print(
        "| draft | batch | T | plain tokens/s | tokens/s | ratio | 95 % | in CPU time | tokens per"
        " verify | drafted per verify | draft's CPU ms per verify |"
    )
    print("| --- " * 11 + "|")
    for row in rows:
        print(
            f"| {row['draft']} | {row['batch']} | {row['temperature']:g} | {row['plain']:.1f} |"
            f" {row['rate']:.1f} | {row['ratio']:.3f} | {row['ratio_low']:.2f} to"
            f" {row['ratio_high']:.2f} | {row['cpu_ratio']:.3f} | {row['accept_length']:.2f} |"
            f" {row['drafted_per_verify']:.1f} | {row['draft_ms_per_verify']:.1f} |"
        )
    print("\n| what | M weights | MFLOP | MB in float32 | of a target row |")
    print("| --- | --- | --- | --- | --- |")
    whole = counts["target, one row"]
    for name, count in counts.items():
        millions = count / 1e6
        print(
            f"| {name} | {millions:.2f} | {2 * millions:.1f} | {4 * millions:.1f} |"
            f" {count / whole:.1%} |"
        )
    content = {"threads": args.threads, "rows": rows, "weights": counts}
    name = Path(args.model_path).name
    (args.out / f"cpu_drafts_{name}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
