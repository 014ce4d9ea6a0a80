"""10,000 steps in which requests join, leave and are preempted and drafts are killed: is a byte left behind, a token wrong?

    python -m benchmarks.gpu.long_run
    python -m benchmarks.gpu.long_run --device cpu --steps 600 --kill-every 100

The bundled model and its EAGLE-3 head in float32, in a pool too small for what runs, greedy and sampled requests with filters,
penalties and log-probabilities, a sixth of them cancelled. About every 500 steps the draft gets SIGKILL or, once in three, stands
still for longer than the step timeout; another process takes a killed one's place. In the last third nobody is killed, so that
one draft attaches again and again. Ten times the load pauses, and what both processes have then is noted. Exit status 1 if
something grew, was left, or a text is not that of plain decoding.
"""

import argparse
import json
import os
import queue
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from foredraft.cli import mps
from foredraft.models.registry import resolve_model_path
from foredraft.telemetry.metrics import REGISTRY
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import FinishReason, SamplingParams
from tests.support import counted_draft, engines
from tests.support.engines import Harness, Job, running_engine
from tests.support.fault_cases import BlockCount, device_bytes, num_descriptors
from tests.support.standby_drafts import StandbyDraft
from tests.support.ties import Reference, first_difference
from verify_service.live_requests import EngineRequest
from verify_service.outputs import Finish, Load, StepOutput

FLAGS = {
    "dtype": "float32",
    "max_running_requests": 12,
}
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
POOL = {"cuda": 1280, "cpu": 640}  # tokens of KV, less than what runs at a time wants
LONGEST = {"cuda": 120, "cpu": 60}  # output
HEADROOM = 4  # tokens of output that admission keeps room for: so few that pages often run short
CONCURRENT = 16
NUM_JOBS = 60
PAUSES = 10
TIE = 1e-4  # of logits: nearer than this, rounding in batches of other sizes may decide
# What may not grow from the middle to the end, and by how much it may differ: the driver loads kernels when they first run. Of
# the draft, while it is the same process.
VERIFIER = {
    "allocated": 1 << 20,
    "blocks": 0,
    "pages_lost": 0,
    "segments": 0,
    "threads": 0,
    "descriptors": 4,
    "driver": 32 << 20,
}
DRAFT = {
    "allocated": 1 << 20,
    "mappings": 0,
    "threads": 0,
    "descriptors": 4,
    "driver": 32 << 20,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--kill-every", type=int, default=500, help="steps, about")
    parser.add_argument("--seconds", type=float, default=3600.0, help="end after so many at most")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mps", action="store_true", help="run under a private MPS daemon")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    StandbyDraft.module = "tests.support.counted_draft"
    StandbyDraft.num_spares = 2 if args.device == "cuda" else 1
    engines.DraftProcess = StandbyDraft  # type: ignore[assignment,misc]
    with tempfile.TemporaryDirectory() as folder, mps.running(args.mps) as variables:
        os.environ.update(variables)
        os.environ["COUNT_FILE"] = str(Path(folder) / "count")
        report = _run(args)
        for name in variables:
            del os.environ[name]
    (args.out / "gpu_long_run.json").write_text(json.dumps(report, indent=1))
    return _judge(report)


def _run(args: argparse.Namespace) -> dict[str, Any]:
    blocks = BlockCount()
    demo = resolve_model_path("foredraft-demo")
    jobs = make_jobs(demo, random.Random(args.seed), LONGEST[args.device])
    flags = {**FLAGS, "device": args.device, "max_total_tokens": POOL[args.device]}
    with running_engine(demo, "NONE", **flags) as plain:
        expected = [result.tokens for result in plain.run(jobs, timeout=300)]
    on_gpu = args.device == "cuda"
    with running_engine(
        demo,
        "EAGLE3",
        **flags,
        **TREE,
        speculative_draft_model_path=str(resolve_model_path("foredraft-demo-eagle3")),
        require_transport="cuda_ipc" if on_gpu else "shm",
        draft_step_timeout=0.5 if on_gpu else 5.0,
    ) as harness:
        harness.engine._scheduler.admission_headroom = HEADROOM
        run = Run(harness, jobs, expected, args, blocks)
        run.go()
        return run.report(demo)


def make_jobs(demo: Path, rng: random.Random, longest: int) -> list[Job]:
    """Requests of every kind, some with a beginning in common."""
    texts = json.loads((Path(__file__).parents[1] / "accept_length_prompts.json").read_text())
    tokenizer = Tokenizer.from_dir(demo)
    encoded = [tokenizer.encode(text) for text in texts]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
        {"temperature": 0.7, "repetition_penalty": 1.2},
        {"temperature": 0.0, "logprobs": 2},
    ]
    jobs = []
    for seed in range(NUM_JOBS):
        prompt = rng.choice(encoded)[: rng.randrange(4, 160)]
        # Most can be chosen for on the GPU, so that most steps run ahead.
        kind = kinds[rng.choice((0, 0, 0, 1, 1, 1, 2, 2, 3, 4))]
        sampling = SamplingParams(
            seed=seed, max_new_tokens=rng.randrange(8, longest), ignore_eos=True, **kind
        )
        jobs.append(Job(prompt, sampling))
    return jobs


