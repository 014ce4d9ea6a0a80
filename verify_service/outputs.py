"""What the engine tells about sequences after a step. Plain values, no protobuf."""

from collections.abc import Callable
from dataclasses import dataclass, field

from foredraft.errors import ForedraftError
from foredraft.types import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one emitted token and its best alternatives, natural logarithms."""

    logprob: float
    top_tokens: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class VerifiedTree:
    """A verified tree, the indices of its accepted nodes in path order, and the name of its draft."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: list[int]
    draft: str = ""


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended, and its account."""

    reason: FinishReason
    stop_token: int | None = None
    error: ForedraftError | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    verify_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    queue_seconds: float = 0.0
    lossy: bool = False
    accepted_histogram: tuple[int, ...] = ()


@dataclass(slots=True)
class StepOutput:
    """News of one sequence.

    Attributes:
        tag: What the submitter named the request.
        drafted: For each token, whether a draft had proposed it.
        logprobs: For each token, only when asked for.
        tree: What was verified to get these tokens; only when provenance was asked for.
        finish: Present on the last output of a sequence.
    """

    tag: int
    tokens: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tree: VerifiedTree | None = None
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """State of the engine, for routing."""

    waiting: int
    running: int
    free_pages: int
    total_pages: int
    draft_available: bool


Sink = Callable[[list[StepOutput], Load], None]
"""Called in the engine's thread, once per step and submitter; must not block."""
