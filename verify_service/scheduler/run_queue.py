"""The live sequences of a scheduler: who waits, who runs in which slot, who has to leave."""

import bisect
import heapq
import math

from foredraft.types import FinishReason
from verify_service.scheduler.page_tables import PageTables
from verify_service.scheduler.request import Sequence, Status


class RunQueue:
    """Moves sequences between waiting, running and finished.

    A sequence that stops running gives back its slot and its pages.

    Args:
        tables: The page tables.
        num_slots: Maximum number of running sequences.

    Attributes:
        waiting: Sequences in the queue, preempted ones included, best rank first.
        running: Sequences with a slot, best rank first.
        free_slots: Slots of no sequence; a heap, so that low numbers go first.
        may_admit: Whether admission may turn out otherwise than when it was last tried.
    """

    def __init__(self, tables: PageTables, num_slots: int) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.free_slots = list(range(num_slots))
        self.may_admit = False
        self._tables = tables
        self._num_slots = num_slots
        self._live: dict[int, Sequence] = {}
        self._cancelled: list[Sequence] = []
        self._next_deadline = math.inf
        self._num_arrived = 0
        self._released_slots: list[int] = []

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._live

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence."""
        seq.arrival = self._num_arrived
        self._num_arrived += 1
        self._live[seq.request_id] = seq
        self._enqueue(seq)
        self.may_admit = True
        if seq.deadline is not None:
            self._next_deadline = min(self._next_deadline, seq.deadline)

    def cancel(self, request_id: int) -> bool:
        """Marks a sequence for `drop_ended`; False when it is not known (any more)."""
        seq = self._live.get(request_id)
        if seq is not None:
            self._cancelled.append(seq)
        return seq is not None

    def has_to_drop(self, now: float) -> bool:
        """Returns whether a sequence was cancelled, or a deadline has passed.

        Args:
            now: `time.monotonic()` seconds.
        """
        return bool(self._cancelled) or now >= self._next_deadline

    def drop_ended(self, now: float) -> list[Sequence]:
        """Finishes the sequences that were cancelled or whose deadline has passed; returns them."""
        ended = []
        for seq in self._cancelled:
            if seq.status is not Status.FINISHED:
                self.finish(seq, FinishReason.CANCELLED)
                ended.append(seq)
        self._cancelled.clear()
        if now < self._next_deadline:
            return ended
        for seq in list(self._live.values()):
            if seq.deadline is not None and seq.deadline <= now:
                self.finish(seq, FinishReason.DEADLINE)
                ended.append(seq)
        deadlines = (seq.deadline for seq in self._live.values() if seq.deadline is not None)
        self._next_deadline = min(deadlines, default=math.inf)
        return ended

    def start_first(self) -> Sequence:
        """Gives the first waiting sequence a slot; there must be one. Returns the sequence."""
        seq = self.waiting.pop(0)
        seq.status = Status.RUNNING
        seq.slot = heapq.heappop(self.free_slots)
        seq.pages_changed(0)
        insert_by_rank(self.running, seq)
        return seq

    def preempt(self, seq: Sequence) -> None:
        """Sends a running sequence back to the queue; it will compute its tokens again."""
        self._detach(seq)
        if seq.grammar is not None:
            seq.grammar.release()
        seq.status = Status.WAITING
        seq.num_computed = 0
        seq.num_preemptions += 1
        self._enqueue(seq)

    def finish(self, seq: Sequence, reason: FinishReason | None = None) -> None:
        """Ends a live sequence and releases slot and pages; its full pages stay cached.

        Args:
            seq: Waiting or running sequence; one that has ended is left unchanged.
            reason: Reason, where `append_tokens` has not set one.
        """
        if seq.status is Status.FINISHED:
            return
        if seq.status is Status.RUNNING:
            self._detach(seq)
        else:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = seq.finish_reason or reason
        seq.node = None
        seq.page_keys = []
        del self._live[seq.request_id]

    def take_released_slots(self) -> list[int]:
        """Returns the slots that sequences have given back since the last call."""
        released, self._released_slots = self._released_slots, []
        return released

    def check_integrity(self) -> None:
        """Raises RuntimeError unless each slot and each live sequence is in one place."""
        slots = [seq.slot for seq in self.running] + self.free_slots
        if sorted(slot for slot in slots if slot is not None) != list(range(self._num_slots)):
            raise RuntimeError(f"slots in use and free do not add up: {slots}")
        if any(seq.pages or seq.slot is not None for seq in self.waiting):
            raise RuntimeError("a waiting sequence holds pages or a slot")
        if len(self._live) != len(self.running) + len(self.waiting):
            raise RuntimeError(f"{len(self._live)} sequences are live")

    def _detach(self, seq: Sequence) -> None:
        assert seq.slot is not None
        self.may_admit = True
        self._tables.truncate(seq, 0)
        heapq.heappush(self.free_slots, seq.slot)
        self._released_slots.append(seq.slot)
        seq.slot = None
        self.running.remove(seq)

    def _enqueue(self, seq: Sequence) -> None:
        insert_by_rank(self.waiting, seq)


def insert_by_rank(sequences: list[Sequence], seq: Sequence) -> None:
    """Inserts a sequence into a list that is sorted by rank."""
    bisect.insort(sequences, seq, key=_rank)


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank
