"""A model and its drafts on one GPU with real acceptance: every algorithm's speed over plain
decoding, beside what its accept length and the times of its stages predict.

    python -m benchmarks.gpu.family --mps
    python -m benchmarks.gpu.family --mps --model-path demo-gemma --heads EAGLE3=path/to/head --algorithms NGRAM EAGLE3 --temperatures 0

bfloat16, one request at a time, real prompts (`benchmarks/accept_length_prompts.json`). A row's
speed is measured from the end of the step after the prompt on, in which a draft reads the prompt;
nothing else is measured meanwhile. Its stages are measured in runs of their own
(`benchmarks.gpu.stages`), which take turns with these. The prediction is accept length x a plain
step / the step that the stages give (`step_of`): the target's graph, the draft's graphs and the
hand-overs follow each other on the GPU; the verifier's host works beside them, one step ahead; the
draft is asked for a step when the outcome of the step but one before is known, and its host has to
put each graph into its stream before that can run. N-grams are asked for while the GPU waits: there
a step is the host's part until the target's graph is in its stream, and that graph, one after the
other.
"""  # noqa: E501

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.needed import need_gpu
from benchmarks.real_prompts import real_prompts
from benchmarks.results_folder import results_folder
from foredraft.cli import mps
from foredraft.config.options import to_flags
from foredraft.models.registry import resolve_model_path
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams
from testing.engines import Collector, Harness, Job, running_engine
from verify_service.drafts.remote_draft import RemoteDraft
from verify_service.outputs import Load, StepOutput

HEADS = {"STANDALONE": "draft", "EAGLE": "eagle", "EAGLE3": "eagle3", "MTP": "mtp"}
TREES = {"chain": (3, 1, 4), "tree": (5, 4, 8)}
ROUNDS, TOKENS, STAGE_TOKENS = 5, 64, 36
MOST_OF_REPLAY, TOLERANCE = 1.3, 0.1
HOSTS = ("host", "ask", "answer", "rest")
COLUMNS = ("target", "extend", "draft", "idle", "lag", *HOSTS)
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model-path", default="foredraft-demo")
    parser.add_argument(
        "--heads",
        nargs="+",
        default=[f"{name}=foredraft-demo-{head}" for name, head in HEADS.items()],
        help="ALGORITHM=path of each draft",
    )
    parser.add_argument("--algorithms", nargs="+", default=["NGRAM", *HEADS])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--mps", action="store_true", help="run under a private MPS daemon")
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    need_gpu()
    # Before anything opens the card: a process that has opened it cannot become the daemon's
    # client.
    with tempfile.TemporaryDirectory() as folder, mps.running(args.mps) as variables:
        os.environ.update(variables)
        rows = _measure_all(args, Path(folder))
        for name in variables:
            del os.environ[name]
    predict(rows)
    (args.out / "gpu_family.json").write_text(json.dumps(rows, indent=1))
    return report(rows)


def _measure_all(args: argparse.Namespace, folder: Path) -> list[Row]:
    from benchmarks.gpu.stages import Stages

    stages = Stages()
    path = resolve_model_path(args.model_path)
    heads = {
        name: resolve_model_path(head) for name, head in (one.split("=", 1) for one in args.heads)
    }
    tokenizer = Tokenizer.from_dir(path)
    prompts = real_prompts(tokenizer)[: args.prompts]
    rows: list[Row] = []
    with _drafts(args.algorithms, path, heads, folder) as drafts, _until_interrupted():
        for algorithm in ("NONE", *args.algorithms):
            trees = {"12 rows": (1, 1, 12)} if algorithm == "NGRAM" else TREES
            draft = drafts.get(algorithm)
            for tree, shape in ({"": (0, 0, 0)} if algorithm == "NONE" else trees).items():
                flags = _flags(algorithm, shape, heads)
                if draft:
                    flags["draft"] = (f"{algorithm}={draft.process.target}",)
                with running_engine(path, algorithm, **flags) as harness:
                    harness.engine.draft_everything()
                    for order, temperature in _cases(args.temperatures, draft is not None):
                        if order == "topk":
                            _attach_anew(harness, order)
                        row = {"algorithm": algorithm, "tree": tree, "order": order}
                        row["T"] = temperature
                        row |= _measure(harness, prompts, temperature, stages, draft)
                        print(json.dumps({k: row[k] for k in row if k != "hosts"}), flush=True)
                        rows.append(row)
    return rows


def _cases(temperatures: list[float], has_model: bool) -> list[tuple[str, float]]:
    """Returns orders of children and temperatures; at temperature 0 both orders are the same."""
    if not has_model:
        return [("", temperature) for temperature in temperatures]
    sampled = [("topk", temperature) for temperature in temperatures if temperature > 0]
    return [*(("coupled", temperature) for temperature in temperatures), *sampled]


