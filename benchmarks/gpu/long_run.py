"""10,000 steps in which requests join, leave and are preempted and drafts are killed: is a byte
left behind, a token wrong?

    python -m benchmarks.gpu.long_run
    python -m benchmarks.gpu.long_run --device cpu --steps 600 --kill-every 100

The bundled model and its EAGLE-3 head in float32, in a pool too small for what runs, greedy and
sampled requests with filters, penalties and log-probabilities, a sixth of them cancelled. About
every 500 steps the draft gets SIGKILL, if another one is ready to take its place, or else stands
still for longer than the step timeout, while the load goes on. In the last third nobody is killed,
so that one draft attaches again and again. Eight times the load pauses, and what both processes
have then is noted. Another process decodes the same requests plainly meanwhile; all texts, and the
beginnings that were cancelled, are compared with its texts. Exit status 1 if something grew, was
left, or a text is another one; the last line says it in one.
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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.long_run_verdict import TIE, problems_of, verdict_of
from benchmarks.gpu.needed import need_gpu
from benchmarks.gpu.plain_texts import PlainTexts
from benchmarks.real_prompts import real_prompts
from benchmarks.results_folder import results_folder
from foredraft.cli import mps
from foredraft.models.registry import resolve_model_path
from foredraft.telemetry.metrics import value
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import FinishReason, SamplingParams
from testing import counted_draft, engines
from testing.engines import Harness, Job, running_engine
from testing.fault_cases import BlockCount, GraphCount, device_bytes, num_descriptors
from testing.segments import segments
from testing.standby_drafts import StandbyDraft
from testing.ties import first_difference
from verify_service import metrics
from verify_service.engine.live_requests import EngineRequest
from verify_service.outputs import Finish, Load, StepOutput

FLAGS = {
    "dtype": "float32",
    "max_running_requests": 8,
}
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
POOL = {"cuda": 1280, "cpu": 512}  # tokens of KV, fewer than running requests need
LONGEST = {"cuda": 320, "cpu": 60}  # output
HEADROOM = 4  # tokens of output that admission keeps room for: so few that pages often run short
CONCURRENT = 12
NUM_JOBS = {"cuda": 60, "cpu": 12}
PAUSES = 8


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--kill-every", type=int, default=500, help="steps, about")
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="load ends so long after the start at most"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mps", action="store_true", help="run under a private MPS daemon")
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    need_gpu(args.device)
    args.until = time.monotonic() + args.seconds
    StandbyDraft.module = "testing.counted_draft"
    StandbyDraft.num_spares = 3 if args.device == "cuda" else 1
    engines.new_draft = StandbyDraft  # type: ignore[assignment,misc]
    with tempfile.TemporaryDirectory() as folder, mps.running(args.mps) as variables:
        os.environ.update(variables)
        os.environ["COUNT_FILE"] = str(Path(folder) / "count")
        report = _run(args)
        for name in variables:
            del os.environ[name]
    problems = problems_of(report)
    verdict = verdict_of(report, problems)
    report |= {"problems": problems, "verdict": verdict}
    (args.out / "gpu_long_run.json").write_text(json.dumps(report, indent=1))
    print(verdict)
    return 1 if problems else 0


def _run(args: argparse.Namespace) -> dict[str, Any]:
    blocks, graphs = BlockCount(), GraphCount()
    demo = resolve_model_path("foredraft-demo")
    jobs = make_jobs(demo, random.Random(args.seed), args.device)
    flags = {**FLAGS, "device": args.device, "max_total_tokens": POOL[args.device]}
    on_gpu = args.device == "cuda"
    # Plain decoding needs no small pool.
    plain_flags = {**flags, "max_total_tokens": 16384}
    with (
        PlainTexts(demo, jobs, plain_flags) as plain,
        running_engine(
            demo,
            "EAGLE3",
            **flags,
            **TREE,
            speculative_draft_model_path=str(resolve_model_path("foredraft-demo-eagle3")),
            require_transport="cuda_ipc" if on_gpu else "shm",
            draft_step_timeout=0.5 if on_gpu else 5.0,
        ) as harness,
    ):
        harness.engine._scheduler.admission_headroom = HEADROOM
        with Run(harness, jobs, args, blocks, graphs) as run:
            run.go()
            return run.report(plain)


def make_jobs(demo: Path, rng: random.Random, device: str) -> list[Job]:
    """Returns requests of every kind, some with a common beginning."""
    prompts = real_prompts(Tokenizer.from_dir(demo))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
        {"temperature": 0.7, "repetition_penalty": 1.2},
        {"temperature": 0.0, "logprobs": 2},
    ]
    jobs = []
    for seed in range(NUM_JOBS[device]):
        prompt = rng.choice(prompts)[: rng.randrange(4, 160)]
        # Most can be chosen for on the GPU, so that most steps run ahead.
        kind = kinds[rng.choice((0, 0, 0, 1, 1, 1, 2, 2, 3, 4))]
        sampling = SamplingParams(
            seed=seed, max_new_tokens=rng.randrange(8, LONGEST[device]), ignore_eos=True, **kind
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
    """Puts load on an engine, injects faults of its draft, and records resources."""

    def __init__(
        self,
        harness: Harness,
        jobs: list[Job],
        args: argparse.Namespace,
        blocks: BlockCount,
        graphs: GraphCount,
    ) -> None:
        self._harness, self._jobs = harness, jobs
        self._args, self._blocks, self._graphs = args, blocks, graphs
        self._rng = random.Random(f"{args.seed}/run")
        self._going: dict[int, Going] = {}
        self._lock = threading.Lock()
        self._ended: queue.SimpleQueue[tuple[Going, Finish]] = queue.SimpleQueue()
        self._num_requests = 0
        self._first_step = num_steps()
        self._counts: Counter[str] = Counter()
        # By job, text, and whether it is whole: how often.
        self._texts: Counter[tuple[int, tuple[int, ...], bool]] = Counter()
        self._notes: list[dict[str, Any]] = []
        self._started = time.monotonic()
        self._faults = ThreadPoolExecutor(1, thread_name_prefix="faults")
        # Its thread begins with the first one, which here does nothing: threads are counted.
        self._fault: Future[None] | None = self._faults.submit(lambda: None)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        self._faults.shutdown()

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return num_steps() - self._first_step

    @property
    def _part(self) -> float:
        """Share of the run that is over."""
        available = max(self._args.until - self._started, 1.0)
        return max(self.steps / self._args.steps, (time.monotonic() - self._started) / available)

    def go(self) -> None:
        """Runs until all steps are done, or the time is over."""
        total, next_pause = self._args.steps, 0
        next_fault = self._args.kill_every
        while self._part < 1:
            if self.steps >= next_pause:
                self._pause()
                next_pause += total // PAUSES
            if self.steps >= next_fault and self._begin_fault(may_kill=self._part < 2 / 3):
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
        """Checks requests that end within some time."""
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
            is_whole = finish.reason == FinishReason.LENGTH
            self._texts[going.job, tuple(going.tokens), is_whole] += 1
            if finish.error is not None:
                self._counts[f"error: {finish.error}"] += 1

    def _begin_fault(self, may_kill: bool) -> bool:
        """Injects a fault of the draft under load; returns False while the last fault is not
        over.
        """
        draft: Any = self._harness.draft
        if self._fault is not None and not self._fault.done():
            return False
        if not self._harness.engine.load().draft_available:
            return False
        self._end_fault()
        does_kill = may_kill and self._rng.random() < 0.8 and draft.has_spare
        self._counts["kills" if does_kill else "stops"] += 1
        self._fault = self._faults.submit(self._kill if does_kill else self._stop, draft)
        return True

    def _kill(self, draft: Any) -> None:
        draft.kill()
        draft.start()

    def _stop(self, draft: Any) -> None:
        draft.pause()
        time.sleep(1.0 if self._args.device == "cuda" else 6.0)
        draft.resume()

    def _end_fault(self) -> None:
        """Waits for the end of the fault."""
        fault, self._fault = self._fault, None
        if fault is not None:
            fault.result(120)

    def _pause(self) -> None:
        """Lets all requests end, and records resources."""
        deadline = time.monotonic() + 300
        while self._going:
            self._take_ended(0.02)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self._going)} requests do not end")
        self._end_fault()
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
        used = device_bytes() if on_gpu else {}
        pool = self._harness.engine._scheduler.pool
        verifier = {
            "allocated": torch.cuda.memory_allocated() if on_gpu else 0,
            "blocks": self._blocks.num_alive,
            "graphs": self._graphs.num_captured,
            "descriptors": num_descriptors(),
            "threads": threading.active_count(),
            "segments": len(segments()),
            "pages_lost": pool.num_pages - pool.num_free,
            "driver": used.get(os.getpid()),
        }
        prefix = Path(os.environ["COUNT_FILE"])
        of_draft = {
            **counted_draft.ask(prefix, draft.pid),
            "descriptors": num_descriptors(draft.pid),
            "threads": len(os.listdir(f"/proc/{draft.pid}/task")),
            "driver": used.get(draft.pid),
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

    def report(self, plain: PlainTexts) -> dict[str, Any]:
        """Returns the results of the run."""
        expected = plain.texts()
        wrong: list[dict[str, Any]] = []
        ties: list[dict[str, Any]] = []
        seen = set()
        for (job, tokens, is_whole), count in sorted(self._texts.items()):
            text, given = expected[job], self._jobs[job]
            self._counts["whole texts" if is_whole else "beginnings"] += count
            if list(tokens) == (text if is_whole else text[: len(tokens)]):
                continue
            at = first_difference(tokens, text)
            told: dict[str, Any] = {"job": job, "at": at, "times": count}
            if at is not None:
                before = [*given.prompt, *text[:at]]
                told["gap"] = plain.gap(before, given.sampling, tokens[at], text[at])
            is_tie = told.get("gap", 1.0) < TIE
            (ties if is_tie else wrong).append(told)
            if (job, at) not in seen:
                seen.add((job, at))
                print("parts:", told, given.sampling, flush=True)
        return {
            "device": self._args.device,
            "mps": self._args.mps,
            "asked": self._args.steps,
            "steps": self.steps,
            "overlapped": int(value("foredraft_overlapped_steps_total")),
            "seconds": round(self._notes[-1]["seconds"], 1),
            "counts": dict(self._counts),
            "wrong": wrong,
            "ties": ties,
            "notes": self._notes,
        }


def num_steps() -> int:
    """Returns the number of steps of this process's engines.

    Reading all metrics would take the engine's time.
    """
    samples = next(iter(metrics.STEP_SECONDS.collect())).samples
    return int(next(sample.value for sample in samples if sample.name.endswith("_count")))


if __name__ == "__main__":
    sys.exit(main())