@dataclass
class Going:
    """A request that runs."""

    job: int
    cancel_at: int
    tokens: list[int] = field(default_factory=list)
    number: int = 0
    is_cancelled: bool = False


class Run:
    """Load on an engine, faults of its draft, and notes of what there is."""

    def __init__(
        self,
        harness: Harness,
        jobs: list[Job],
        expected: list[list[int]],
        args: argparse.Namespace,
        blocks: BlockCount,
    ) -> None:
        self._harness, self._jobs, self._expected = harness, jobs, expected
        self._args, self._blocks = args, blocks
        self._rng = random.Random(f"{args.seed}/run")
        self._going: dict[int, Going] = {}
        self._lock = threading.Lock()
        self._ended: queue.SimpleQueue[tuple[Going, Finish]] = queue.SimpleQueue()
        self._num_requests = 0
        self._first_step = num_steps()
        self._counts: Counter[str] = Counter()
        self._wrong: list[tuple[int, list[int]]] = []
        self._notes: list[dict[str, Any]] = []
        self._started = time.monotonic()

    @property
    def steps(self) -> int:
        """Done so far."""
        return num_steps() - self._first_step

    @property
    def _part(self) -> float:
        """Of the run that is over."""
        seconds = time.monotonic() - self._started
        return max(self.steps / self._args.steps, seconds / self._args.seconds)

    def go(self) -> None:
        """Until all steps are done, or the time is over."""
        total, next_pause = self._args.steps, 0
        next_fault = self._args.kill_every
        while self._part < 1:
            if self.steps >= next_pause:
                self._pause()
                next_pause += total // PAUSES
            if self.steps >= next_fault:
                self._fault(may_kill=self._part < 2 / 3)
                next_fault = self.steps + self._rng.randrange(
                    self._args.kill_every // 2, self._args.kill_every
                )
            self._fill()
            self._take_ended(0.02)
        self._pause()

    def _fill(self) -> None:
        while len(self._going) < CONCURRENT:
            self._num_requests += 1
            job = self._rng.randrange(len(self._jobs))
            length = self._jobs[job].sampling.max_new_tokens
            cancel_at = self._rng.randrange(1, length) if self._rng.random() < 1 / 6 else length + 1
            going, tag = Going(job, cancel_at), self._num_requests
            with self._lock:
                self._going[tag] = going
                request = EngineRequest(
                    tag, self._jobs[job].prompt, self._jobs[job].sampling, self._take
                )
                going.number = self._harness.engine.submit(request)

    def _take(self, outputs: list[StepOutput], load: Load) -> None:
        for output in outputs:
            with self._lock:
                going = self._going[output.tag]
            going.tokens += output.tokens
            if output.finish is not None:
                with self._lock:
                    del self._going[output.tag]
                self._ended.put((going, output.finish))
            elif len(going.tokens) >= going.cancel_at and not going.is_cancelled:
                going.is_cancelled = True
                self._harness.engine.cancel(going.number)

    def _take_ended(self, timeout: float) -> None:
        """Looks at what has ended within some time."""
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            try:
                going, finish = self._ended.get(timeout=left)
            except queue.Empty:
                return
            self._counts[finish.reason] += 1
            self._counts["preemptions"] += finish.preemptions
            self._counts["tokens"] += len(going.tokens)
            self._counts["accepted"] += finish.accepted_tokens
            expected = self._expected[going.job]
            is_whole = finish.reason == FinishReason.LENGTH
            if going.tokens != (expected if is_whole else expected[: len(going.tokens)]):
                self._wrong.append((going.job, going.tokens))
            if finish.error is not None:
                self._counts[f"error: {finish.error}"] += 1

    def _fault(self, may_kill: bool) -> None:
        draft: Any = self._harness.draft
        if not self._harness.engine.load().draft_available:
            return  # the last one is not over
        if may_kill and self._rng.random() < 2 / 3:
            self._counts["kills"] += 1
            draft.kill()
            draft.start()
            return
        self._counts["stops"] += 1
        draft.pause()
        self._take_ended(1.0 if self._args.device == "cuda" else 6.0)
        draft.resume()

    def _pause(self) -> None:
        """Lets everything end, and notes what there is."""
        deadline = time.monotonic() + 120
        while self._going:
            self._take_ended(0.02)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self._going)} requests do not end")
        self._take_ended(0.3)
        self._harness.wait_for_draft(120)
        self._harness.check_nothing_left()
        self._harness.engine.flush_cache().result(30)
        self._notes.append(self._note())

    def _note(self) -> dict[str, Any]:
        draft: Any = self._harness.draft
        on_gpu = self._args.device == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        pool = self._harness.engine._scheduler.pool
        verifier = {
            "allocated": torch.cuda.memory_allocated() if on_gpu else 0,
            "blocks": self._blocks.num_alive,
            "descriptors": num_descriptors(),
            "threads": threading.active_count(),
            "segments": len(list(Path("/dev/shm").glob(f"foredraft-{os.getpid()}-*"))),
            "pages_lost": pool.num_pages - pool.num_free,
            "driver": device_bytes(os.getpid()) if on_gpu else None,
        }
        prefix = Path(os.environ["COUNT_FILE"])
        of_draft = {
            **counted_draft.ask(prefix, draft.pid),
            "descriptors": num_descriptors(draft.pid),
            "threads": len(os.listdir(f"/proc/{draft.pid}/task")),
            "driver": device_bytes(draft.pid) if on_gpu else None,
        }
        note = {
            "steps": self.steps,
            "seconds": round(time.monotonic() - self._started, 1),
            "pid": draft.pid,
            "verifier": verifier,
            "draft": of_draft,
        }
        print(json.dumps(note), flush=True)
        return note

    def report(self, demo: Path) -> dict[str, Any]:
        """What came of it."""
        wrong, ties = [], []
        reference = Reference(demo) if self._wrong else None
        for job, tokens in self._wrong:
            at, given = first_difference(tokens, self._expected[job]), self._jobs[job]
            told: dict[str, Any] = {"job": job, "kind": given.sampling, "at": at}
            if at is not None and reference is not None:
                before = [*given.prompt, *self._expected[job][:at]]
                both = [tokens[at], self._expected[job][at]]
                one, other = reference.preferences(before, given.sampling, both)
                told["gap"] = abs(one - other)
            print("parts:", told, flush=True)
            told["kind"] = str(given.sampling)
            (ties if told.get("gap", 1.0) < TIE else wrong).append(told)
        overlapped = REGISTRY.get_sample_value("foredraft_overlapped_steps_total") or 0.0
        return {
            "device": self._args.device,
            "mps": self._args.mps,
            "steps": self.steps,
            "overlapped": int(overlapped),
            "seconds": time.monotonic() - self._started,
            "counts": dict(self._counts),
            "wrong": wrong,
            "ties": ties,
            "notes": self._notes,
        }


