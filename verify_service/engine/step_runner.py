"""One step of the engine: schedule, draft, execute, commit, emit.

Where the target can start a step before the previous one is done, steps overlap: see `overlap`.
"""

import functools
import time
from collections.abc import Callable

from foredraft.trees.draft_tree import EMPTY
from verify_service import metrics
from verify_service.controller.messages import NO_WAIT
from verify_service.drafts.drafts import Drafts
from verify_service.drafts.proposals import NO_PROPOSALS, DraftRequest, Proposals
from verify_service.engine.committed_states import CommittedStates
from verify_service.engine.gauges import Gauges
from verify_service.engine.outcomes import Outcomes
from verify_service.engine.overlap import OverlapScheduler, StepInFlight
from verify_service.engine.tree_sizes import TreeSizes
from verify_service.executor.base import Executor, Step, StepResult
from verify_service.executor.choice.sampler import VerifyRows
from verify_service.scheduler.scheduler import Scheduler
from verify_service.scheduler.step_plan import PrefillChunk, StepPlan


class StepRunner:
    """Runs steps one after another. Belongs to the engine's thread.

    Args:
        executor: Runs the target's part of each step.
        scheduler: Chooses the sequences of each step.
        drafts: The drafts.
        sizes: Chooses the sizes of trees.
        outcomes: Applies what a step chose.
        gauges: The engine's gauges.
        emit: Hands each submitter its new outputs.
        overlaps: Whether steps may be started before the outcome of the previous one is known.

    Attributes:
        ended_at: Time of `time.perf_counter` at which the newest step's outcome was known.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        drafts: Drafts,
        sizes: TreeSizes,
        outcomes: Outcomes,
        gauges: Gauges,
        emit: Callable[[], None],
        overlaps: bool,
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._drafts = drafts
        self._sizes = sizes
        self._outcomes = outcomes
        self._gauges = gauges
        self._emit = emit
        self._overlaps = overlaps
        self._overlap = OverlapScheduler(executor, scheduler, drafts)
        self._states = CommittedStates(drafts)
        self._in_flight: StepInFlight | None = None
        # Prompts that are being computed behind the step that ended last.
        self._behind: tuple[PrefillChunk, ...] = ()
        self.ended_at = 0.0

    @property
    def has_work(self) -> bool:
        """Whether `run` has something to do."""
        return self._scheduler.has_work or self._in_flight is not None

    @property
    def is_in_flight(self) -> bool:
        """Whether a step is running."""
        return self._in_flight is not None

    def run(self) -> None:
        """Runs one step to its end; starts the next one before, while steps overlap."""
        if self._in_flight is None:
            self._run_step()
        else:
            self._run_overlapped(self._in_flight)

    def drain(self) -> None:
        """Waits for a step that is running, and drops its outcome."""
        if self._in_flight is not None:
            self._overlap.finish(self._in_flight)

    def _run_step(self) -> None:
        """Schedules, drafts and executes a step, and commits it; or leaves it in flight."""
        started = time.perf_counter()
        self._drafts.refresh()
        behind, self._behind = self._behind, ()
        plan = self._schedule(with_prompts=not behind)
        proposals = self._draft(plan)
        drafted = time.perf_counter()
        metrics.DRAFT_WAIT_SECONDS.observe(drafted - started)
        if plan.is_empty:
            return
        batch = self._batch(plan, proposals)
        # Behind prompts, the host also waited for these.
        wait = NO_WAIT if behind else self._sizes.wait(plan.decode, proposals, drafted - started)
        capture, all_hidden = self._drafts.capture or (), self._drafts.read_final
        step = Step(batch, plan.prefill, capture, all_hidden=all_hidden)
        if self._overlaps and self._executor.can_overlap(step):
            self._in_flight = self._overlap.start(step, wait, behind)
            return
        starts = [slot.seq.num_computed for slot in plan.decode]
        result = self._execute(step)
        verified = time.perf_counter()
        self._outcomes.commit_step(plan, batch, result)
        if plan.prefill or behind:
            self._sizes.interrupted(wait)
        else:
            tokens = sum(len(outcome.verified.tokens) for outcome in result.outcomes)
            self._sizes.observe(len(batch), result.num_logit_rows, verified - drafted, tokens, wait)
        self._states.keep(plan, result, starts)
        metrics.FORWARD_SECONDS.observe(result.forward_seconds)
        metrics.VERIFY_SECONDS.observe(verified - drafted - result.forward_seconds)
        self._ended(started, (*behind, *plan.prefill), has_decodes=bool(plan.decode))

    def _run_overlapped(self, running: StepInFlight) -> None:
        """Starts the step after the running one, emits, and commits the running one."""
        choose = functools.partial(self._sizes.plan, is_ahead=True)
        self._in_flight = self._overlap.start_behind(running, choose)
        if self._in_flight is None:
            self._behind = self._compute_behind(running)
        self._emit()
        result = self._overlap.finish(running)
        starts = [sequence.num_computed for sequence in running.sequences]
        paths = [outcome.verified.path for outcome in result.outcomes]
        self._outcomes.break_off(running.sequences[i] for i in result.broken)
        batch = map(VerifyRows, running.sequences, result.trees, running.confidences)
        self._outcomes.commit_all(batch, result.outcomes)
        if self._in_flight is not None:
            self._overlap.choose(self._in_flight)
        self._states.keep_overlapped(running, result, starts, paths)
        began = max(running.started_at, self.ended_at)
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

    def _schedule(self, with_prompts: bool) -> StepPlan:
        """Plans a step.

        Args:
            with_prompts: False right after prompts were computed behind a step: a draft would read
                them first, once the GPU has computed them, so this step drafts nothing either.
        """
        if with_prompts:
            plan = self._scheduler.schedule(lambda seqs, rows: self._sizes.plan(seqs, rows).nodes)
        else:
            plan = self._scheduler.schedule(lambda seqs, _: [0] * len(seqs), with_prompts=False)
        self._outcomes.settle(plan)
        return plan

    def _draft(self, plan: StepPlan) -> Proposals:
        drafts = self._drafts
        if not drafts.each:
            return NO_PROPOSALS
        if self._sizes.is_silent and not (plan.prefill or drafts.must_sync):
            self._emit()
            return NO_PROPOSALS  # sooner than `propose` would find that it sends nothing
        requests = [DraftRequest(slot.seq, slot.max_tree_nodes) for slot in plan.decode]
        extending = [chunk.seq for chunk in plan.prefill]
        waits = any(one.max_nodes for one in requests)
        return drafts.propose(requests, extending, self._work if waits else self._emit)

    def _work(self) -> None:
        """Does what can be done while drafts work."""
        time.sleep(0)  # the thread that sends them the request needs the interpreter first
        self._emit()
        self._sizes.think()

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

    def _execute(self, step: Step) -> StepResult:
        """Runs a step and waits for it."""
        pending = self._executor.submit(step)
        pending.choose()
        return pending.finish()

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
            self._states.keep(plan, result, [])
        return tuple(plan.prefill)

    def _ended(
        self, started: float, chunks: tuple[PrefillChunk, ...] = (), has_decodes: bool = True
    ) -> None:
        self.ended_at = time.perf_counter()
        seconds = self.ended_at - started
        metrics.STEP_SECONDS.observe(seconds)
        self._scheduler.prefill_budget.observe(seconds, chunks, has_decodes)
        self._gauges.publish(self.has_work)
