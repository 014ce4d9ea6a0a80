"""Overlap scheduling: starts steps before the outcome of the previous step is known, so that a GPU
never waits for the host.

A step that only decodes is started without waiting for it. While it runs, the next step is planned
for the sequences that surely continue, with pages for the longest outcome, and started too; it
begins where the device stands then. Only then the host waits for the first step. So the host learns
one step late what was accepted. A sequence that has ended by then has surplus rows in the running
step, which are dropped. Their KV lies behind all committed keys, and the next owner of these pages
overwrites it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from foredraft.trees.draft_tree import EMPTY
from verify_service import metrics
from verify_service.controller.messages import NO_WAIT, Plan, Wait
from verify_service.drafts.drafts import Drafts
from verify_service.drafts.hidden_states import Gathered
from verify_service.drafts.proposals import DeviceProposals, DeviceRequest, DeviceTrees
from verify_service.executor.base import Ahead, Executor, PendingStep, Step, StepResult
from verify_service.executor.choice.sampler import VerifyRows
from verify_service.scheduler.request import Sequence
from verify_service.scheduler.scheduler import Scheduler
from verify_service.scheduler.step_plan import PrefillChunk

RELEASE_SECONDS = 1e-3  # between two attempts to end the wait for a draft that is late


@dataclass(slots=True)
class StepInFlight:
    """A running step.

    Attributes:
        sequences: Sequences in the order of the step's rows.
        started: The step as the executor runs it.
        confidences: Confidence of each sequence's proposal.
        proposals: Proposals on the device that the step verifies; None for none.
        followed_by: Trees of a draft that takes the step's outcome from the device; None for none.
        gathered: Copies of the step's hidden states by `Drafts.gather`, where the next step would
            overwrite them.
        wait: The step's wait for its proposals.
        chunks: Prompts that were computed between the step before and this one.
        started_at: Time of `time.perf_counter` at which the step was started.
    """

    sequences: list[Sequence]
    started: PendingStep
    confidences: list[int]
    proposals: DeviceProposals | None = None
    followed_by: DeviceTrees | None = None
    gathered: Gathered | None = None
    wait: Wait = NO_WAIT
    chunks: tuple[PrefillChunk, ...] = ()
    started_at: float = field(default_factory=time.perf_counter)


class OverlapScheduler:
    """Starts steps and waits for them."""

    def __init__(self, executor: Executor, scheduler: Scheduler, drafts: Drafts) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._drafts = drafts

    def start(
        self, step: Step, wait: Wait = NO_WAIT, chunks: tuple[PrefillChunk, ...] = ()
    ) -> StepInFlight:
        """Starts a step whose sequences and tokens are all known to the host.

        Args:
            step: The step.
            wait: Its wait for its proposals.
            chunks: Prompts that were computed before it.
        """
        started = self._executor.submit(step)
        started.choose()
        sequences = [rows.sequence for rows in step.batch]
        confidences = [rows.confidence for rows in step.batch]
        _count_in_flight(sequences, started)
        return StepInFlight(sequences, started, confidences, wait=wait, chunks=chunks)

    def start_behind(
        self, running: StepInFlight, plan: Callable[[list[Sequence]], Plan]
    ) -> StepInFlight | None:
        """Starts the step after the running one.

        Args:
            running: The running step.
            plan: Returns how much the sequences of the next step should verify.

        Returns:
            The next step; None where the running step's outcome must be known first.
        """
        if self._drafts.are_stale:
            return _drained("draft")
        going = self._scheduler.going_on(running.sequences)
        nodes, num_rows, _ = plan(going)
        if any(nodes):
            nodes = [_followed(*pair, num_rows) for pair in zip(going, nodes, strict=True)]
        is_drafted = any(nodes)
        if not self._may_go_on(running, going, is_drafted):
            return _drained("draft")
        why_not = self._scheduler.schedule_ahead(going, num_rows - 1 if is_drafted else 0)
        if why_not is not None:
            return _drained(why_not)
        if is_drafted:
            return self._start_drafted(running, going, nodes, num_rows)
        if self._drafts.capture is not None:
            running.gathered = self._gather(running, len(running.sequences))
        return self._start_ahead(running, going, Ahead(1, [None] * len(going)))

    def _may_go_on(self, running: StepInFlight, going: list[Sequence], is_drafted: bool) -> bool:
        """Returns whether the drafts allow a step behind the running one.

        Args:
            running: The running step.
            going: Sequences of the next step.
            is_drafted: Whether the next step verifies trees.
        """
        drafts = self._drafts
        if is_drafted and not drafts.can_follow(going):
            return False
        if drafts.capture is None:
            return True
        if drafts.must_sync:  # with trees: drafts other than the one that follows
            return False
        # Without a draft that follows, rows are kept here, so it must be known which are committed.
        return is_drafted or running.started.num_rows == 1

    def _start_drafted(
        self, running: StepInFlight, going: list[Sequence], nodes: list[int], num_rows: int
    ) -> StepInFlight | None:
        """Lets a draft follow the running step, and starts a step that verifies its trees."""
        row_of = {sequence.request_id: i for i, sequence in enumerate(running.sequences)}
        requests = [
            DeviceRequest(sequence, row_of[sequence.request_id], num_nodes)
            for sequence, num_nodes in zip(going, nodes, strict=True)
        ]
        proposals = self._drafts.follow(requests, running.started.outcome)
        if proposals is None:
            return _drained("draft")
        running.followed_by = proposals.trees
        if self._drafts.capture is not None:
            count = len(running.sequences) * running.started.num_rows
            running.gathered = self._gather(running, count, without=proposals.draft) or None
        tree_rows = [one.row if one.num_nodes else None for one in requests]
        await_trees = partial(_await_trees, proposals.trees, time.perf_counter())
        wait = Wait(proposals.depth, len(going), None)
        return self._start_ahead(
            running,
            going,
            Ahead(num_rows, tree_rows, proposals.trees.fetch, await_trees),
            proposals,
            wait._replace(parts=((proposals.draft, wait),)),
        )

    def compute_behind(self, running: StepInFlight, chunks: list[PrefillChunk]) -> StepResult:
        """Starts prompts behind the running step; none of the chunks is a prompt's last."""
        if self._drafts.capture is not None:
            # Drafts get these rows before the prompts are computed.
            count = len(running.sequences) * running.started.num_rows
            running.gathered = self._gather(running, count)
        settle = partial(self._settle, running)
        all_hidden = self._drafts.read_final
        step = Step((), chunks, self._capture, settle=settle, all_hidden=all_hidden)
        pending = self._executor.submit(step)
        pending.choose()
        return pending.finish()

    def _gather(self, running: StepInFlight, count: int, without: int | None = None) -> Gathered:
        """Copies hidden states of a running step, which the next one overwrites."""
        return self._drafts.gather(running.started.outcome.output, count, without)

    def _start_ahead(
        self,
        running: StepInFlight,
        going: list[Sequence],
        ahead: Ahead,
        proposals: DeviceProposals | None = None,
        wait: Wait = NO_WAIT,
    ) -> StepInFlight:
        batch = [VerifyRows(sequence, EMPTY) for sequence in going]
        settle = partial(self._settle, running)
        started = self._executor.submit(Step(batch, (), self._capture, ahead, settle))
        _count_in_flight(going, started)
        return StepInFlight(going, started, [0] * len(going), proposals, wait=wait)

    def choose(self, running: StepInFlight) -> None:
        """Lets a step choose its tokens once the previous step has been committed.

        See `PendingStep.choose`.
        """
        self._await(running, lambda: running.started.is_ready)
        running.started.choose()

    def finish(self, running: StepInFlight) -> StepResult:
        """Waits for a step. See `PendingStep.finish`."""
        self._settle(running)
        finished = running.started.finish()
        for sequence in running.sequences:
            sequence.num_in_flight -= running.started.num_rows
        return finished

    def _settle(self, running: StepInFlight) -> None:
        """Waits for the end of a step that is running, see `Step`."""
        self._await(running, lambda: running.started.is_done)

    def _await(self, running: StepInFlight, is_over: Callable[[], bool]) -> None:
        """Waits for a step that needs a draft's trees; abandons a draft that is late."""
        if running.proposals is not None:
            _await_trees(running.proposals.trees, running.started_at, is_over)

    @property
    def _capture(self) -> tuple[int, ...]:
        return self._drafts.capture or ()


