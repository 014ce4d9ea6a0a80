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

    def start(self, step: Step) -> StepInFlight:
        """Starts a step whose sequences and tokens are all known to the host."""
        started = self._executor.submit(step)
        started.choose()
        sequences = [rows.sequence for rows in step.batch]
        return self._in_flight(sequences, started, [rows.confidence for rows in step.batch])

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
        drafts = self._drafts
        if drafts.are_stale:
            return _drained("draft")
        going = self._scheduler.going_on(running.sequences)
        nodes, num_rows, _ = plan(going)
        if any(nodes):
            nodes = [_followed(*pair, num_rows) for pair in zip(going, nodes, strict=True)]
        num_rows = num_rows if any(nodes) else 1
        reads_hidden = drafts.capture is not None
        if any(nodes):
            if not drafts.can_follow(going):
                return _drained("draft")
            if reads_hidden and drafts.must_sync:  # drafts other than the one that follows
                return _drained("draft")
        elif reads_hidden and (running.started.num_rows > 1 or drafts.must_sync):
            # The rows that will be committed, and must be kept, are not known yet; or too many are
            # kept already.
            return _drained("draft")
        why_not = self._scheduler.schedule_ahead(going, num_rows - 1)
        if why_not is not None:
            return _drained(why_not)
        if not any(nodes):
            if reads_hidden:
                output = running.started.outcome.output
                running.gathered = drafts.gather(output, len(running.sequences))
            return self._start_ahead(going, Ahead(1, [None] * len(going)))
        row_of = {sequence.request_id: i for i, sequence in enumerate(running.sequences)}
        requests = [
            DeviceRequest(sequence, row_of[sequence.request_id], num_nodes)
            for sequence, num_nodes in zip(going, nodes, strict=True)
        ]
        outcome = running.started.outcome
        proposals = drafts.follow(requests, outcome)
        if proposals is None:
            return _drained("draft")
        running.followed_by = proposals.trees
        if reads_hidden:
            count = len(running.sequences) * running.started.num_rows
            gathered = drafts.gather(outcome.output, count, without=proposals.draft)
            running.gathered = gathered or None
        trees = [one.row if one.num_nodes else None for one in requests]
        behind = self._start_ahead(going, Ahead(num_rows, trees, proposals.trees.fetch))
        wait = Wait(proposals.depth, len(going), None)
        behind.proposals = proposals
        behind.wait = wait._replace(parts=((proposals.draft, wait),))
        return behind

    def compute_behind(self, running: StepInFlight, chunks: list[PrefillChunk]) -> StepResult:
        """Starts prompts behind the running step; none of the chunks is a prompt's last."""
        drafts = self._drafts
        if drafts.capture is not None:  # drafts get these rows before the prompts are computed
            count = len(running.sequences) * running.started.num_rows
            running.gathered = drafts.gather(running.started.outcome.output, count)
        pending = self._executor.submit(Step((), chunks, self._capture))
        pending.choose()
        return pending.finish()

    def _start_ahead(self, going: list[Sequence], ahead: Ahead) -> StepInFlight:
        batch = [VerifyRows(sequence, EMPTY) for sequence in going]
        started = self._executor.submit(Step(batch, capture=self._capture, ahead=ahead))
        return self._in_flight(going, started)

    def choose(self, running: StepInFlight) -> None:
        """Lets a step choose its tokens once the previous step has been committed.

        See `PendingStep.choose`.
        """
        self._await(running, lambda: running.started.is_ready)
        running.started.choose()

    def finish(self, running: StepInFlight) -> StepResult:
        """Waits for a step. See `PendingStep.finish`."""
        self._await(running, lambda: running.started.is_done)
        finished = running.started.finish()
        for sequence in running.sequences:
            sequence.num_in_flight -= running.started.num_rows
        return finished

    def _await(self, running: StepInFlight, is_over: Callable[[], bool]) -> None:
        """Waits for a step that needs a draft's trees; abandons a draft that is late."""
        if running.proposals is not None:
            trees = running.proposals.trees
            while not is_over():
                if trees.is_late(time.perf_counter() - running.started_at):
                    trees.abandon()
                    time.sleep(RELEASE_SECONDS)
                time.sleep(0)  # lets other threads run, and comes back at once

    def _in_flight(
        self, sequences: list[Sequence], started: PendingStep, confidences: list[int] | None = None
    ) -> StepInFlight:
        for sequence in sequences:
            sequence.num_in_flight += started.num_rows
        return StepInFlight(sequences, started, confidences or [0] * len(sequences))

    @property
    def _capture(self) -> tuple[int, ...]:
        return self._drafts.capture or ()


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
