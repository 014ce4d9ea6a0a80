"""Several drafts behind what the engine knows of one: each has its own connection, epoch, news and marks.

Which of them drafts for a sequence is settled by whoever plans the step (`engine.tree_sizes`); a sequence's others are told what was
committed now and then, as one is that is not asked for a while.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from foredraft.runner.model_runner import ForwardOutput
from verify_service.drafts.drafting import Drafting
from verify_service.drafts.hidden_states import CommittedRows, Gathered
from verify_service.drafts.proposals import Drafted, Member, Wanted
from verify_service.executor.target_step import DeviceOutcome
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.step_plan import PrefillChunk


class Drafts:
    """Has the interface of `Drafting`.

    Args:
        drafts: By name, in the order of preference.

    Attributes:
        names: Of the drafts, which are numbered in this order.
        each: The drafts.
        assigned: Number of a sequence's draft, by request.
        waits: Seconds that the newest step waited for each draft that it asked.
    """

    def __init__(self, drafts: Mapping[str, Drafting]) -> None:
        self.names = tuple(drafts)
        self.each = tuple(drafts.values())
        self.assigned: dict[int, int] = {}
        self.waits: dict[int, float] = {}
        self._proposers: dict[int, int] = {}  # whose tree a sequence verifies, or verified last
        self._followed = 0  # whose trees are on the device

    @property
    def available(self) -> bool:
        """Whether all drafts are attached now."""
        return all(one.available for one in self.each)

    @property
    def followed_draft(self) -> int:
        """The draft that was followed on the device last."""
        return self._followed

    @property
    def depth(self) -> int:
        """Levels of its deepest tree."""
        return self.each[self._followed].depth

    def epoch_of(self, name: str) -> int:
        """Number of the live attach of a draft; 0 for none."""
        return self.each[self.names.index(name)].epoch

    def proposer(self, sequence: RequestSequence) -> int:
        """The draft whose tree a sequence's newest step verifies, or would have."""
        return self._proposers.get(sequence.request_id, 0)

    def refresh(self) -> None:
        """Before each step: looks whether drafts have been attached or lost meanwhile."""
        for one in self.each:
            one.refresh()

    def release(self, slots: Sequence[int]) -> None:
        """Slots that sequences gave back."""
        for one in self.each:
            one.release(slots)

    def forget(self, sequence: RequestSequence) -> None:
        """The sequence has ended."""
        self.assigned.pop(sequence.request_id, None)
        self._proposers.pop(sequence.request_id, None)
        for one in self.each:
            one.forget(sequence)

    def preempted(self, sequence: RequestSequence) -> None:
        """The sequence has lost its pages."""
        for one in self.each:
            one.preempted(sequence)

    def usable_prefix(self, sequence: RequestSequence, pages: list[int]) -> int:
        """See `HiddenStates.usable_prefix`; for the sake of all."""
        return min(one.usable_prefix(sequence, pages) for one in self.each)

    @property
    def capture(self) -> tuple[int, ...] | None:
        """What the drafts read that read hidden states; see `Drafting.capture`. One of them at most reads layers (EAGLE3)."""
        return max((one.capture for one in self.each if one.capture is not None), default=None)

    def keep(
        self,
        output: ForwardOutput,
        committed: Sequence[CommittedRows],
        gathered: Gathered | None = None,
    ) -> None:
        """Takes the hidden states that a step committed; with `gathered` only for the drafts that it is there for."""
        for one in self.each:
            one.keep(output, committed, gathered)

    def keep_step(
        self,
        sequences: list[RequestSequence],
        starts: list[int],
        gathered: Gathered,
        chunks: Sequence[PrefillChunk] = (),
    ) -> None:
        """The same of a step with one row for each sequence, and prompts behind them."""
        for one in self.each:
            one.keep_step(sequences, starts, gathered, chunks)

    @property
    def keeps_much(self) -> bool:
        """Whether a draft has to be told now; see `Drafting.keeps_much`."""
        return any(one.keeps_much for one in self.each)

    def gather(self, output: ForwardOutput, count: int) -> Gathered:
        """The hidden states of the first rows of a step under way, by draft."""
        gathered: dict[int, torch.Tensor] = {}
        for one in self.each:
            if one.capture is not None:
                gathered |= one.gather(output, count)
        return gathered

    def gather_beside(self, output: ForwardOutput, count: int) -> Gathered | None:
        """The same of a step that a draft follows on the device, for the others."""
        gathered: dict[int, torch.Tensor] = {}
        for number, one in enumerate(self.each):
            if one.capture is not None and number != self._followed:
                gathered |= one.gather(output, count)
        return gathered or None

    def close(self) -> None:
        """Ends the connections."""
        for one in self.each:
            one.close()

    def propose(
        self,
        wanted: Sequence[Wanted],
        extending: Sequence[RequestSequence],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> dict[int, Drafted]:
        """Runs one step of every draft, all at a time; see `Drafting.propose`."""
        self.waits = {}
        started: dict[int, float] = {}
        for want in wanted:
            request = want.sequence.request_id
            self._proposers[request] = self.assigned.get(request, 0)
        for number, one in enumerate(self.each):
            shares = [self._share(number, want) for want in wanted]
            begun = time.perf_counter()
            one.ask(shares, extending)
            if any(share.max_nodes for share in shares):
                started[number] = begun
        meanwhile()
        trees: dict[int, Drafted] = {}
        # One whose answers take long is waited for last, so that it does not count as the others' time.
        for number in sorted(started, key=lambda number: self.each[number].usual_seconds):
            trees |= self.each[number].collect()
            self.waits[number] = time.perf_counter() - started[number]
        return trees

    def _share(self, number: int, want: Wanted) -> Wanted:
        """What a draft is asked for a sequence."""
        is_own = self.assigned.get(want.sequence.request_id, 0) == number
        return want if is_own else Wanted(want.sequence, 0)

    @property
    def is_stale(self) -> bool:
        """Whether `refresh` has something to find out."""
        return any(one.is_stale for one in self.each)

    def can_follow(self, sequences: Sequence[RequestSequence]) -> bool:
        """Whether all sequences have one draft, and had it in the step under way, which can go on behind that."""
        numbers = {self.assigned.get(sequence.request_id, 0) for sequence in sequences}
        numbers |= {self.proposer(sequence) for sequence in sequences}
        if len(numbers) != 1:
            return False
        [number] = numbers
        return self.each[number].can_follow(sequences)

    def follow(self, members: Sequence[Member], outcome: DeviceOutcome) -> int | None:
        """Lets the draft of all members go on behind the step under way; see `Drafting.follow`."""
        self._followed = self.proposer(members[0].sequence)
        return self.each[self._followed].follow(members, outcome)

    def fetch(self, step: int, trees: torch.Tensor) -> None:
        """Copies the trees of a step that was followed; see `Drafting.fetch`."""
        self.each[self._followed].fetch(step, trees)

    def followed(self, sequence: RequestSequence, start: int) -> None:
        """What the draft took from the device is known now."""
        self.each[self._followed].followed(sequence, start)

    def is_late(self, waiting: float) -> bool:
        """Whether a target that waits for trees should wait no longer."""
        return self.each[self._followed].is_late(waiting)

    def abandon(self, step: int) -> None:
        """Ends the target's wait for trees."""
        self.each[self._followed].abandon(step)
