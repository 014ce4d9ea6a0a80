"""What the controller is asked and told about a step, and what it answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

NO_TRIALS: Mapping[int, Sequence[int]] = {}


@dataclass(slots=True)
class DraftHistory:
    """What drafts brought to one sequence.

    Attributes:
        group: 1 for sequences that are sampled, whose guesses are right less often; each group has estimates of its own.
        chosen: Number of the draft that drafts for it; -1 before one was chosen.
        tracks: Rows of its outcomes in the drafts' tables, by draft and confidence.
        asked: By draft, how often it was asked first and what that brought in tokens, earlier times counting less.
        cost: Tokens of plain decoding that verifying the proposal under way costs.
    """

    group: int = 0
    chosen: int = -1
    tracks: dict[tuple[int, int], int] = field(default_factory=dict)
    asked: dict[int, tuple[float, float]] = field(default_factory=dict)
    cost: float = 0.0


class Want(NamedTuple):
    """A sequence that decodes in the coming step: how many nodes it may verify, and whether it must.

    Its draft would read `behind` tokens first; it may grow by `left` tokens, and has `context`. Where there are several drafts,
    `limits` and `behinds` say the same of each, with a limit of 0 for one that is not there.
    """

    history: DraftHistory
    limit: int
    forced: bool = False
    behind: int = 0
    left: int = 1 << 30
    context: int = 0
    limits: Sequence[int] = ()
    behinds: Sequence[int] = ()


class Offer(NamedTuple):
    """A proposal that is there already; without one, `num_nodes` is 0. A forced one is verified whole.

    One that was not `asked` for, of a sequence that another draft drafts for, takes part with its root and `others` nodes.
    """

    history: DraftHistory
    num_nodes: int
    confidence: int = 0
    forced: bool = False
    asked: bool = True


class Plan(NamedTuple):
    """A step.

    Attributes:
        nodes: Number of nodes to draft and verify, by sequence.
        rows: Number of rows of every sequence, the root included, where steps are padded; 1 without drafts.
        tried: By draft, sequences that it is asked whole trees for beside the steps that follow, which do not wait: the tokens
            that come judge them.
    """

    nodes: list[int]
    rows: int
    tried: Mapping[int, Sequence[int]] = NO_TRIALS


class Wait(NamedTuple):
    """What a step waited for a draft.

    Attributes:
        levels: Levels of the deepest tree; 0 for none.
        sequences: Number of sequences that were drafted for.
        seconds: None where they are part of the step's own.
        parts: With several drafts, what it waited for each that was waited for, by its number.
        lead: Seconds that passed before the target's part, whether anything was drafted or not; 0 for a step that was started
            behind another.
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
        batch: Number of sequences.
        rows: Rows of each sequence where steps are padded, else of all.
        seconds: Seconds of the target's part, at least.
        tokens: Number of tokens that were committed.
        wait: What was waited for drafts before.
    """

    batch: int
    rows: int
    seconds: float
    tokens: int
    wait: Wait = NO_WAIT