def num_steps() -> int:
    """Of the engines of this process."""
    return int(REGISTRY.get_sample_value("foredraft_step_seconds_count") or 0)


def _judge(report: dict[str, Any]) -> int:
    """Prints what came of it; 0 if it is as it should be."""
    notes, counts = report["notes"], report["counts"]
    print(
        f"{report['steps']} steps, {report['overlapped']} of them ahead, in {report['seconds']:.0f} s: "
        + ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    )
    problems = [f"a wrong text: {told}" for told in report["wrong"]]
    problems += [what for what in counts if what.startswith("error")]
    middle, last = notes[len(notes) // 2], notes[-1]
    same = [note for note in notes if note["pid"] == last["pid"]]
    # Its first attach compiles and loads kernels.
    first = same[min(1, len(same) - 1)]
    for who, before, allowed in (("verifier", middle, VERIFIER), ("draft", first, DRAFT)):
        for name, tolerance in allowed.items():
            one, other = before[who][name], last[who][name]
            print(f"{who:8} {name:12} {one!s:>12} {other!s:>12}")
            if one is not None and other is not None and other - one > tolerance:
                problems.append(f"the {who}'s {name}: {one}, then {other}")
    if last["verifier"]["pages_lost"]:
        problems.append(f"{last['verifier']['pages_lost']} pages are lost")
    if report["ties"]:
        print(
            f"{len(report['ties'])} texts part at tokens within {TIE} of each other: {report['ties']}"
        )
    print(
        *(problems or ["nothing grew, nothing was left, every text is that of plain decoding"]),
        sep="\n",
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
