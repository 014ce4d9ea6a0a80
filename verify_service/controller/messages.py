"""The records that engine and controller exchange about a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_CONFIDENCE = 6  # larger confidences of drafts count as this one


@dataclass(slots=True, eq=False)
class DraftHistory:
    """Results of drafting for one sequence.

    Attributes:
        group: 1 for sampled sequences, whose drafts are right less often, else 0; each group has
            its own estimates.
        chosen: Number of the draft that drafts for the sequence; -1 before one was chosen.
        tracks: Numbers of its sums in `Acceptance`, by draft and confidence.
        asked: For each draft that is asked first, the tokens that asking brought and the number of
            times, old ones counting less.
        cost: Cost of verifying the current proposal, in tokens of plain decoding.
        num_drafted: Number of its steps with drafts.
    """

    group: int = 0
    chosen: int = -1
    tracks: dict[tuple[int, int], int] = field(default_factory=dict)
    asked: dict[int, tuple[float, float]] = field(default_factory=dict)
    cost: float = 0.0
    num_drafted: int = 0


class Candidate(NamedTuple):
    """Describes a sequence that decodes in the coming step.

    Attributes:
        history: Results of drafting for it.
        limits: By draft: maximum number of nodes to verify; 0 for a draft that is not attached.
        behind: By draft: number of tokens that it must read first.
        left: Number of tokens that it may still grow by.
        context: Number of its tokens.
        forced: Whether its whole tree must be verified.
    """

    history: DraftHistory
    limits: Sequence[int]
    behind: Sequence[int] = (0,)
    left: int = 1 << 30
    context: int = 0
    forced: bool = False

    @property
    def first_draft(self) -> int:
        """The draft of a sequence whose whole tree is drafted: its own one, if that may draft for
        it, else the first that may.
        """
        own = max(self.history.chosen, 0)
        numbers = own, *range(len(self.limits))
        return next((number for number in numbers if self.limits[number]), own)


Candidates = Sequence[Candidate]


class DraftKind(NamedTuple):
    """Properties of a draft that the controller must know.

    Attributes:
        max_nodes: Number of nodes of its largest tree.
        depth: Number of levels of its largest tree.
        is_asked_first: Whether asking costs so little that the size to verify is chosen after the
            proposal has come.
        is_beside: Whether its trials run beside steps, since steps follow one another on the
            device.
    """

    max_nodes: int
    depth: int
    is_asked_first: bool = False
    is_beside: bool = False


class Offer(NamedTuple):
    """Describes a sequence's proposal, once it has come.

    Attributes:
        history: Results of drafting for the sequence.
        num_nodes: Number of nodes of the proposal; 0 without one.
        confidence: Confidence of the proposal.
        forced: Whether it must be verified whole.
        asked: Whether a draft that is asked first was asked for it.
    """

    history: DraftHistory
    num_nodes: int
    confidence: int = 0
    forced: bool = False
    asked: bool = True


class Plan(NamedTuple):
    """The controller's plan for a step.

    Attributes:
        nodes: Number of nodes to draft and verify, by sequence.
        rows: Number of rows of every sequence, the root included, where steps are padded; 1 without
            drafts.
        tried: Sequences of trials, by number of the draft. Whole trees are requested for them, but
            no step waits; later tokens judge the trees.
    """

    nodes: list[int]
    rows: int
    tried: Mapping[int, Sequence[int]] = {}


class Wait(NamedTuple):
    """A step's wait for its drafts.

    Attributes:
        levels: Number of levels of the deepest tree; 0 for none.
        sequences: Number of sequences that were drafted for.
        seconds: Seconds of the wait; None where they are part of the step's own seconds.
        parts: The wait for each draft that the step waited for, with the draft's number.
        lead: Seconds that passed before the target's part, with or without drafts; 0 for a step
            that was started before the previous one was done.
        unread: Number of tokens that the draft had to read first, beyond what a step commits.
    """

    levels: int = 0
    sequences: int = 0
    seconds: float | None = 0.0
    parts: tuple[tuple[int, "Wait"], ...] = ()
    lead: float = 0.0
    unread: int = 0


NO_WAIT = Wait()


@dataclass(frozen=True, slots=True)
class Observed:
    """Time and tokens of a step that only decoded.

    Attributes:
        batch: Number of sequences.
        rows: Number of rows of each sequence where steps are padded, else of all.
        seconds: Seconds of the target's part; with drafts on the device, of both.
        tokens: Number of tokens that were committed.
        wait: The step's wait for its drafts.
    """

    batch: int
    rows: int
    seconds: float
    tokens: int
    wait: Wait = NO_WAIT