def _attach_anew(harness: Harness, order: str) -> None:
    """Attaches the draft again with another order of children, much faster than a new engine."""
    [draft] = harness.engine._drafts.each
    assert isinstance(draft, RemoteDraft)
    client = draft._client
    link = client._make_attach.__self__  # type: ignore[attr-defined]
    link.config = dataclasses.replace(link.config, speculative_draft_sampling=order)
    client.drop("another order of children")
    harness.wait_for_draft()


@contextlib.contextmanager
def _until_interrupted() -> Iterator[None]:
    """Lets Ctrl-C end the block, so that earlier measurements are reported."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted: the rest is missing", flush=True)


@contextlib.contextmanager
def _drafts(
    algorithms: list[str], path: Path, heads: dict[str, Path], folder: Path
) -> Iterator[dict[str, Any]]:
    """The draft services that use the GPU, started together; they serve one engine after the
    other.
    """
    from benchmarks.gpu.stages import StagedDraft

    drafts: dict[str, Any] = {}
    try:
        for name in algorithms:
            if name != "NGRAM":
                flags = {
                    "model_path": str(path),
                    "speculative_algorithm": name,
                    **_flags(name, TREES["tree"], heads),
                }
                for of_verifier in VERIFIER_FLAGS:
                    del flags[of_verifier]
                drafts[name] = StagedDraft(folder / name, *to_flags(flags))
        for draft in drafts.values():
            draft.process.wait_ready()
        yield drafts
    finally:
        for draft in drafts.values():
            draft.process.__exit__(None, None, None)


VERIFIER_FLAGS = {
    "max_total_tokens": 8192,
    "max_running_requests": 1,
    "disable_radix_cache": True,
    "draft_step_timeout": 30.0,
}


def _flags(algorithm: str, shape: tuple[int, int, int], heads: dict[str, Path]) -> dict[str, Any]:
    flags: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", **VERIFIER_FLAGS}
    if algorithm == "NGRAM":
        flags |= {"speculative_ngram_scope": "request"}
    elif algorithm != "NONE":
        steps, topk, tokens = shape
        flags |= {
            "speculative_draft_model_path": str(heads[algorithm]),
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": tokens,
        }
    return flags


class _Timed(Collector):
    """Notes the times and numbers of each request's tokens."""

    def __init__(self, engine: Any, num_requests: int) -> None:
        super().__init__(engine, num_requests)
        self.blocks: list[list[tuple[float, int]]] = [[] for _ in range(num_requests)]

    def _take(self, outputs: list[StepOutput], load: Load) -> None:
        now = time.perf_counter()
        for output in outputs:
            if output.tokens:
                self.blocks[output.tag].append((now, len(output.tokens)))
        super()._take(outputs, load)


