"""An engine in this process, with a real draft service beside it where the algorithm has one."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.config.options import to_flags
from foredraft.config.services import DraftConfig, VerifyConfig
from foredraft.config.speculation import each_draft
from foredraft.models.speculation import resolve
from foredraft.types import SamplingParams, SpeculationParams
from testing.drafts import DraftProcess, ForkedDraft
from testing.forked import forked_rank
from verify_service.attach.links import connect_drafts
from verify_service.engine.engine import Engine
from verify_service.engine.live_requests import EngineRequest
from verify_service.executor.ranks.workers import Workers
from verify_service.metrics import speculation_metrics
from verify_service.outputs import Finish, Load, StepOutput, TokenLogprob
from verify_service.startup import build_engine, load_target

if TYPE_CHECKING:  # llguidance may be absent
    from verify_service.grammar.matcher import CompiledGrammar

# Fields that differ between several drafts.
CHANGED = ("speculative_algorithm", "speculative_draft_model_path")
DRAFT_FLAGS = {field.name for field in fields(DraftConfig)} - {"listen"}


@dataclass(slots=True)
class Result:
    """All outputs of an engine for one request.

    Attributes:
        arrivals: For each output with tokens, its time in seconds of `perf_counter` and how many
            tokens it brought.
    """

    tokens: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    arrivals: list[tuple[float, int]] = field(default_factory=list)


@dataclass(slots=True)
class Job:
    """A request for the harness."""

    prompt: list[int]
    sampling: SamplingParams
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    priority: int = 0
    timeout_seconds: float | None = None
    key_label: str = ""
    cancel_after: int | None = None
    grammar: "CompiledGrammar | None" = None


class Collector:
    """Gathers outputs; `wait` returns when every request has finished."""

    def __init__(self, engine: Engine, num_requests: int) -> None:
        self.results = [Result() for _ in range(num_requests)]
        self._engine = engine
        self._left = num_requests
        self._done = threading.Event()
        self._cancel_at: dict[int, tuple[int, int]] = {}

    def run(self, jobs: Sequence[Job], timeout: float) -> list[Result]:
        """Submits all jobs at once and waits for all."""
        for i, job in enumerate(jobs):
            number = self._engine.submit(
                EngineRequest(
                    tag=i,
                    prompt=list(job.prompt),
                    sampling=job.sampling,
                    sink=self._take,
                    speculation=job.speculation,
                    priority=job.priority,
                    timeout_seconds=job.timeout_seconds,
                    key_label=job.key_label,
                    return_provenance=True,
                    grammar=job.grammar,
                )
            )
            if job.cancel_after is not None:
                self._cancel_at[i] = (number, job.cancel_after)
        if jobs and not self._done.wait(timeout):
            raise TimeoutError(f"{self._left} of {len(jobs)} requests have not finished")
        return self.results

    def _take(self, outputs: list[StepOutput], load: Load) -> None:
        for output in outputs:
            result = self.results[output.tag]
            assert result.finish is None, "output after the end"
            result.tokens += output.tokens
            result.drafted += output.drafted
            result.logprobs += output.logprobs
            assert not (output.prompt_logprobs and result.tokens), "the prompt comes first"
            result.prompt_logprobs += output.prompt_logprobs
            if output.tokens:
                result.arrivals.append((time.perf_counter(), len(output.tokens)))
            number, count = self._cancel_at.get(output.tag, (0, 1 << 60))
            if len(result.tokens) >= count:
                self._engine.cancel(number)
            if output.finish is not None:
                result.finish = output.finish
                self._left -= 1
        if self._left == 0:
            self._done.set()


@dataclass(slots=True)
class Harness:
    """A running engine and its draft, the first of several; `drafts` holds all by algorithm."""

    engine: Engine
    draft: DraftProcess | None
    drafts: dict[str, DraftProcess] = field(default_factory=dict)

    def run(self, jobs: Sequence[Job], timeout: float = 300) -> list[Result]:
        """Runs jobs together."""
        return Collector(self.engine, len(jobs)).run(jobs, timeout)

    def wait_for_draft(self, timeout: float = 120.0) -> None:
        """Waits until all drafts are attached: after a start, which on a GPU captures graphs,
        or after a kill.
        """
        deadline = time.monotonic() + timeout
        while not self.engine.load().draft_available:
            assert time.monotonic() < deadline, "the draft was not attached"
            time.sleep(0.005)

    def run_around_a_kill(self, jobs: Sequence[Job]) -> tuple[list[Result], ...]:
        """Runs jobs three times: before the draft is killed, twice over while it is, and with its
        successor.
        """
        assert self.draft is not None
        first = self.run(jobs)
        killer = threading.Timer(0.3, self.draft.kill)
        killer.start()
        killed = self.run([*jobs, *jobs])
        killer.join()
        self.draft.start()
        self.wait_for_draft()
        return first, killed, self.run(jobs)

    def check_nothing_left(self) -> None:
        """Asserts that no page or slot is in use once all requests have ended."""
        scheduler = self.engine._scheduler
        scheduler.check_integrity()
        pool = scheduler.pool
        assert pool.num_free + pool.num_idle == pool.num_pages
        assert scheduler.num_running == scheduler.num_waiting == 0


def new_draft(*flags: str) -> DraftProcess:
    """Returns a draft service that has not started; tests may replace this function."""
    # CUDA must not be forked.
    return ForkedDraft(*flags) if "--device=cpu" in flags else DraftProcess(*flags)


def accept_length(results: Sequence[Result]) -> float:
    """Returns tokens per verification, the target's own included."""
    finishes = [result.finish for result in results if result.finish is not None]
    assert len(finishes) == len(results)
    num_steps = sum(finish.verify_steps for finish in finishes)
    return 1 + sum(finish.accepted_tokens for finish in finishes) / num_steps


