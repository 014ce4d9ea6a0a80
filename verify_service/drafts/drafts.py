"""The drafts of an engine: none, one or several, each with its own connection and epoch.

`engine.step_decision` decides which of them drafts for a sequence. The sequence's other drafts are
synced now and then, like a draft that is not asked for a while.
"""

import time
from collections.abc import Callable, Sequence

from foredraft.runner.model_runner import ForwardOutput
from verify_service.drafts.capabilities import layers_to_capture, read_final_states
from verify_service.drafts.hidden_states import CommittedRows, Gathered
from verify_service.drafts.proposals import (
    DeviceProposals,
    DeviceRequest,
    Drafted,
    DraftRequest,
    Proposals,
)
from verify_service.drafts.proxy import DraftProxy
from verify_service.executor.base import DeviceOutcome
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.step_plan import DecodeSlot, PrefillChunk


class Drafts:
    """Holds an engine's drafts; there may be none. Belongs to the engine's thread.

    Args:
        each: The drafts in the order of preference; they are numbered in this order.

    Attributes:
        each: The drafts, in the order of their numbers.
        names: Names of the drafts.
        are_several: Whether there is more than one.
        capture: Layers whose input residual stream a draft reads; empty for the state after the
            final norm, None where no draft reads hidden states.
        read_final: Whether one of the drafts reads states after the final norm.
        assigned: Number of each sequence's draft, by request id; only with several drafts.
    """

    def __init__(self, each: Sequence[DraftProxy] = ()) -> None:
        self.each = tuple(each)
        self.names = tuple(one.name for one in self.each)
        self.are_several = len(self.each) > 1
        self.capture: tuple[int, ...] | None = None
        self.read_final = False
        self.assigned: dict[int, int] = {}
        self._proposers: dict[int, int] = {}  # by request: draft of the newest verified tree
        self._num_changes = [0] * len(self.each)

    @property
    def are_available(self) -> bool:
        """Whether there are drafts and all of them are attached."""
        return bool(self.each) and all(one.epoch for one in self.each)

    @property
    def are_stale(self) -> bool:
        """Whether a draft has been attached or lost since `refresh`."""
        return any(one.is_stale for one in self.each)

    def epoch_of(self, name: str) -> int:
        """Returns the number of a draft's current attach; 0 for none."""
        return self.each[self.names.index(name)].epoch

    def proposer(self, sequence: RequestSequence) -> int:
        """Returns the number of the draft that a sequence's newest step asked for a tree, or would
        have asked if it had wanted one.
        """
        return self._proposers.get(sequence.request_id, 0)

    def proposers(self, slots: Sequence[DecodeSlot]) -> list[int]:
        """Returns the `proposer` of each sequence of a step."""
        if not self.are_several:
            return [0] * len(slots)
        return [self._proposers.get(slot.seq.request_id, 0) for slot in slots]

    def name_of(self, sequence: RequestSequence) -> str:
        """Returns the name of a sequence's `proposer`; empty where there is a single draft."""
        return self.names[self.proposer(sequence)] if self.are_several else ""

    def assign(self, sequence: RequestSequence, number: int) -> None:
        """Lets a draft draft for a sequence from now on; only with several drafts."""
        before = self.assigned.get(sequence.request_id, number)
        self._num_changes[number] += number != before
        self.assigned[sequence.request_id] = number

    def take_changes(self) -> list[int]:
        """Returns how many sequences have changed to each draft since the last call."""
        changes, self._num_changes = self._num_changes, [0] * len(self.each)
        return changes

    def refresh(self) -> None:
        """Notices attached and lost drafts; called before each step that the host begins."""
        for one in self.each:
            one.refresh()
        self.capture = layers_to_capture(one.capabilities for one in self.each)
        self.read_final = read_final_states(one.capabilities for one in self.each)

    def release(self, slots: Sequence[int]) -> None:
        """Records that sequences have released slots."""
        for one in self.each:
            one.release(slots)

    def forget(self, sequence: RequestSequence) -> None:
        """Drops the state of a sequence that has ended."""
        self.assigned.pop(sequence.request_id, None)
        self._proposers.pop(sequence.request_id, None)
        for one in self.each:
            one.forget(sequence)

    def preempted(self, sequence: RequestSequence) -> None:
        """Records that a sequence has lost its pages."""
        for one in self.each:
            one.preempted(sequence)

    def usable_prefix(self, sequence: RequestSequence, pages: list[int]) -> int:
        """Returns how many tokens of a cached prefix need not be computed again for any draft.

        There must be at least one draft.
        """
        return min(one.usable_prefix(sequence, pages) for one in self.each)

    def close(self) -> None:
        """Ends the connections."""
        for one in self.each:
            one.close()

    # Hidden states.

    @property
    def must_sync(self) -> bool:
        """Whether a draft must be synced now, since its hidden states take much memory."""
        return any(one.must_sync for one in self.each)

    def gather(self, output: ForwardOutput, count: int, without: int | None = None) -> Gathered:
        """Copies the hidden states of the first rows of a running step, by number of the draft.

        Args:
            output: Output of the step's forward.
            count: Number of rows.
            without: Number of a draft that has taken the rows on the device itself.
        """
        return {
            number: states.gather(output, count)
            for number, one in enumerate(self.each)
            if number != without and (states := one.states) is not None
        }

    def keep(
        self,
        output: ForwardOutput,
        committed: Sequence[CommittedRows],
        gathered: Gathered | None = None,
    ) -> None:
        """Stores the hidden states of the rows that a step committed.

        Args:
            output: Output of the step's forward.
            committed: The committed rows.
            gathered: Result of `gather`, where `output` is gone; only its drafts get the rows.
        """
        for number, one in enumerate(self.each):
            rows = None if gathered is None else gathered.get(number)
            if (states := one.states) is not None and (gathered is None or rows is not None):
                states.keep(output, committed, rows)

    def keep_step(
        self,
        sequences: list[RequestSequence],
        starts: list[int],
        gathered: Gathered,
        chunks: Sequence[PrefillChunk] = (),
    ) -> None:
        """Stores the hidden states of a step with one row for each sequence, followed by prompts.

        Args:
            sequences: Sequences of the single rows.
            starts: Position of each single row.
            gathered: Result of `gather` for all rows.
            chunks: Prompts whose rows follow.
        """
        for number, rows in gathered.items():
            if (states := self.each[number].states) is not None:
                states.keep_step(sequences, starts, rows, chunks)

    # Steps.

    def propose(
        self,
        requests: Sequence[DraftRequest],
        extending: Sequence[RequestSequence],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Proposals:
        """Runs one step of every draft, all at the same time, before a step that the host begins.

        Args:
            requests: Sequences that decode now. A sequence whose draft has not caught up gets no
                tree.
            extending: Other running sequences, with tokens that drafts may not have read.
            meanwhile: Called once, while the drafts work.
        """
        started: dict[int, float] = {}
        if self.are_several:
            for one in requests:
                request = one.sequence.request_id
                self._proposers[request] = self.assigned.get(request, 0)
        try:
            for number, draft in enumerate(self.each):
                begun = time.perf_counter()
                own = self._own(number, requests) if self.are_several else requests
                draft.ask(own, extending)
                if any(one.max_nodes for one in own):
                    started[number] = begun
        finally:
            meanwhile()
        trees: dict[int, Drafted] = {}
        waits: dict[int, float] = {}
        # The slowest draft is waited for last, so that its time does not count as the others'.
        for number in sorted(started, key=lambda number: self.each[number].usual_seconds):
            trees |= self.each[number].collect()
            waits[number] = time.perf_counter() - started[number]
        return Proposals(trees, waits)

    def _own(self, number: int, requests: Sequence[DraftRequest]) -> list[DraftRequest]:
        """Returns the requests to one draft; sequences of other drafts request no tree."""
        return [
            one
            if self.assigned.get(one.sequence.request_id, 0) == number
            else DraftRequest(one.sequence, 0)
            for one in requests
        ]

    def can_follow(self, sequences: Sequence[RequestSequence]) -> bool:
        """Returns whether a draft can continue on the device behind the running step.

        All sequences must have the same draft in the running step and in the next one.
        """
        if not self.are_several:
            return bool(self.each) and self.each[0].can_follow(sequences)
        numbers = {self.assigned.get(sequence.request_id, 0) for sequence in sequences}
        numbers |= {self.proposer(sequence) for sequence in sequences}
        if len(numbers) != 1:
            return False
        [number] = numbers
        return self.each[number].can_follow(sequences)

    def follow(
        self, requests: Sequence[DeviceRequest], outcome: DeviceOutcome
    ) -> DeviceProposals | None:
        """Lets the draft of all sequences continue on the device, behind the running step.

        Returns:
            Proposals for the next step; None if the draft is lost.
        """
        number = self.proposer(requests[0].sequence)
        draft = self.each[number]
        trees = draft.follow(requests, outcome)
        return None if trees is None else DeviceProposals(trees, number, draft.depth)
