"""Counts texts that differ from plain decoding's, with drafts and beside other requests.

    python -m benchmarks.gpu.divergence                                 # the bundled model and its drafts
    python -m benchmarks.gpu.divergence --shape llama-8b --layers 4     # random weights, true sizes
    python -m benchmarks.gpu.divergence --texts 2048 --shard 3/16       # a sixteenth of the texts
    python -m benchmarks.gpu.divergence --device cpu --dtype float32 --texts 64 --tokens 96
    python -m benchmarks.gpu.divergence --tp 2 --runs nccl NGRAM-chain  # ranks on two GPUs

Greedy and sampled texts with the same seeds, with filters, penalties, biases and grammars. Each run
is an engine, NAME or ALGORITHM-SHAPE-CONDITION..., whose texts are compared with plain
decoding's in a batch of --batch:

    alone       one by one                  eager      without captured graphs
    pressure    pages for a few sequences   reversed   in the opposite order
                and chunks of 56 tokens     cached     twice, the second time on cached prefixes
    restart     the same again              cancelled  beside requests that end early
    killed      the draft is killed again and again, and comes back
    nccl        sums of ranks go through NCCL

With `--exactness strict` none may differ, and the command ends with 1 if one does. With `off`, or in
float32, the rows say where they part; `--gaps` adds by how much the rule prefers plain decoding's
token to the other one in float64 (transformers on the CPU), beside the distance of neighbouring
bfloat16 numbers at the size of that logit.
"""  # noqa: E501

import argparse
import dataclasses
import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.divergence_models import NAMES, SHAPES, Family, family_of
from benchmarks.gpu.needed import need_gpu
from benchmarks.results_folder import results_folder
from testing.engines import Harness, Job, Result, accept_length, running_engine
from testing.ties import Reference, first_difference

CONDITIONS: dict[str, dict[str, Any]] = {
    "alone": {"max_running_requests": 1},
    # Pages for a few sequences, so that they preempt each other, and chunks that end anywhere.
    "pressure": {"max_total_tokens": 4096, "chunked_prefill_size": 56},
    "eager": {"disable_cuda_graph": True},
    "reversed": {},
    "cached": {},
    "restart": {},
    "cancelled": {},
    "killed": {},
    "nccl": {},
}
PLAIN = ("alone", "pressure", "eager-reversed", "cached", "restart")
WITH_DRAFTS = ("", "-pressure-cancelled", "-killed-cached")
FEW = 32  # texts of engines that run one at a time
SECONDS_BETWEEN_KILLS = 2.0
EPSILON_BITS = {"bfloat16": 7, "float16": 10, "float32": 23}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", default="demo", choices=NAMES)
    parser.add_argument("--layers", type=int, default=4, help="of random weights")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--shard", default="1/1", help="the I-th of N equal shares of the texts")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--runs", nargs="+", help="such as alone NGRAM-chain EAGLE3-tree-killed")
    parser.add_argument("--dtype", default="bfloat16", choices=list(EPSILON_BITS))
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tp", type=int, default=1, help="ranks of the target")
    parser.add_argument("--exactness", default="strict", choices=["strict", "off"])
    parser.add_argument("--gaps", action="store_true")
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    need_gpu(args.device)
    share, shares = map(int, args.shard.split("/"))
    if not 1 <= share <= shares:
        parser.error(f"--shard {args.shard}: I/N with I from 1 to N")
    with tempfile.TemporaryDirectory() as folder:
        family = family_of(args.shape, Path(folder), args.layers)
        jobs = family.jobs(args.texts, args.tokens)[share - 1 :: shares]
        runs = args.runs or [
            *PLAIN,
            *(
                f"{name}-{shape}{conditions}"
                for name in family.drafts
                for shape in SHAPES
                for conditions in WITH_DRAFTS
            ),
        ]
        report = _compare(family, jobs, [Run.parse(text, family, parser) for text in runs], args)
    name = f"gpu_divergence_{args.shape}_{args.dtype}_{args.exactness}_{share}of{shares}"
    name += f"_tp{args.tp}.json" if args.tp > 1 else ".json"
    (args.out / name).write_text(json.dumps(report, indent=1))
    parted = sum(len(row["parted"]) for row in report.values())
    return int(parted > 0 and args.exactness == "strict" and not args.gaps)


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """An engine of its own; `algorithm` is NONE without a draft."""

    text: str
    algorithm: str
    shape: str
    conditions: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, family: Family, parser: argparse.ArgumentParser) -> "Run":
        """NAME or ALGORITHM-SHAPE-CONDITION..."""
        parts = text.split("-")
        algorithm, shape = "NONE", ""
        if parts[0] in family.drafts and parts[1:] and parts[1] in SHAPES:
            algorithm, shape, *parts = parts
        unknown = [part for part in parts if part not in CONDITIONS]
        if unknown or (algorithm in ("NONE", "NGRAM") and shape == "" and "killed" in parts):
            known = f"{'|'.join(family.drafts)}-{'|'.join(SHAPES)}, then {'|'.join(CONDITIONS)}"
            parser.error(f"--runs {text}: runs of this model are {known}")
        return cls(text, algorithm, shape, tuple(parts))


