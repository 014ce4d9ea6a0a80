"""One sequence in the verifier: its tokens, lengths, pages and counters. Decides when it ends."""

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from foredraft.types import FinishReason, SamplingParams, SpeculationParams
from verify_service.scheduler.prefix_tree import PrefixNode

if TYPE_CHECKING:  # llguidance may be absent
    from verify_service.grammar.matcher import GrammarState


class Status(enum.Enum):
    """Where a sequence is. Prefilling or decoding follows from its lengths."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Appended(NamedTuple):
    """What became of a block of new tokens."""

    num_kept: int
    finish_reason: FinishReason | None


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens and what the scheduler knows about it.

    Attributes:
        request_id: Unique among live requests.
        prompt: Token ids, at least one.
        sampling: How tokens are chosen and when it ends.
        speculation: What the request asks of drafting.
        eos_token_ids: The model's end-of-sequence tokens.
        priority: Higher is served first.
        deadline: `time.monotonic()` seconds, or None.
        key_label: Whose request it is, for drafts that learn from text.
        traceparent: Trace context for the draft; empty where nothing is traced.
        grammar: What the output follows, if it follows a grammar.
        tokens: Prompt and output.
        num_computed: Leading tokens whose KV is committed to `pages`.
        num_in_flight: Tokens that steps which were started, and whose outcome is not known yet, may add at most.
        num_cached: Prompt tokens that the prefix tree had when it was first admitted.
        pages: Page table; may cover more than `num_computed` (draft trees, pages matched ahead).
        device_pages_from: Index of the first entry of `pages` that changed since they were copied to a GPU, which then
            sets this to len(pages).
        slot: Small number while it runs, else None.
        finish_reason: Set when it has ended.
        stop_token: The end or stop token that ended it; the last of `tokens`.
        num_steps: Decode steps, i.e. verifications.
        num_drafted: Tree nodes verified.
        num_accepted: Drafted tokens that became output.
        num_preemptions: How often it lost its pages.
        arrival: Order of arrival, given by the scheduler.
        page_keys: The scheduler's: prefix tree keys of the leading full pages.
        node: The scheduler's: where in the prefix tree it stands.
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
    _pages_seen: dict[int, int] = field(default_factory=dict, repr=False)  # by reader

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        eos = frozenset() if self.sampling.ignore_eos else self.eos_token_ids
        self._stops = eos.union(self.sampling.stop_token_ids)

    def pages_changed(self, first: int) -> None:
        """Says that entries of `pages` from `first` on are not what they were."""
        for reader, known in self._pages_seen.items():
            self._pages_seen[reader] = min(known, first)
        self.device_pages_from = min(self.device_pages_from, first)

    def pages_changed_for(self, reader: int) -> int:
        """Index of the first entry of `pages` that changed since a reader, a draft by number, saw them; 0 if it never did."""
        return self._pages_seen.get(reader, 0)

    def pages_seen_by(self, reader: int) -> None:
        """A reader has taken `pages` as they are."""
        self._pages_seen[reader] = len(self.pages)

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.tokens)

    @property
    def last_token(self) -> int:
        """The newest token; when decoding, the root."""
        return self.tokens[-1]

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def output(self) -> list[int]:
        """Tokens generated so far (a copy)."""
        return self.tokens[len(self.prompt) :]

    @property
    def num_output_left(self) -> int:
        """Tokens that it may still generate."""
        return self.sampling.max_new_tokens + len(self.prompt) - len(self.tokens)

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is not committed; at least 1 between steps: the newest token."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """True when only the newest token, the root, is left to compute."""
        return self.num_uncomputed == 1

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts sequences by who is served first."""
        return (-self.priority, self.arrival)

    def follow_grammar(self) -> "GrammarState | None":
        """Its grammar, where the output ends."""
        grammar = self.grammar
        if (
            grammar is not None and not grammar.is_current
        ):  # the output is long to copy in every step
            grammar.resume(self.output)
        return grammar

    def append_tokens(self, tokens: list[int]) -> Appended:
        """Takes the tokens that one step chose, up to where the sequence ends.

        A stop token is kept as the last one. Sets `finish_reason` and `stop_token`. Where a grammar ends, so does the
        sequence; what it cannot follow any more is left out.
        """
        stops = self._stops
        num_left = self.num_output_left
        grammar = self.follow_grammar()
        if grammar is not None:
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
        """`append_tokens` of a single one, where no grammar is followed."""
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
