"""The engine: one thread that schedules, drafts, runs the target, verifies, commits and emits, step
after step.

Where the target can start a step before the previous one is done, steps overlap: see `overlap`.
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
from verify_service.drafts.drafts import Drafts
from verify_service.drafts.proposals import NO_PROPOSALS, DraftRequest, Proposals
from verify_service.engine.live_requests import EngineRequest, Live, LiveRequests
from verify_service.engine.outcomes import Outcomes
from verify_service.engine.overlap import OverlapScheduler, StepInFlight
from verify_service.engine.self_test import SelfTest
from verify_service.engine.tree_sizes import Judge, TreeSizes, known_outcome
from verify_service.executor.base import Executor, Step, StepResult
from verify_service.executor.choice.sampler import VerifyRows
from verify_service.outputs import Load
from verify_service.scheduler.request import Sequence, Status
from verify_service.scheduler.scheduler import Scheduler
from verify_service.scheduler.step_plan import PrefillChunk, StepPlan
from verify_service.scheduler.token_limits import TokenLimits

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.5  # interval at which an idle engine looks at its drafts


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits that requests are validated against."""

    vocab_size: int
    context_length: int
    num_pages: int
    page_size: int
    max_running_requests: int
    eos_token_ids: frozenset[int]
    max_nodes: int