def _compare(
    family: Family, jobs: list[Job], runs: Sequence[Run], args: argparse.Namespace
) -> dict[str, Any]:
    [plain] = _texts(family, Run("plain", "NONE", "", ()), jobs, args)
    expected = [result.tokens for result in plain]
    total = parted = 0
    report: dict[str, Any] = {}
    for run in runs:
        started = time.monotonic()
        some = jobs[:FEW] if "alone" in run.conditions else jobs
        rounds = _texts(family, run, some, args)
        rows = []
        for results in rounds:
            for number, (job, ours, result) in enumerate(
                zip(some, expected, results, strict=False)
            ):
                at = _parting(ours, result.tokens)
                if at is not None:
                    gap = _gap(family, job, ours, result.tokens, at, args) if args.gaps else {}
                    rows.append(
                        {"text": number, "temperature": job.sampling.temperature, "at": at} | gap
                    )
        count = sum(map(len, rounds))
        length = accept_length([result for results in rounds for result in results])
        total, parted = total + count, parted + len(rows)
        report[run.text] = {"parted": rows, "texts": count, "accept_length": length}
        print(
            f"{run.text:32} {len(rows):4} of {count} texts part, accept length {length:.2f}, "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
        for row in rows[:5]:
            print(f"    {row}", flush=True)
    print(
        f"{args.shape}, {args.dtype}, exactness {args.exactness}, shard {args.shard}: {parted} of "
        f"{total} texts of {args.tokens} tokens part from plain decoding's",
        flush=True,
    )
    return report


def _parting(ours: list[int], theirs: list[int]) -> int | None:
    """Returns the index where two texts part; neither may be longer than the other."""
    at = first_difference(ours, theirs)
    if at is None and len(ours) != len(theirs):
        return min(len(ours), len(theirs))
    return at


def _texts(
    family: Family, run: Run, jobs: list[Job], args: argparse.Namespace
) -> list[list[Result]]:
    """Returns an engine's answers in the order of the jobs; twice where a run asks for it."""
    flags: dict[str, Any] = {
        "device": args.device,
        "dtype": args.dtype,
        "exactness": args.exactness,
        "kv_cache_dtype": args.kv_cache_dtype,
        "max_total_tokens": 32768,
        "context_length": family.context,
        "max_running_requests": args.batch,
        "max_queued_requests": 2 * len(jobs),
        "tensor_parallel_size": args.tp,
        "draft_step_timeout": 60.0,
        **family.flags,
    }
    if args.device == "cpu":
        flags["num_threads"] = None
    if run.algorithm != "NONE":
        flags |= family.draft_flags(run.algorithm, run.shape)
    for condition in run.conditions:
        flags |= CONDITIONS[condition]
    reaches = torch.cuda.can_device_access_peer
    if "nccl" in run.conditions:  # all ranks follow the one that says no
        torch.cuda.can_device_access_peer = lambda *cards: False
    with running_engine(family.path, run.algorithm, **flags) as harness:
        torch.cuda.can_device_access_peer = reaches
        killer = Killer(harness) if "killed" in run.conditions else None
        found = [_answers(harness, run, jobs)]
        if "cached" in run.conditions:
            found.append(_answers(harness, run, jobs))
        if killer is not None:
            killer.stop()
        harness.check_nothing_left()
    return found


def _answers(harness: Harness, run: Run, jobs: list[Job]) -> list[Result]:
    work = jobs[::-1] if "reversed" in run.conditions else jobs
    others: list[Job] = []
    if "cancelled" in run.conditions:
        others = [
            dataclasses.replace(job, cancel_after=5 + number)
            for number, job in enumerate(work[::3])
        ]
    results = harness.run([*others, *work], timeout=1500)[len(others) :]
    return results[::-1] if "reversed" in run.conditions else results


class Killer:
    """Kills a draft every few seconds and starts it again, until it is stopped."""

    def __init__(self, harness: Harness) -> None:
        assert harness.draft is not None
        self._harness, self._draft = harness, harness.draft
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.wait(SECONDS_BETWEEN_KILLS):
            self._draft.kill()
            self._draft.start()
            self._harness.wait_for_draft(timeout=120)

    def stop(self) -> None:
        """Returns when the draft is there for good."""
        self._ends.set()
        self._thread.join()


def _gap(
    family: Family,
    job: Job,
    ours: list[int],
    theirs: list[int],
    at: int,
    args: argparse.Namespace,
) -> dict[str, float]:
    if at >= min(len(ours), len(theirs)):
        return {}
    reference = Reference(family.path)
    before = [*job.prompt, *ours[:at]]
    tokens = [ours[at], theirs[at]]
    one, other = reference.preferences(before, job.sampling, tokens)
    logit = max(map(abs, reference.logits(before, tokens)))
    spacing = 2.0 ** (math.floor(math.log2(logit)) - EPSILON_BITS[args.dtype])
    return {"gap": one - other, "spacing": spacing}


if __name__ == "__main__":
    sys.exit(main())
