"""The engine: one thread that takes requests, runs step after step, and hands out their tokens.

`step_runner` has the step: schedule, draft, execute, commit, emit.
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
from foredraft.types import FinishReason
from verify_service import metrics
from verify_service.controller.controller import Controller
from verify_service.drafts.drafts import Drafts
from verify_service.engine.gauges import Gauges
from verify_service.engine.judging import Judge, known_outcome
from verify_service.engine.live_requests import EngineRequest, Live, LiveRequests
from verify_service.engine.outcomes import Outcomes
from verify_service.engine.self_test import SelfTest
from verify_service.engine.step_runner import StepRunner
from verify_service.engine.tree_sizes import TreeSizes
from verify_service.executor.base import Executor
from verify_service.outputs import Load
from verify_service.scheduler.request import Sequence
from verify_service.scheduler.scheduler import Scheduler
from verify_service.scheduler.token_limits import TokenLimits

logger = logging.getLogger(__name__)

# Interval at which an idle engine looks at its drafts, and time without a request after which it
# does what may wait.
IDLE_SECONDS = 0.5


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
    """Serves requests, in a thread of its own.

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
        self._gauges = Gauges(scheduler, drafts, speculation)
        self._steps = StepRunner(
            executor,
            scheduler,
            drafts,
            self._sizes,
            self._outcomes,
            self._gauges,
            emit=self._emit,
            overlaps=overlap,
        )
        self._self_tests = tuple(self_tests)
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._is_checked = False  # pages and slots, since something was last done
        self._is_quiet = False  # whether there was no request for a while
        self._num_submitted = self._num_added = 0
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
            self._check_open()
            self._num_submitted += 1
            number = self._num_submitted
            self._inbox.put(lambda: self._add(number, request))
        return number

    def cancel(self, number: int) -> None:
        """Ends a request at the next step; does nothing if it has ended."""
        self._inbox.put(functools.partial(self._scheduler.cancel, number))

    def flush_cache(self) -> "Future[int]":
        """Drops cached prefixes that nothing uses; the future gives the number of pages.

        Raises:
            Unavailable: The engine has stopped.
        """
        future: Future[int] = Future()

        def flush() -> None:
            if future.set_running_or_notify_cancel():  # the caller may have cancelled it
                future.set_result(self._scheduler.prefix_tree.clear())

        with self._submit_lock:
            self._check_open()
            self._inbox.put(flush)
        return future

    def _check_open(self) -> None:
        """Raises Unavailable once nothing put into the inbox would be taken; for under the lock."""
        if self._stopping or self._failure is not None:
            raise Unavailable("the verifier is stopping; retry")

    def wake(self) -> None:
        """Lets an idle engine look at its drafts at once."""
        self._inbox.put(lambda: None)

    def load(self) -> Load:
        """Returns the load for routing; it may be a step old."""
        scheduler = self._scheduler
        return Load(
            waiting=scheduler.num_waiting,
            running=scheduler.num_running,
            free_pages=scheduler.pool.num_free + scheduler.pool.num_idle,
            total_pages=self.limits.num_pages,
            draft_available=self._drafts.are_available,
            drafting_since=self._gauges.drafting_since,
        )

    def draft_everything(self) -> None:
        """Drafts whole trees in each step from now on, whether it pays or not; for benchmarks."""
        self._sizes.draft_everything()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return self._num_added == self._num_submitted and not self._live.by_number

    @property
    def ended_at(self) -> float:
        """Time of `time.perf_counter` at which the newest step's outcome was known."""
        return self._steps.ended_at

    @property
    def failure(self) -> BaseException | None:
        """The defect that ended the engine's thread, if one did."""
        return self._failure

    def stop(self, timeout: float = 30.0) -> None:
        """Ends the thread after the running step; live requests end with UNAVAILABLE."""
        with self._submit_lock:
            self._stopping = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout)
        self._drafts.close()
        self._executor.close()

    # The methods below run in the engine's own thread.

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self._steps.has_work:
                    self._wait_for_work()
                self._take_inbox()
                if self._steps.has_work:
                    self._steps.run()
                # Outputs are emitted while a draft or the next step runs. Without these, emit them
                # here.
                is_idle = not self._steps.has_work
                if is_idle or not (self._drafts.each or self._steps.is_in_flight):
                    self._emit()
            self._steps.drain()
        except BaseException as error:
            logger.exception("the engine failed; the verifier has to be restarted")
            with self._submit_lock:  # requests submitted before are answered below
                self._failure = error
        while not self._inbox.empty():  # a defect may make taking one fail, which leaves it live
            try:
                self._take_inbox()
            except Exception:
                logger.exception("the engine failed again at its end")
        self._live.end_all(Unavailable("the verifier stopped; retry"))
        self._emit()

    def _wait_for_work(self) -> None:
        self._gauges.publish(self._steps.has_work)
        if self._start_self_test(is_quiet=False):
            return
        # Between two requests of a client, the second one would wait for it.
        if self._is_quiet and self._inbox.empty() and self._executor.prepare():
            return
        try:
            asked = self._inbox.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            self._is_quiet = True
            if self._start_self_test(is_quiet=True):
                return
            if not self._is_checked:  # looks at every page: 50 ms for 60,000
                self._scheduler.check_integrity()
                self._is_checked = True
            return
        self._is_checked = False
        asked()

    def _start_self_test(self, is_quiet: bool) -> bool:
        """Adds the requests of a self-test if one is due; returns whether one has started."""
        for test in self._self_tests:
            probes = test.due(self._drafts.epoch_of(test.draft), is_quiet)
            for probe in probes:
                with self._submit_lock:
                    self._num_submitted += 1
                    number = self._num_submitted
                self._add(number, probe)
            if probes:
                self._is_checked = False
                return True
        return False

    def _take_inbox(self) -> None:
        while not self._inbox.empty():
            self._is_checked = False
            self._inbox.get_nowait()()

    def _add(self, number: int, request: EngineRequest) -> None:
        now, self._is_quiet = time.monotonic(), False
        if not request.is_probe and any(test.interrupt() for test in self._self_tests):
            for other in self._live.probes:
                self._scheduler.cancel(other)
        self._live.add(number, Live(request, now))
        self._num_added += 1
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

    def _emit(self) -> None:
        """Hands each submitter the outputs of this step."""
        if self._live.has_news:
            self._live.emit(self.load())
