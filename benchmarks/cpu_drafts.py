"""Decoding speed of every draft on the CPU, as ratios to plain decoding, and the counts that explain them.

    python -m benchmarks.cpu_drafts --out benchmarks/results
    python -m benchmarks.cpu_drafts --model-path demo-gemma --heads EAGLE3=path/to/head --out benchmarks/results

One engine and one draft process for each algorithm, float32. Every algorithm runs under the default policy, which drafts
what pays, and with `forced` drafting of the whole tree. Plain decoding is timed directly before and after each, and the
ratio taken to the mean of both, so that a machine that is busy for a while slows all; the median over the rounds is reported.
Since verifier and draft take turns, with --threads 1 the ratio in CPU time of both processes is what a machine with nothing
else to do would show; it hardly depends on what else runs. With --token-map the draft's own CPU time shows what FR-Spec saves.
A second table counts what a row of the target and a level of each draft read and compute.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from benchmarks.accept_length import HEADS, ROOT
from benchmarks.cpu_serving import PROMPTS
from foredraft.models.config import ModelConfig
from foredraft.models.registry import resolve_model_path
from foredraft.models.shared_weights import read_token_map
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams
from tests.support.engines import Harness, Job, running_engine

CODE = (ROOT / "foredraft/kvcache/page_pool.py", ROOT / "foredraft/speculation/draft_tree.py")


class Case(NamedTuple):
    """What a ratio is measured for."""

    draft: str
    batch: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Timing:
    """One pass over the prompts."""

    tokens: int
    seconds: float
    cpu_seconds: float  # of all threads of both processes
    draft_seconds: float  # of these, the draft's
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
        """Tokens per verify."""
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
    add("--rounds", type=int, default=2)
    add("--threads", type=int, default=2)
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    add("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    target = resolve_model_path(args.model_path)
    drafts = _drafts(args)
    prompts = _prompts(target)
    results: dict[Case, list[Timing]] = {}
    plain: dict[Case, list[tuple[Timing, Timing]]] = {}
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(_engine(target, flags, args))
            for name, flags in drafts.items()
        }
        baseline = stack.enter_context(
            running_engine(target, "NONE", page_size=32, num_threads=args.threads)
        )
        for batch, temperature in itertools.product(args.batch, args.temperature):
            for harness in (baseline, *engines.values()):
                # Warms up, and teaches the policy.
                _run(harness, prompts, batch, 24, temperature)
            for _ in range(args.rounds):
                before = _run(baseline, prompts, batch, args.tokens, temperature)
                for name, harness in engines.items():
                    timing = _run(harness, prompts, batch, args.tokens, temperature)
                    after = _run(baseline, prompts, batch, args.tokens, temperature)
                    case = Case(name, batch, temperature)
                    results.setdefault(case, []).append(timing)
                    plain.setdefault(case, []).append((before, after))
                    before = after
    rows = []
    for case, timings in results.items():
        around = plain[case]
        rates = [statistics.mean(timing.rate for timing in pair) for pair in around]
        cpu_rates = [statistics.mean(timing.cpu_rate for timing in pair) for pair in around]
        ratios = [t.rate / rate for t, rate in zip(timings, rates, strict=True)]
        cpu_ratios = [t.cpu_rate / rate for t, rate in zip(timings, cpu_rates, strict=True)]
        rows.append(
            {
                **case._asdict(),
                "plain": statistics.median(rates),
                "rate": statistics.median(timing.rate for timing in timings),
                "ratio": statistics.median(ratios),
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
                "timings": [asdict(timing) for timing in timings],
            }
        )
    _report(rows, _counts(target, drafts), args)
    return 0


def _counts(target: Path, drafts: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Weights that a row of the target, or a level of a draft, multiplies: 2 FLOPs and 4 bytes each."""
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
    """Weights that a row multiplies, and those of the LM head among them (0: it has none of its own)."""
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
    """Flags of each draft, with and without `forced`."""
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