def _await_trees(trees: DeviceTrees, started_at: float, is_over: Callable[[], bool]) -> None:
    """Waits for what needs a draft's trees; abandons a draft that is late.

    Args:
        started_at: Time of `time.perf_counter` at which the wait for the trees began.
        is_over: Returns whether what is waited for has come.
    """
    while not is_over():
        if trees.is_late(time.perf_counter() - started_at):
            trees.abandon()
            time.sleep(RELEASE_SECONDS)
        time.sleep(0)  # lets other threads run, and comes back at once


def _count_in_flight(sequences: list[Sequence], started: PendingStep) -> None:
    """Notes that a step may add as many tokens to its sequences as it has rows for each."""
    for sequence in sequences:
        sequence.num_in_flight += started.num_rows


def _drained(why: str) -> StepInFlight | None:
    """Counts a step after which no other step can be started, and returns None."""
    metrics.DRAINED_STEPS.labels(why).inc()
    return None


def _followed(sequence: Sequence, num_nodes: int, num_rows: int) -> int:
    """Returns the number of nodes that a sequence verifies.

    It is 0 where following the grammar through a tree takes too long.
    """
    if not num_nodes or sequence.grammar is None or sequence.grammar.max_nodes >= num_rows - 1:
        return num_nodes
    metrics.SLOW_GRAMMARS.inc()
    return 0
