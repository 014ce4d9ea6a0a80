"""Selects the sequences that a step syncs to the draft, by a pure function.

A draft must know a sequence's committed tokens before it proposes. Syncs cost time, so a sequence
is synced at once, in a step soon after, or only when a tree is requested for it.
"""

from enum import Enum
from typing import NamedTuple

PATIENCE = 32  # maximum lag, in tokens, of a sequence for which no tree is requested
MOST_READ = 512  # maximum tokens that several lagging sequences make a draft read in a step


class Sync(Enum):
    """Action of a step for one sequence.

    Attributes:
        SYNC: Sends the draft all that it does not know yet.
        DEFER: Leaves the sync to a step soon after.
        SKIP: Leaves the sync to the step that requests a tree for the sequence.
    """

    SYNC = "sync"
    DEFER = "defer"
    SKIP = "skip"


class StepFacts(NamedTuple):
    """Facts that hold for all sequences of a step.

    Attributes:
        is_suspended: Whether drafting is suspended, but for trials.
        must_sync: Whether the hidden states kept for the draft take too much memory.
        is_free: Whether reading and proposing cost the draft next to nothing.
        follows: Whether steps can follow one another on the device.
        has_prompts: Whether the step computes prompts; no step follows such a step on the device.
        has_requests: Whether the step requests a tree for any sequence.
        are_requests_alone: Whether no requested sequence uses pages whose hidden states another
            sequence must sync first.
        all_are_kept: Whether hidden states are kept for every sequence that decodes, or the draft
            reads none.
    """

    is_suspended: bool = False
    must_sync: bool = False
    is_free: bool = False
    follows: bool = False
    has_prompts: bool = False
    has_requests: bool = False
    are_requests_alone: bool = True
    all_are_kept: bool = True

    @property
    def may_skip(self) -> bool:
        """Whether sequences without a request may be skipped, whatever their lag.

        They may not where steps follow on the device, since all sequences follow then.
        """
        if self.is_free or self.must_sync or (self.follows and not self.is_suspended):
            return False
        return self.are_requests_alone

    @property
    def is_silent(self) -> bool:
        """Whether the step sends the draft nothing: `decide` would skip every sequence."""
        is_idle = self.is_suspended and not self.has_requests
        return is_idle and not (self.must_sync or self.is_free)


class SequenceFacts(NamedTuple):
    """Facts about one sequence of a step.

    Attributes:
        lag: Number of tokens that the draft must read before it can propose.
        is_requested: Whether the step requests a tree for the sequence.
        is_prompt: Whether its prompt is being computed.
        is_close: Whether the draft knows the sequence and lacks fewer than `PATIENCE` tokens.
        stands_alone: Whether it uses no page whose hidden states another sequence may have to sync
            first.
    """

    lag: int
    is_requested: bool = False
    is_prompt: bool = False
    is_close: bool = False
    stands_alone: bool = True


def decide(step: StepFacts, one: SequenceFacts, num_read: int = 0, is_full: bool = False) -> Sync:
    """Decides whether a step syncs, defers or skips one sequence.

    Args:
        step: Facts about the step.
        one: Facts about the sequence.
        num_read: Number of tokens that earlier sequences of this step make the draft read.
        is_full: Whether an earlier sequence's hidden states found no room; later sequences may use
            its pages.
    """
    if is_full:
        return Sync.DEFER
    # No step follows a step with prompts on the device, so the next step is soon enough.
    is_soon_enough = step.follows and step.has_prompts and not step.has_requests
    if is_soon_enough and (one.is_close or not one.stands_alone):
        return Sync.DEFER
    if one.is_prompt:
        return Sync.SKIP if step.may_skip and step.is_suspended else Sync.SYNC
    if not one.is_requested:
        if step.may_skip and (step.is_suspended or one.lag > PATIENCE):
            return Sync.SKIP
        # A sequence that joins may use pages that are marked as read by the draft. Where one
        # sequence follows on the device, all do; a step after one without drafts may follow too.
        joins = step.has_prompts or not step.all_are_kept
        follows = step.follows and (step.has_requests or not step.is_suspended)
        return Sync.DEFER if one.is_close and not (joins or follows) else Sync.SYNC
    # Only a few sequences with a long lag are synced in a step, since all sequences wait for them.
    is_much = num_read > 0 and one.lag > PATIENCE and num_read + one.lag > MOST_READ
    return Sync.DEFER if is_much and step.may_skip and not step.follows else Sync.SYNC
