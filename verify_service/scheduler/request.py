"""A sequence in the verifier: its tokens, lengths, pages and counters, and the decision when it
ends.
"""

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from foredraft.types import FinishReason, SamplingParams, SpeculationParams
from verify_service.scheduler.prefix_tree import PrefixNode
from verify_service.scheduler.token_limits import TokenLimits

if TYPE_CHECKING:  # llguidance may be absent
    from verify_service.grammar.matcher import GrammarState


class Status(enum.Enum):
    """State of a sequence. Prefilling or decoding follows from its lengths."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Appended(NamedTuple):
    """Result of appending a block of new tokens."""

    num_kept: int
    finish_reason: FinishReason | None


@dataclass(slots=True, eq=False)
class Sequence:
    """Holds a request's tokens and the scheduler's state of it.

    Attributes:
        request_id: Unique among live requests.
        prompt: Token ids, at least one.
        sampling: Sampling parameters and limits of the output.
        speculation: The request's speculation parameters.
        eos_token_ids: The model's end-of-sequence tokens.
        priority: Higher is served first.
        deadline: `time.monotonic()` seconds, or None.
        key_label: Label of the client's key, for drafts that learn from text.
        traceparent: Trace context for the draft; empty without tracing.
        grammar: State in the grammar that the output follows; None without a grammar.
        limits: Tokens that the request forbids; None where it forbids none.
        score_from: First prompt token whose log-probability is still to be computed for
            `prompt_logprobs`; None where there is none. Cached pages from there on are computed
            again.
        is_masked: Whether the allowed tokens depend on earlier tokens.
        tokens: Prompt and output.
        num_computed: Leading tokens whose KV is committed to `pages`.
        num_in_flight: Maximum number of tokens that started steps may add, whose outcome is not
            known yet.
        num_cached: Number of prompt tokens that the prefix tree had when the sequence was first
            admitted.
        pages: Page table; may cover more than `num_computed` (draft trees, pages matched ahead).
        device_pages_from: Index of the first entry of `pages` that changed since they were copied
            to a GPU, which then sets this to len(pages).
        slot: Slot number while the sequence runs, else None.
        finish_reason: Set when it has ended.
        stop_token: End or stop token that ended it; the last of `tokens`.
        num_steps: Number of decode steps, i.e. verifications.
        num_drafted: Number of tree nodes verified.
        num_accepted: Number of drafted tokens that became output.
        num_preemptions: Number of times it lost its pages.
        arrival: Order of arrival, given by the scheduler.
        page_keys: Prefix tree keys of the leading full pages; the scheduler's.
        node: Position in the prefix tree; the scheduler's.
    """

    request_id: int
    prompt: list[int]
    sampling: SamplingParams
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    deadline: float | None = None
    key_label: str = ""
    traceparent: str = ""
    grammar: "GrammarState | None" = None
    limits: TokenLimits | None = None
    score_from: int | None = field(init=False)
    is_masked: bool = field(init=False)
    tokens: list[int] = field(init=False)
    num_computed: int = 0
    num_in_flight: int = 0
    num_cached: int = 0
    pages: list[int] = field(default_factory=list)
    device_pages_from: int = 0
    slot: int | None = None
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0
    arrival: int = -1
    page_keys: list[bytes] = field(default_factory=list, repr=False)
    node: PrefixNode | None = field(default=None, repr=False)
    _stops: frozenset[int] = field(init=False, repr=False)
    # Index of the first changed entry, by reader.
    _pages_seen: dict[int, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.score_from = None
        if self.sampling.prompt_logprobs is not None:
            self.scored(self.sampling.prompt_logprobs_from)
        needs_history = self.limits is not None and self.limits.need_history
        self.is_masked = self.grammar is not None or needs_history
        eos = frozenset() if self.sampling.ignore_eos else self.eos_token_ids
        self._stops = eos.union(self.sampling.stop_token_ids)

    def pages_changed(self, first: int) -> None:
        """Notes that entries of `pages` from `first` on have changed."""
        for reader, known in self._pages_seen.items():
            self._pages_seen[reader] = min(known, first)
        self.device_pages_from = min(self.device_pages_from, first)

    def pages_changed_for(self, reader: int) -> int:
        """Returns the index of the first entry of `pages` that changed since a reader (a draft,
        by number) saw them; 0 if it never did.
        """
        return self._pages_seen.get(reader, 0)

    def take_pages_changed(self, reader: int) -> int:
        """Returns `pages_changed_for`, and notes that the reader takes the present `pages`."""
        seen = self._pages_seen
        changed = seen.get(reader, 0)
        seen[reader] = len(self.pages)
        return changed

    @property
    def num_prompt(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt)

    @property
    def num_output(self) -> int:
        """Number of tokens generated so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def output(self) -> list[int]:
        """Tokens generated so far (a copy)."""
        return self.tokens[len(self.prompt) :]

    def scored(self, end: int) -> None:
        """Notes that log-probabilities of the prompt's tokens up to the one after row `end` - 1
        are reported.
        """
        # The last row chooses the first token of the output.
        self.score_from = end if end < len(self.prompt) - 1 else None

    def newest(self, count: int) -> list[int]:
        """Returns the last tokens generated so far, at most `count`."""
        return self.tokens[max(len(self.prompt), len(self.tokens) - count) :]

    @property
    def num_output_left(self) -> int:
        """Number of tokens that it may still generate."""
        return self.sampling.max_new_tokens + len(self.prompt) - len(self.tokens)

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens whose KV is not committed; at least 1 between steps: the newest
        token.
        """
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token, the root, is left to compute."""
        return self.num_uncomputed == 1

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key: sequences with a lower rank are served first."""
        return (-self.priority, self.arrival)

    def follow_grammar(self) -> "GrammarState | None":
        """Returns the state in its grammar, moved to the end of the output."""
        grammar = self.grammar
        if (
            grammar is not None and not grammar.is_current
        ):  # the output is long to copy in every step
            grammar.resume(self.output)
        return grammar

    def append_tokens(self, tokens: list[int]) -> Appended:
        """Takes the tokens that one step chose, up to where the sequence ends.

        A stop token is kept as the last one. Sets `finish_reason` and `stop_token`. Where a grammar
        ends, so does the sequence; what it cannot follow any more is left out.
        """
        stops = self._stops
        num_left = self.num_output_left
        grammar = self.follow_grammar()
        if grammar is not None:
            if self.limits is not None:
                num_kept = self.limits.num_kept(self.newest(self.limits.num_before), tokens)
                if num_kept < len(tokens):
                    grammar.fail("no token is left to choose")
                    tokens = tokens[:num_kept]
            num_taken, has_ended = grammar.advance(tokens[:num_left])
            if has_ended:
                self.finish_reason = FinishReason.STOP
            tokens = tokens[:num_taken]
        for i, token in enumerate(tokens[:num_left]):
            if token in stops:
                self.tokens.extend(tokens[: i + 1])
                self.stop_token = token
                self.finish_reason = FinishReason.STOP
                return Appended(i + 1, FinishReason.STOP)
        self.tokens.extend(tokens[:num_left])
        if len(tokens) >= num_left and self.finish_reason is None:
            self.finish_reason = FinishReason.LENGTH
        return Appended(min(len(tokens), num_left), self.finish_reason)

    def append_token(self, token: int) -> FinishReason | None:
        """Appends one token like `append_tokens`; for sequences without a grammar."""
        self.tokens.append(token)
        if token in self._stops:
            self.stop_token = token
            self.finish_reason = FinishReason.STOP
        elif len(self.tokens) - len(self.prompt) >= self.sampling.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason

    def count_step(self, num_drafted: int, num_accepted: int) -> None:
        """Counts one verification: of `num_drafted` nodes, `num_accepted` became output."""
        self.num_steps += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
