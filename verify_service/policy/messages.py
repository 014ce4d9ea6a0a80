"""What the policy is asked and told about a step, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from verify_service.policy.acceptance import DraftHistory


class Want(NamedTuple):
    """A sequence that decodes in the coming step: what it may verify at most, and whether it must.

    Its draft would read `behind` tokens first; it may grow by `left` tokens, and has `context`.
    """

    history: DraftHistory
    limit: int
    forced: bool = False
    behind: int = 0
    left: int = 1 << 30
    context: int = 0


class Offer(NamedTuple):
    """A proposal that is there already; without one, `num_nodes` is 0. A forced one is verified whole.

    One that was not `asked` for, of a sequence that another draft drafts for, takes part as a root alone.
    """

    history: DraftHistory
    num_nodes: int
    confidence: int = 0
    forced: bool = False
    asked: bool = True


class Plan(NamedTuple):
    """A step.

    Attributes:
        nodes: To draft and verify, by sequence.
        rows: Of every sequence, the root included, where steps are padded; 1 without drafts.
        tried: Sequences whose draft is asked for whole trees beside the steps that follow, which do not wait: the tokens that come
            judge them.
    """

    nodes: list[int]
    rows: int
    tried: Sequence[int] = ()


class Wait(NamedTuple):
    """What a step waited for a draft.

    Attributes:
        levels: Of the deepest tree; 0 for none.
        sequences: That were drafted for.
        seconds: None where they are part of the step's own.
        parts: With several drafts, what it waited for each that was waited for, by its number.
        lead: Seconds that passed before the target's part, whether anything was drafted or not; 0 of a step that was started behind
            another.
    """

    levels: int = 0
    sequences: int = 0
    seconds: float | None = 0.0
    parts: tuple[tuple[int, "Wait"], ...] = ()
    lead: float = 0.0


NO_WAIT = Wait()


@dataclass(frozen=True, slots=True)
class Observed:
    """A step that only decoded.

    Attributes:
        batch: Sequences.
        rows: Of each sequence where steps are padded, else of all.
        seconds: Of the target's part, at least.
        tokens: Committed.
        wait: For drafts, before.
    """

    batch: int
    rows: int
    seconds: float
    tokens: int
    wait: Wait = NO_WAIT
