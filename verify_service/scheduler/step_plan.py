"""The scheduler's plan of one step."""

from dataclasses import dataclass, field

from verify_service.scheduler.request import Sequence


@dataclass(frozen=True, slots=True)
class DecodeSlot:
    """A sequence that decodes: one root row, and room for `max_tree_nodes` more."""

    seq: Sequence
    max_tree_nodes: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A part of a sequence to compute: rows of `seq.tokens[start : start + num_tokens]`."""

    seq: Sequence
    start: int
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the chunk ends with the newest token, whose row chooses the next one."""
        return self.start + self.num_tokens == len(self.seq.tokens)


@dataclass(slots=True)
class StepPlan:
    """Lists the work of one step, best rank first.

    Attributes:
        decode: Sequences that verify a tree.
        prefill: Chunks, with at most `chunked_prefill_size` tokens in total.
        admitted: Sequences that got a slot in this step.
        preempted: Sequences that lost slot and pages in this step and wait again.
        ended: Sequences that were cancelled or ran out of time; already released.
        released_slots: Slots given back since the last plan. A draft must hear of them before
            `admitted`: a slot may be in both.
    """

    decode: list[DecodeSlot] = field(default_factory=list)
    prefill: list[PrefillChunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    released_slots: list[int] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.decode and not self.prefill
