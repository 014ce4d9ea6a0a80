"""The engine: one thread that schedules, drafts, runs the target, verifies, commits and emits, step after step.

Where the target can start a step before the one before it is done, it does: see `run_ahead`.
"""

import dataclasses
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from foredraft.errors import ForedraftError, InvalidRequest, Unavailable
from foredraft.trees.draft_tree import EMPTY
from foredraft.types import FinishReason
from verify_service import metrics
from verify_service.controller.controller import Controller
from verify_service.drafts.drafting import Drafting
from verify_service.drafts.proposals import NOTHING, Drafted, Wanted
from verify_service.drafts.several import Drafts
from verify_service.engine.live_requests import EngineRequest, Live, LiveRequests
from verify_service.engine.outcomes import Outcomes
from verify_service.engine.overlap import Flight, RunAhead
from verify_service.engine.self_test import SelfTest
from verify_service.engine.tree_sizes import TreeSizes
from verify_service.executor.sampler import VerifyRows
from verify_service.executor.target_step import TargetStep
from verify_service.outputs import Load
from verify_service.scheduler.request import Sequence, Status
from verify_service.scheduler.scheduler import Scheduler
from verify_service.scheduler.step_plan import StepPlan

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.5  # how often an idle engine looks at the draft


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a request is checked against."""

    vocab_size: int
    context_length: int
    num_pages: int
    page_size: int
    max_running_requests: int
    eos_token_ids: frozenset[int]
    max_nodes: int


class Engine:
    """Runs every step. `start`, `submit`, `cancel`, `load`, `flush_cache` and `stop` are for other threads.

    Args:
        target: Runs the target's part of each step.
        drafting: The draft's side, or that of several, or None for plain decoding.
        controller: How much to draft, and by which draft.
        self_tests: Of each draft that is attached, while the engine idles.
        overlap: Whether steps may be started before the outcome of the one before them is known.
    """

    def __init__(
        self,
        target: TargetStep,
        scheduler: Scheduler,
        drafting: Drafting | Drafts | None,
        controller: Controller,
        limits: EngineLimits,
        speculation: metrics.AnyMetrics,
        self_tests: Iterable[SelfTest] = (),
        overlap: bool = True,
    ) -> None:
        self.limits = limits
        self._target = target
        self._scheduler = scheduler
        self._drafting = drafting
        self._live = LiveRequests()
        self._sizes = TreeSizes(
            controller,
            drafting,
            self._live.probes,
            lambda one: self._live[one].request.draft,
        )
        self._outcomes = Outcomes(target, scheduler, drafting, self._sizes, speculation, self._live)
        self._speculation = speculation
        self._self_tests = tuple(self_tests)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ahead = RunAhead(target, scheduler, drafting)
        self._overlap = overlap
        self._flight: Flight | None = None
        self._ended_at = 0.0  # when the newest step's outcome was known
        self._published_at = 0.0  # when the figures were
        self._is_checked = False  # pages and slots, since something was last done
        self._num_submitted = 0
        self._submit_lock = threading.Lock()
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        metrics.PAGES.set(limits.num_pages)

    def start(self) -> None:
        """Starts the engine's thread."""
        self._thread.start()

    def submit(self, request: EngineRequest) -> int:
        """Takes a request and returns the number to cancel it by.

        Raises:
            InvalidRequest: A field is wrong, or the prompt can never fit.
            Overloaded: The queue is full. Found out later, it is answered through the sink.
            Unavailable: The engine has stopped.
        """
        request.sampling.validate(self.limits.vocab_size)
        self._scheduler.check(len(request.prompt), 1)
        if max(request.prompt) >= self.limits.vocab_size or min(request.prompt) < 0:
            raise InvalidRequest("prompt", f"token ids must be in [0, {self.limits.vocab_size})")
        with self._submit_lock:
            if self._stopping or self._failure is not None:
                raise Unavailable("the verifier is stopping; retry")
            self._num_submitted += 1
            number = self._num_submitted
            self._inbox.put(lambda: self._add(number, request))
        return number

    def cancel(self, number: int) -> None:
        """Ends a request at the next step; one that has ended is left as it is."""
        self._inbox.put(lambda: self._cancel(number))

    def flush_cache(self) -> "Future[int]":
        """Drops cached prefixes that nothing uses; the future gives the number of pages."""
        future: Future[int] = Future()

        def flush() -> None:
            if future.set_running_or_notify_cancel():  # whoever asked may have gone
                future.set_result(self._scheduler.prefix_tree.clear())

        self._inbox.put(flush)
        return future

    def load(self) -> Load:
        """State for routing; a snapshot that may be a step old."""
        scheduler = self._scheduler
        return Load(
            waiting=scheduler.num_waiting,
            running=scheduler.num_running,
            free_pages=scheduler.pool.num_free + scheduler.pool.num_idle,
            total_pages=self.limits.num_pages,
            draft_available=self._drafting is not None and self._drafting.available,
        )

    def draft_everything(self) -> None:
        """From now on the whole tree is drafted in each step, whether it pays or not: for benchmarks."""
        self._sizes.draft_everything()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._live.by_number and self._inbox.empty()

    @property
    def ended_at(self) -> float:
        """When the newest step's outcome was known, by `time.perf_counter`."""
        return self._ended_at

    @property
    def failure(self) -> BaseException | None:
        """The defect that ended the engine's thread, if one did."""
        return self._failure

    def stop(self, timeout: float = 30.0) -> None:
        """Ends the thread after the step in flight; what still runs ends with UNAVAILABLE."""
        with self._submit_lock:
            self._stopping = True
        self._inbox.put(lambda: None)
        if self._thread.is_alive():
            self._thread.join(timeout)
        if self._drafting is not None:
            self._drafting.close()

    # From here on: the engine's own thread.

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self._has_work:
                    self._wait_for_work()
                self._take_inbox()
                if self._has_work:
                    self.step()
                # While others work there is time to emit: a draft, or the step behind one that has landed. Else nobody
                # need wait for that.
                if not self._has_work or (self._drafting is None and self._flight is None):
                    self._emit()
            if self._flight is not None:
                self._ahead.finish(self._flight)
        except BaseException as error:
            logger.exception("the engine failed; the verifier has to be restarted")
            with self._submit_lock:  # what was submitted before is answered below
                self._failure = error
        self._take_inbox()
        self._live.end_all(Unavailable("the verifier stopped; retry"))
        self._emit()

    @property
    def _has_work(self) -> bool:
        return self._scheduler.has_work or self._flight is not None

    def _wait_for_work(self) -> None:
        self._observe()
        if self._start_self_test():
            self._is_checked = False
            return
        try:
            asked = self._inbox.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            if not self._is_checked:  # looks at every page: 50 ms for 60,000
                self._scheduler.check_integrity()
                self._is_checked = True
            return
        self._is_checked = False
        asked()

    def _start_self_test(self) -> bool:
        """Lets the engine's own requests in if a test is due; one test at a time."""
        if self._drafting is None:
            return False
        for test in self._self_tests:
            probes = test.due(self._drafting.epoch_of(test.draft))
            for probe in probes:
                with self._submit_lock:
                    self._num_submitted += 1
                    number = self._num_submitted
                self._add(number, probe)
            if probes:
                return True
        return False

    def _take_inbox(self) -> None:
        while not self._inbox.empty():
            self._inbox.get_nowait()()

    def _add(self, number: int, request: EngineRequest) -> None:
        now = time.monotonic()
        if not request.is_probe and any(test.interrupt() for test in self._self_tests):
            for other in self._live.probes:
                self._scheduler.cancel(other)
        self._live.add(number, Live(request, now))
        room = max(1, self._scheduler.max_sequence_tokens - len(request.prompt))
        sampling = request.sampling
        if sampling.max_new_tokens > room:
            sampling = dataclasses.replace(
                sampling, max_new_tokens=room, min_new_tokens=min(sampling.min_new_tokens, room)
            )
        sequence = Sequence(
            request_id=number,
            prompt=request.prompt,
            sampling=sampling,
            speculation=request.speculation,
            eos_token_ids=self.limits.eos_token_ids,
            priority=request.priority,
            deadline=None if request.timeout_seconds is None else now + request.timeout_seconds,
            key_label=request.key_label,
            traceparent=request.traceparent,
            grammar=None if request.grammar is None else request.grammar.follow(),
        )
        try:
            self._scheduler.add(sequence)
        except ForedraftError as error:
            self._outcomes.finish(sequence, FinishReason.ERROR, error)

    def _cancel(self, number: int) -> None:
        self._scheduler.cancel(number)

    def step(self) -> None:
        """Runs one step: schedule, draft, forward, verify, commit; or starts one, and commits the one before it."""
        if self._flight is not None:
            flight = self._flight
            choose = functools.partial(self._sizes.plan, is_ahead=True)
            self._flight = self._ahead.start_behind(flight, choose)
            self._emit()
            self._land(flight)
            return
        started = time.perf_counter()
        if self._drafting is not None:
            self._drafting.refresh()
        plan = self._scheduler.schedule(lambda seqs, rows: self._sizes.plan(seqs, rows).nodes)
        self._outcomes.settle(plan)
        trees = self._draft(plan)
        drafted = time.perf_counter()
        metrics.DRAFT_WAIT_SECONDS.observe(drafted - started)
        if plan.is_empty:
            return
        batch = self._batch(plan, trees)
        wait = self._sizes.wait(plan.decode, trees, drafted - started)
        if self._overlap and not plan.prefill and self._target.can_start(batch):
            self._flight = self._ahead.start(batch)
            self._flight.wait = wait
            return
        starts = [slot.seq.num_computed for slot in plan.decode]
        capture = self._drafting.capture if self._drafting is not None else None
        result = self._target.run(batch, plan.prefill, capture or ())
        verified = time.perf_counter()
        for chunk in plan.prefill:
            if not chunk.is_last:
                self._scheduler.on_committed(chunk.seq, chunk.num_tokens)
        self._outcomes.break_off(batch[i].sequence for i in result.broken)
        num_decoding = len(plan.decode)
        decoded = result.outcomes[:num_decoding]
        self._outcomes.commit_all(batch[:num_decoding], decoded)
        last_chunks = [chunk for chunk in plan.prefill if chunk.is_last]
        for chunk, rows, outcome in zip(
            last_chunks, batch[num_decoding:], result.outcomes[num_decoding:], strict=True
        ):
            if chunk.seq.status is Status.RUNNING:
                self._outcomes.commit(rows, outcome, chunk.num_tokens)
        tokens = sum(len(outcome.verified.tokens) for outcome in decoded)
        if plan.prefill:
            self._sizes.interrupted(wait)
        else:
            self._sizes.observe(len(batch), result.num_logit_rows, verified - drafted, tokens, wait)
        if capture is not None:
            decoding = [slot.seq for slot in plan.decode]
            paths = [outcome.verified.path for outcome in decoded]
            self._ahead.keep(result, decoding, plan.prefill, starts, paths)
        metrics.FORWARD_SECONDS.observe(result.forward_seconds)
        metrics.VERIFY_SECONDS.observe(verified - drafted - result.forward_seconds)
        self._ended(started)

    def _land(self, flight: Flight) -> None:
        """Takes the outcome of a step that was started."""
        result, trees = self._ahead.finish(flight)
        starts = [sequence.num_computed for sequence in flight.sequences]
        paths = [outcome.verified.path for outcome in result.outcomes]
        self._outcomes.break_off(flight.sequences[i] for i in result.broken)
        batch = map(VerifyRows, flight.sequences, trees, flight.confidences)
        self._outcomes.commit_all(batch, result.outcomes)
        if self._flight is not None:
            self._ahead.choose(self._flight)
        self._ahead.tell(flight, result, starts, paths)
        self._sizes.observe(
            len(flight.sequences),
            result.num_logit_rows,
            time.perf_counter() - max(flight.started_at, self._ended_at),
            sum(map(len, paths)),
            flight.wait,
        )
        metrics.OVERLAPPED_STEPS.inc(self._flight is not None)
        self._ended(max(flight.started_at, self._ended_at))

    def _ended(self, started: float) -> None:
        self._ended_at = time.perf_counter()
        metrics.STEP_SECONDS.observe(self._ended_at - started)
        self._observe()

    def _draft(self, plan: StepPlan) -> dict[int, Drafted]:
        if self._drafting is None:
            return {}
        wanted = [Wanted(slot.seq, slot.max_tree_nodes) for slot in plan.decode]
        extending = [chunk.seq for chunk in plan.prefill]
        return self._drafting.propose(wanted, extending, meanwhile=self._emit)

    def _batch(self, plan: StepPlan, trees: dict[int, Drafted]) -> list[VerifyRows]:
        """The sequences for which tokens are chosen: decoding ones, then those whose prompt ends."""
        batch = []
        for slot, tree in zip(plan.decode, self._sizes.trees(plan.decode, trees), strict=True):
            drafted = trees.get(slot.seq.request_id, NOTHING)
            if (grammar := slot.seq.follow_grammar()) is not None:
                tree = grammar.prune(tree)
            batch.append(VerifyRows(slot.seq, tree, drafted.confidence))
        for chunk in plan.prefill:
            if chunk.is_last:
                chunk.seq.follow_grammar()
                batch.append(VerifyRows(chunk.seq, EMPTY))
        return batch

    def _emit(self) -> None:
        """Hands each submitter the outputs of this step."""
        if self._live.has_news:
            self._live.emit(self.load())

    def _observe(self) -> None:
        """Publishes figures: not after every step, but before the end of the last request is told."""
        now = time.perf_counter()
        if self._has_work and now - self._published_at < metrics.PUBLISH_SECONDS:
            return
        self._published_at = now
        pool = self._scheduler.pool
        metrics.RUNNING.set(self._scheduler.num_running)
        metrics.WAITING.set(self._scheduler.num_waiting)
        metrics.PAGES_CACHED.set(pool.num_idle)
        metrics.PAGES_USED.set(pool.num_pages - pool.num_free - pool.num_idle)
        self._speculation.flush()
        self._sizes.publish(self._speculation)