class Engine:
    """Runs every step.

    `start`, `submit`, `cancel`, `load`, `flush_cache` and `stop` are for other threads.

    Args:
        executor: Runs the target's part of each step.
        scheduler: Chooses the sequences of each step.
        drafts: The drafts; an empty list for plain decoding.
        controller: Chooses how much to draft, and the draft.
        limits: Limits that requests are validated against.
        speculation: Metrics of speculation.
        self_tests: Tests of the drafts, which run while the engine idles.
        overlap: Whether steps may be started before the outcome of the previous one is known.
        judge: Determines the outcome of proposals that are not verified; simulated acceptance draws
            it at random.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        drafts: Drafts,
        controller: Controller,
        limits: EngineLimits,
        speculation: metrics.AnyMetrics,
        self_tests: Iterable[SelfTest] = (),
        overlap: bool = True,
        judge: Judge = known_outcome,
    ) -> None:
        self.limits = limits
        self._executor = executor
        self._scheduler = scheduler
        self._drafts = drafts
        self._live = LiveRequests()
        self._sizes = TreeSizes(
            controller,
            drafts,
            self._live.probes,
            lambda one: self._live[one].request.draft,
            judge,
        )
        self._outcomes = Outcomes(executor, scheduler, drafts, self._sizes, speculation, self._live)
        self._speculation = speculation
        self._self_tests = tuple(self_tests)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._overlap = OverlapScheduler(executor, scheduler, drafts)
        self._overlaps = overlap
        self._in_flight: StepInFlight | None = None
        # Prompts that are being computed behind the step that landed last.
        self._behind: tuple[PrefillChunk, ...] = ()
        self._ended_at = 0.0  # when the newest step's outcome was known
        self._published_at = 0.0  # when the figures were
        self._is_checked = False  # pages and slots, since something was last done
        self._drafting_since = 0.0  # seconds since 1970; 0 while a draft is missing
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
        """Submits a request and returns its number, for `cancel`.

        Raises:
            InvalidRequest: A field is wrong, or the prompt can never fit.
            Overloaded: The queue is full. The engine's thread reports this through the sink.
            Unavailable: The engine has stopped.
        """
        request.sampling.validate(self.limits.vocab_size, self.limits.eos_token_ids)
        self._scheduler.check(len(request.prompt), 1)
        if request.sampling.prompt_logprobs_from >= len(request.prompt):
            raise InvalidRequest("prompt_logprobs_from", "is behind the prompt's last token")
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
        """Ends a request at the next step; does nothing if it has ended."""
        self._inbox.put(lambda: self._cancel(number))

    def flush_cache(self) -> "Future[int]":
        """Drops cached prefixes that nothing uses; the future gives the number of pages."""
        future: Future[int] = Future()

        def flush() -> None:
            if future.set_running_or_notify_cancel():  # the caller may have cancelled it
                future.set_result(self._scheduler.prefix_tree.clear())

        self._inbox.put(flush)
        return future

    def load(self) -> Load:
        """Returns the load for routing; it may be a step old."""
        scheduler = self._scheduler
        return Load(
            waiting=scheduler.num_waiting,
            running=scheduler.num_running,
            free_pages=scheduler.pool.num_free + scheduler.pool.num_idle,
            total_pages=self.limits.num_pages,
            draft_available=self._drafts.are_available,
            drafting_since=self._drafting_since,
        )

    def draft_everything(self) -> None:
        """Drafts whole trees in each step from now on, whether it pays or not; for benchmarks."""
        self._sizes.draft_everything()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._live.by_number and self._inbox.empty()

    @property
    def ended_at(self) -> float:
        """Time of `time.perf_counter` at which the newest step's outcome was known."""
        return self._ended_at

    @property
    def failure(self) -> BaseException | None:
        """The defect that ended the engine's thread, if one did."""
        return self._failure

    def stop(self, timeout: float = 30.0) -> None:
        """Ends the thread after the running step; live requests end with UNAVAILABLE."""
        with self._submit_lock:
            self._stopping = True
        self._inbox.put(lambda: None)
        if self._thread.is_alive():
            self._thread.join(timeout)
        self._drafts.close()
        self._executor.close()

    # The methods below run in the engine's own thread.

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self._has_work:
                    self._wait_for_work()
                self._take_inbox()
                if self._has_work:
                    self.step()
                # Outputs are emitted while a draft or the next step runs. Without these, emit them
                # here.
                if not self._has_work or (not self._drafts.each and self._in_flight is None):
                    self._emit()
            if self._in_flight is not None:
                self._overlap.finish(self._in_flight)
        except BaseException as error:
            logger.exception("the engine failed; the verifier has to be restarted")
            with self._submit_lock:  # requests submitted before are answered below
                self._failure = error
        self._take_inbox()
        self._live.end_all(Unavailable("the verifier stopped; retry"))
        self._emit()

    @property
    def _has_work(self) -> bool:
        return self._scheduler.has_work or self._in_flight is not None

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
        """Adds the requests of a self-test if one is due; returns whether one has started."""
        for test in self._self_tests:
            probes = test.due(self._drafts.epoch_of(test.draft))
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
            limits=TokenLimits(sampling, self.limits.vocab_size)
            if sampling.bad_words or sampling.allowed_token_ids
            else None,
        )
        try:
            self._scheduler.add(sequence)
        except ForedraftError as error:
            self._outcomes.finish(sequence, FinishReason.ERROR, error)

    def _cancel(self, number: int) -> None:
        self._scheduler.cancel(number)

    def step(self) -> None:
        """Runs one step: schedule, draft, forward, verify, commit.

        While steps overlap, starts the next step and commits the running one.
        """
        if self._in_flight is not None:
            running = self._in_flight
            choose = functools.partial(self._sizes.plan, is_ahead=True)
            self._in_flight = self._overlap.start_behind(running, choose)
            if self._in_flight is None:
                self._behind = self._compute_behind(running)
            self._emit()
            self._land(running)
            return
        started = time.perf_counter()
        self._drafts.refresh()
        behind, self._behind = self._behind, ()
        if behind:  # a draft would read the prompts first, once the GPU has computed them
            plan = self._scheduler.schedule(lambda seqs, _: [0] * len(seqs), with_prompts=False)
        else:
            plan = self._scheduler.schedule(lambda seqs, rows: self._sizes.plan(seqs, rows).nodes)
        self._outcomes.settle(plan)
        proposals = self._draft(plan)
        drafted = time.perf_counter()
        metrics.DRAFT_WAIT_SECONDS.observe(drafted - started)
        if plan.is_empty:
            return
        batch = self._batch(plan, proposals)
        wait = self._sizes.wait(plan.decode, proposals, drafted - started)
        capture = self._drafts.capture
        step = Step(batch, plan.prefill, capture or ())
        if self._overlaps and self._executor.can_overlap(step):
            self._in_flight = self._overlap.start(step)
            self._in_flight.wait, self._in_flight.chunks = wait, behind
            return
        starts = [slot.seq.num_computed for slot in plan.decode]
        result = self._execute(step)
        verified = time.perf_counter()
        self._outcomes.report(plan.prefill, result.prompt_logprobs)
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
        if plan.prefill or behind:
            self._sizes.interrupted(wait)
        else:
            self._sizes.observe(len(batch), result.num_logit_rows, verified - drafted, tokens, wait)
        if capture is not None:
            decoding = [slot.seq for slot in plan.decode]
            paths = [outcome.verified.path for outcome in decoded]
            self._overlap.keep(result, decoding, plan.prefill, starts, paths)
        metrics.FORWARD_SECONDS.observe(result.forward_seconds)
        metrics.VERIFY_SECONDS.observe(verified - drafted - result.forward_seconds)
        self._ended(started, (*behind, *plan.prefill), has_decodes=num_decoding > 0)

    def _compute_behind(self, running: StepInFlight) -> tuple[PrefillChunk, ...]:
        """Starts prompts behind the running step, as far as there are some and nothing is in the
        way.
        """
        if self._drafts.are_stale:
            return ()
        plan = self._scheduler.schedule_prompts()
        self._outcomes.settle(plan)
        if plan.prefill:
            result = self._overlap.compute_behind(running, plan.prefill)
            for chunk in plan.prefill:
                self._scheduler.on_committed(chunk.seq, chunk.num_tokens)
            if self._drafts.capture is not None:
                self._overlap.keep(result, [], plan.prefill, [], [])
        return tuple(plan.prefill)

    def _execute(self, step: Step) -> StepResult:
        """Runs a step and waits for it."""
        pending = self._executor.submit(step)
        pending.choose()
        return pending.finish()

    def _land(self, running: StepInFlight) -> None:
        """Waits for an overlapped step and commits its outcome."""
        result = self._overlap.finish(running)
        starts = [sequence.num_computed for sequence in running.sequences]
        paths = [outcome.verified.path for outcome in result.outcomes]
        self._outcomes.break_off(running.sequences[i] for i in result.broken)
        batch = map(VerifyRows, running.sequences, result.trees, running.confidences)
        self._outcomes.commit_all(batch, result.outcomes)
        if self._in_flight is not None:
            self._overlap.choose(self._in_flight)
        self._overlap.tell(running, result, starts, paths)
        began = max(running.started_at, self._ended_at)
        if running.chunks:
            self._sizes.interrupted(running.wait)
        else:
            self._sizes.observe(
                len(running.sequences),
                result.num_logit_rows,
                time.perf_counter() - began,
                sum(map(len, paths)),
                running.wait,
            )
        metrics.OVERLAPPED_STEPS.inc(self._in_flight is not None)
        self._ended(began, running.chunks)

    def _ended(
        self, started: float, chunks: tuple[PrefillChunk, ...] = (), has_decodes: bool = True
    ) -> None:
        self._ended_at = time.perf_counter()
        seconds = self._ended_at - started
        metrics.STEP_SECONDS.observe(seconds)
        self._scheduler.prefill_budget.observe(seconds, chunks, has_decodes)
        self._observe()

    def _draft(self, plan: StepPlan) -> Proposals:
        if not self._drafts.each:
            return NO_PROPOSALS
        requests = [DraftRequest(slot.seq, slot.max_tree_nodes) for slot in plan.decode]
        extending = [chunk.seq for chunk in plan.prefill]
        return self._drafts.propose(requests, extending, meanwhile=self._emit)

    def _batch(self, plan: StepPlan, proposals: Proposals) -> list[VerifyRows]:
        """Returns the sequences to choose tokens for: decoding ones, then ends of prompts."""
        batch = []
        trees = self._sizes.trees(plan.decode, proposals)
        for slot, tree in zip(plan.decode, trees, strict=True):
            if (grammar := slot.seq.follow_grammar()) is not None:
                tree = grammar.prune(tree)
            batch.append(VerifyRows(slot.seq, tree, proposals.of(slot.seq).confidence))
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
        """Publishes metrics at intervals, and always before the last request's end is emitted."""
        now = time.perf_counter()
        if self._has_work and now - self._published_at < metrics.PUBLISH_SECONDS:
            return
        self._published_at = now
        self._note_drafts()
        pool = self._scheduler.pool
        metrics.RUNNING.set(self._scheduler.num_running)
        metrics.WAITING.set(self._scheduler.num_waiting)
        metrics.PAGES_CACHED.set(pool.num_idle)
        metrics.PAGES_USED.set(pool.num_pages - pool.num_free - pool.num_idle)
        self._speculation.flush()
        self._sizes.publish(self._speculation)

    def _note_drafts(self) -> None:
        """Records the time since which all drafts are attached."""
        is_drafting = self._drafts.are_available
        if is_drafting and not self._drafting_since:
            self._drafting_since = time.time()
            logger.info("drafting from %s on", time.strftime("%H:%M:%S"))
        elif not is_drafting:
            self._drafting_since = 0.0
