"""Steps that are started before the outcome of the one before them is known, so that a GPU never waits for the host.

A step that only decodes is started and not waited for. While it runs, the step after it is planned for whoever surely goes on,
with pages for the longest outcome, and started too: it begins where the device stands then. Only now the first one is waited
for. So the host knows what was accepted one step late. What it then finds to have ended has surplus rows in the step under
way, which are dropped; their KV lies behind everything that was committed, and whoever gets these pages writes them later.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from foredraft.trees.draft_tree import DraftTree
from verify_service import metrics
from verify_service.controller.messages import NO_WAIT, Plan, Wait
from verify_service.drafts.drafting import Drafting
from verify_service.drafts.hidden_states import Gathered, committed_rows
from verify_service.drafts.proposals import Member
from verify_service.drafts.several import Drafts
from verify_service.executor.sampler import VerifyRows
from verify_service.executor.target_step import AheadRows, StartedStep, StepResult, TargetStep
from verify_service.scheduler.request import Sequence, Status
from verify_service.scheduler.scheduler import Scheduler
from verify_service.scheduler.step_plan import PrefillChunk

RELEASE_SECONDS = 1e-3  # between two attempts to end the wait for a draft that is late


@dataclass(slots=True)
class Flight:
    """A step under way.

    Attributes:
        sequences: In the order of its rows.
        confidences: Of the proposals that it verifies.
        draft_step: The draft's step for whose trees it waits on the device; 0 for none.
        is_followed: Whether the draft takes its outcome from the device.
        gathered: Its hidden states, where the step behind it would overwrite them, as `Drafting.gather` gave them.
        wait: For the trees that it verifies.
    """

    sequences: list[Sequence]
    started: StartedStep
    confidences: list[int]
    draft_step: int = 0
    is_followed: bool = False
    gathered: Gathered | None = None
    wait: Wait = NO_WAIT
    started_at: float = field(default_factory=time.perf_counter)


class RunAhead:
    """Starts steps and waits for them."""

    def __init__(
        self, target: TargetStep, scheduler: Scheduler, drafting: Drafting | Drafts | None
    ) -> None:
        self._target = target
        self._scheduler = scheduler
        self._drafting = drafting

    def start(self, batch: list[VerifyRows]) -> Flight:
        """Starts a step of which everything is known."""
        started = self._target.start(batch, self._capture)
        started.choose()
        sequences = [rows.sequence for rows in batch]
        return self._flight(sequences, started, [rows.confidence for rows in batch])

    def start_behind(self, flight: Flight, plan: Callable[[list[Sequence]], Plan]) -> Flight | None:
        """Starts the step after one under way.

        Args:
            plan: Says how much the sequences of the next step should verify.

        Returns:
            None where the outcome of the one under way has to be known first.
        """
        drafting = self._drafting
        if drafting is not None and drafting.is_stale:
            return _drained("draft")
        going = self._scheduler.going_on(flight.sequences)
        nodes, num_rows, _ = plan(going)
        if any(nodes):
            nodes = [_followed(*pair, num_rows) for pair in zip(going, nodes, strict=True)]
        num_rows = num_rows if any(nodes) else 1
        reads_hidden = drafting is not None and drafting.capture is not None
        if any(nodes):
            if drafting is None or not drafting.can_follow(going):
                return _drained("draft")
            if reads_hidden and drafting.keeps_much:  # for others than the one that follows
                return _drained("draft")
        elif drafting is not None and reads_hidden:
            # Which rows will be committed, and have to be kept for it? Or are too many kept?
            must_tell = flight.started.num_rows > 1 or drafting.keeps_much
            if must_tell:
                return _drained("draft")
        why_not = self._scheduler.schedule_ahead(going, num_rows - 1)
        if why_not is not None:
            return _drained(why_not)
        if not any(nodes):
            if reads_hidden and drafting is not None:
                output = flight.started.outcome.output
                flight.gathered = drafting.gather(output, len(flight.sequences))
            rows = [AheadRows(sequence, None) for sequence in going]
            return self._flight(going, self._target.start_ahead(rows, self._capture, 1, None))
        assert drafting is not None
        row_of = {sequence.request_id: i for i, sequence in enumerate(flight.sequences)}
        members = [
            Member(sequence, row_of[sequence.request_id], wanted)
            for sequence, wanted in zip(going, nodes, strict=True)
        ]
        step = drafting.follow(members, flight.started.outcome)
        if step is None:
            return _drained("draft")
        flight.is_followed = True
        if reads_hidden:
            count = len(flight.sequences) * flight.started.num_rows
            flight.gathered = drafting.gather_beside(flight.started.outcome.output, count)
        rows = [
            AheadRows(member.sequence, member.row if member.num_nodes else None)
            for member in members
        ]
        started = self._target.start_ahead(
            rows, self._capture, num_rows, lambda trees: drafting.fetch(step, trees)
        )
        behind = self._flight(going, started)
        behind.draft_step, behind.wait = step, Wait(drafting.depth, len(going), None)
        return behind

    def choose(self, flight: Flight) -> None:
        """Lets the tokens of a step be chosen, now that what the one before it gave is committed. See `StartedStep`."""
        self._await(flight, lambda: flight.started.is_ready)
        flight.started.choose()

    def finish(self, flight: Flight) -> tuple[StepResult, list[DraftTree]]:
        """Waits for a step. See `StartedStep.finish`."""
        self._await(flight, lambda: flight.started.is_done)
        finished = flight.started.finish()
        for sequence in flight.sequences:
            sequence.num_in_flight -= flight.started.num_rows
        return finished

    def tell(
        self, flight: Flight, result: StepResult, starts: list[int], paths: list[list[int]]
    ) -> None:
        """Lets the draft know what a step committed: it has it already, or gets its hidden states later."""
        drafting = self._drafting
        if drafting is None:
            return
        if flight.is_followed:
            for sequence, start in zip(flight.sequences, starts, strict=True):
                if sequence.status is Status.RUNNING:
                    drafting.followed(sequence, start)
            if flight.gathered is None:
                return
        if drafting.capture is None:
            return
        if flight.started.num_rows == 1:  # as while drafting rests
            gathered = flight.gathered or drafting.gather(result.output, len(starts))
            drafting.keep_step(flight.sequences, starts, gathered)
        else:
            committed = committed_rows(flight.sequences, (), result.first_rows, starts, paths)
            drafting.keep(result.output, committed, flight.gathered)

    def keep(
        self,
        result: StepResult,
        decoding: list[Sequence],
        chunks: list[PrefillChunk],
        starts: list[int],
        paths: list[list[int]],
    ) -> None:
        """Takes the hidden states that a step committed which was waited for; see `committed_rows` for the arguments."""
        drafting, count = self._drafting, len(decoding)
        assert drafting is not None
        # Where the prompts begin, or the last of the others.
        row = count if chunks else count - 1
        if result.first_rows[row] == row and all(len(path) == 1 for path in paths):
            # Who decodes has one row.
            count += sum(chunk.num_tokens for chunk in chunks)
            drafting.keep_step(decoding, starts, drafting.gather(result.output, count), chunks)
        else:
            committed = committed_rows(decoding, chunks, result.first_rows, starts, paths)
            drafting.keep(result.output, committed)

    def _await(self, flight: Flight, is_over: Callable[[], bool]) -> None:
        """Waits for something of a step that needs a draft's trees; a draft that does not come is not waited for."""
        drafting = self._drafting
        if flight.draft_step and drafting is not None:
            while not is_over():
                if drafting.is_late(time.perf_counter() - flight.started_at):
                    drafting.abandon(flight.draft_step)
                    time.sleep(RELEASE_SECONDS)
                time.sleep(0)  # lets other threads run, and comes back at once

    def _flight(
        self, sequences: list[Sequence], started: StartedStep, confidences: list[int] | None = None
    ) -> Flight:
        for sequence in sequences:
            sequence.num_in_flight += started.num_rows
        return Flight(sequences, started, confidences or [0] * len(sequences))

    @property
    def _capture(self) -> tuple[int, ...]:
        return (self._drafting.capture if self._drafting is not None else None) or ()


def _drained(why: str) -> Flight | None:
    """Counts a step behind which none is started, and gives none."""
    metrics.DRAINED_STEPS.labels(why).inc()
    return None


def _followed(sequence: Sequence, num_nodes: int, num_rows: int) -> int:
    """Nodes that a sequence verifies: none where its grammar takes too long to follow through a tree."""
    if not num_nodes or sequence.grammar is None or sequence.grammar.max_nodes >= num_rows - 1:
        return num_nodes
    metrics.SLOW_GRAMMARS.inc()
    return 0