def _measure(
    harness: Harness, prompts: list[list[int]], temperature: float, stages: Any, draft: Any
) -> Row:
    def jobs(num_tokens: int) -> list[Job]:
        sampling = SamplingParams(
            temperature=temperature, seed=1, max_new_tokens=num_tokens, ignore_eos=True
        )
        return [Job(prompt, sampling) for prompt in prompts]

    harness.run(jobs(8), timeout=300)  # compiles missing kernels
    found, hosts = [], []
    for _ in range(ROUNDS):
        timed = _Timed(harness.engine, len(prompts))
        timed.run(jobs(TOKENS), timeout=300)
        found.append(speed(timed.blocks))
        hosts.append(stages.hosts(lambda: harness.run(jobs(STAGE_TOKENS)), draft))
    row = sorted(found, key=lambda one: one["step"])[ROUNDS // 2]
    row["steps"] = [one["step"] for one in found]
    row |= stages.graphs(lambda: harness.run(jobs(STAGE_TOKENS)[:4]), draft)
    every = [times for own in hosts for times in own]
    medians = np.median(np.array(every).reshape(-1, len(HOSTS)), axis=0).tolist()
    row |= dict(zip(HOSTS, medians, strict=True))
    row["hosts"] = [[[round(one, 4) for one in times] for times in own] for own in hosts]
    return row


def speed(blocks: list[list[tuple[float, int]]]) -> Row:
    """Returns speed and accept length of requests, from the times and the number of steps of
    their tokens.

    The first block is the prompt's token; the second step, in which a draft reads the prompt, is
    told apart.
    """
    seconds = sum(own[-1][0] - own[1][0] for own in blocks)
    num_tokens = sum(count for own in blocks for _, count in own[2:])
    num_steps = sum(len(own) - 2 for own in blocks)
    return {
        "tokens_per_second": num_tokens / seconds,
        "accept_length": num_tokens / num_steps,
        "step": seconds / num_steps * 1e3,
        "first": float(np.median([own[1][0] - own[0][0] for own in blocks])) * 1e3,
    }


def step_of(hosts: Sequence[Sequence[float]], row: Row, handing_over: float, lag: float) -> float:
    """Returns the predicted mean time of a step, in milliseconds.

    Args:
        hosts: `HOSTS` of each step in order, see `Stages.hosts`. A slow step is made up for only as
            far as overlap scheduling reaches.
        row: Row with the times of the graphs.
        handing_over: Time between the graphs of the two processes.
        lag: Time from the end of the graphs until the host knows.
    """
    has_draft = row["draft"] > 0
    # The outcome of the step but one before; the GPU's part of the step before.
    known, ended = 0.0, 0.0
    for host, ask, answer, rest in hosts:
        launched = known + (ask + answer if has_draft else host)
        extended = max(ended, launched) + row["extend"]
        drafted = max(extended, launched + rest) + row["draft"]
        known, ended = max(known + host, ended + lag), drafted + handing_over + row["target"]
    return ended / len(hosts)


def predict(rows: list[Row]) -> None:
    """Adds to each row its ratio to plain decoding, and the ratio that its stages and its accept
    length predict.

    Of several rounds the median counts, on both sides. What hands over between the processes is the
    same for all drafts: where a host is late for every step of a row, no short hand-over is seen
    there.
    """
    drafted = [row for row in rows if row["draft"] > 0]
    idle = min((row["idle"] for row in drafted), default=0.0)
    lag = float(np.median([row["lag"] for row in drafted])) if drafted else 0.0
    plain = {row["T"]: row for row in rows if row["algorithm"] == "NONE"}
    for row in rows:
        one = plain[row["T"]]
        if row["algorithm"] == "NGRAM":
            asks = [np.mean([ask for _, ask, *_ in hosts]) for hosts in row["hosts"]]
            step = float(np.median(asks)) + row["target"] + row["lag"]
        else:
            between = (idle, lag) if row["draft"] > 0 else (row["idle"], row["lag"])
            rounds = [step_of(hosts, row, *between) for hosts in row["hosts"] if hosts]
            step = float(np.median(rounds))
        row["ratio"] = row["tokens_per_second"] / one["tokens_per_second"]
        row["predicted_step"] = step
        row["predicted"] = row["accept_length"] * one["step"] / step


def report(rows: list[Row]) -> int:
    """Prints the table and whether the prediction holds; returns 1 where it does not."""
    print(
        f"{'milliseconds':12} {'tree':8} {'order':8} {'T':>3} {'tokens/s':>8} {'accept':>6}"
        f" {'first':>6} {'step':>6}"
        + "".join(f" {name:>6}" for name in COLUMNS)
        + f" {'ratio':>6} {'predicted':>9} {'within 10 %':>11}"
    )
    misses, worst = [], 0.0
    for row in rows:
        off = row["ratio"] / row["predicted"] - 1
        held = abs(off) <= TOLERANCE
        worst = max(worst, abs(off))
        name = " ".join(filter(None, (row["algorithm"], row["tree"], row["order"])))
        if not held:
            misses.append(f"{name} at temperature {row['T']:g} ({off:+.0%})")
        print(
            f"{row['algorithm']:12} {row['tree']:8} {row['order']:8} {row['T']:3.0f}"
            f" {row['tokens_per_second']:8.0f} {row['accept_length']:6.2f} {row['first']:6.2f}"
            f" {row['step']:6.3f}"
            + "".join(f" {row[name]:6.3f}" for name in COLUMNS)
            + f" {row['ratio']:6.2f} {row['predicted']:9.2f} {'yes' if held else 'NO':>6}"
            f" {off:+.0%}"
        )
    is_quick = True
    for row in rows:
        if row["algorithm"] == "NONE":
            times = row["step"] / row["target"]
            is_quick &= times <= MOST_OF_REPLAY
            print(
                f"plain step at temperature {row['T']:g}: {row['step']:.3f} ms, bare replay of its"
                f" graph {row['target']:.3f} ms, {times:.2f} times (at most {MOST_OF_REPLAY}): "
                + ("yes" if times <= MOST_OF_REPLAY else "NO")
            )
    print(
        f"ratios within {TOLERANCE:.0%} of their predictions: "
        + (f"yes, at most {worst:.0%} off" if not misses else f"NO, {', '.join(misses)}")
    )
    return 0 if is_quick and not misses else 1


if __name__ == "__main__":
    sys.exit(main())