@contextlib.contextmanager
def _ranks_forked(are_forked: bool) -> Iterator[None]:
    """Forks the processes of ranks that are started meanwhile; torch alone takes seconds."""
    launch = Workers.launch
    if are_forked:
        Workers.launch = forked_rank  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Workers.launch = launch  # type: ignore[method-assign]


@contextlib.contextmanager
def running_engine(
    model_path: Path, algorithm: str = "NONE", wait: bool = True, **flags: Any
) -> Iterator[Harness]:
    """Runs an engine on `model_path` (float32, one thread) with the draft services that
    `algorithm` needs, unless `draft` names some.
    """
    flags = {
        "model_path": str(model_path),
        "speculative_algorithm": algorithm,
        "device": "cpu",
        "num_threads": 1,
        "max_total_tokens": 4096,
        "skip_draft_self_test": True,
        # Most tests must not depend on this machine's speed.
        "speculative_adaptive": False,
        "draft_step_timeout": 20.0,
        **flags,
    }
    with contextlib.ExitStack() as stack:
        drafts = {}
        for one in each_draft(VerifyConfig(**flags)):
            name = one.speculative_algorithm
            if name != "NONE" and "draft" not in flags:
                values = {field.name: getattr(one, field.name) for field in fields(one)}
                drafts[name] = new_draft(
                    *to_flags(
                        {key: values[key] for key in (*flags, *CHANGED) if key in DRAFT_FLAGS}
                    )
                )
                stack.enter_context(drafts[name])
        if "draft" not in flags:
            flags["draft"] = tuple(f"{name}={draft.target}" for name, draft in drafts.items())
        config = resolve(VerifyConfig(**flags))
        metrics = speculation_metrics(config.algorithms)
        with _ranks_forked(config.device == "cpu"):
            target = load_target(config)
        links = connect_drafts(config, target, metrics)
        engine = build_engine(config, target, metrics, links)
        engine.start()
        try:
            harness = Harness(engine, next(iter(drafts.values()), None), drafts)
            if links and wait:
                harness.wait_for_draft()
            yield harness
        finally:
            engine.stop()
    assert engine.failure is None
