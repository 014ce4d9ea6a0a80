"""Outputs of the engine about sequences after a step. Plain values, no protobuf."""

from collections.abc import Callable
from dataclasses import dataclass, field

from foredraft.errors import ForedraftError
from foredraft.types import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token and its best alternatives, natural logarithms."""

    logprob: float
    top_tokens: list[int]
    top_logprobs: list[float]
    rank: int = 0  # among all tokens by probability, from 1; only for prompt tokens


@dataclass(frozen=True, slots=True)
class VerifiedTree:
    """A verified tree, the indices of its accepted nodes in path order, and the name of its
    draft.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: list[int]
    draft: str = ""


@dataclass(frozen=True, slots=True)
class Finish:
    """End of a sequence: its reason and its counts."""

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
    """Output of one step for one sequence.

    Attributes:
        tag: The submitter's name of the request.
        drafted: For each token, whether a draft had proposed it.
        logprobs: Log-probabilities of each token; only when requested.
        tree: The verified tree behind these tokens; only when provenance was requested.
        prompt_logprobs: Log-probabilities of the prompt's next tokens, when requested; all of them
            come before the first token.
        finish: Present on the last output of a sequence.
    """

    tag: int
    tokens: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tree: VerifiedTree | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """State of the engine, for routing."""

    waiting: int
    running: int
    free_pages: int
    total_pages: int
    draft_available: bool
    drafting_since: float = 0.0  # seconds since 1970; 0 while a draft is missing


Sink = Callable[[list[StepOutput], Load], None]
"""Called in the engine's thread, once per step and submitter; must not block."""