def _engine(target: Path, flags: dict[str, Any], args: argparse.Namespace) -> Any:
    flags = dict(flags)
    algorithm, forced = flags.pop("algorithm"), flags.pop("forced", False)

    @contextlib.contextmanager
    def run() -> Any:
        with running_engine(
            target,
            algorithm,
            page_size=32,
            num_threads=args.threads,
            draft_step_timeout=60.0,
            draft_wait=300.0,
            speculative_adaptive=not forced,
            **flags,
        ) as harness:
            deadline = time.monotonic() + 60
            while not harness.engine.load().draft_available and time.monotonic() < deadline:
                time.sleep(0.01)
            yield harness

    return run()


def _prompts(target: Path) -> list[list[int]]:
    """Code to go on with, and the texts of `cpu_serving`."""
    tokenizer = Tokenizer.from_dir(target)
    texts = [file.read_text()[start : start + 900] for file in CODE for start in (0, 1200)]
    texts += [PROMPTS[name] for name in ("copy code", "list", "essay", "story")]
    return [tokenizer.encode(text)[-256:] for text in texts]


def _run(
    harness: Harness, prompts: list[list[int]], batch: int, tokens: int, temperature: float
) -> Timing:
    total = verifies = drafted = 0
    seconds = own_seconds = draft_seconds = 0.0
    harness.engine.flush_cache().result(60)
    for first in range(0, len(prompts), batch):
        jobs = [
            Job(prompt, SamplingParams(temperature=temperature, max_new_tokens=tokens, ignore_eos=True, seed=i))
            for i, prompt in enumerate(prompts[first : first + batch], first)
        ]  # fmt: skip
        started, before = time.perf_counter(), _cpu_seconds(harness)
        results = harness.run(jobs, timeout=600)
        seconds += time.perf_counter() - started
        after = _cpu_seconds(harness)
        own_seconds, draft_seconds = (
            own_seconds + after[0] - before[0],
            draft_seconds + after[1] - before[1],
        )
        for result in results:
            assert result.finish is not None
            total += len(result.tokens)
            verifies += result.finish.verify_steps
            drafted += result.finish.drafted_tokens
    return Timing(total, seconds, own_seconds + draft_seconds, draft_seconds, verifies, drafted)


def _cpu_seconds(harness: Harness) -> tuple[float, float]:
    """Of this process, where every other engine idles, and of the draft."""
    if harness.draft is None:
        return time.process_time(), 0.0
    tasks = Path(f"/proc/{harness.draft.pid}/task").glob("*/schedstat")
    return time.process_time(), sum(int(task.read_text().split()[0]) for task in tasks) * 1e-9


def _report(rows: list[dict[str, Any]], counts: dict[str, int], args: argparse.Namespace) -> None:
    print(
        "| draft | batch | T | plain tokens/s | tokens/s | ratio | in CPU time | tokens per verify | drafted per verify | draft's CPU ms per verify |"
    )
    print("| --- " * 10 + "|")
    for row in rows:
        print(
            f"| {row['draft']} | {row['batch']} | {row['temperature']:g} | {row['plain']:.1f} | {row['rate']:.1f} | {row['ratio']:.2f} |"
            f" {row['cpu_ratio']:.2f} |"
            f" {row['accept_length']:.2f} | {row['drafted_per_verify']:.1f} | {row['draft_ms_per_verify']:.1f} |"
        )
    print("\n| what | M weights | MFLOP | MB in float32 | of a target row |")
    print("| --- | --- | --- | --- | --- |")
    whole = counts["target, one row"]
    for name, count in counts.items():
        millions = count / 1e6
        print(
            f"| {name} | {millions:.2f} | {2 * millions:.1f} | {4 * millions:.1f} | {count / whole:.1%} |"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    content = {"threads": args.threads, "rows": rows, "weights": counts}
    name = Path(args.model_path).name
    (args.out / f"cpu_drafts_{name}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
