"""Values that cross the services' borders: sampling parameters, finish reasons. Torch-free."""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from foredraft.errors import InvalidRequest

NO_TOKEN = -1  # where there is none: padding of a tree, or logits that are no numbers to choose by
MAX_LOGPROBS = 20
MAX_SEED = 2**64
MAX_COUNT = 2**31 - 1  # what the protos' fields hold
MAX_SPECULATION = 1024  # of steps, topk or draft tokens; beyond any server's limits


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class GrammarKind(enum.StrEnum):
    """What a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output has to look like; JSON text for schemas and structural tags."""

    kind: GrammarKind
    text: str


MAX_GRAMMAR_CHARACTERS = 2**18


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one sequence are chosen and when it ends.

    Attributes:
        temperature: 0 chooses greedily.
        top_k: Keep the k most likely tokens; -1 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches this.
        min_p: Drop tokens less likely than this times the most likely one.
        repetition_penalty: Divides positive and multiplies negative logits of tokens seen in prompt or output.
        frequency_penalty: Subtracted from a logit once per occurrence in the output.
        presence_penalty: Subtracted from the logits of tokens that occur in the output.
        logit_bias: Added to the logits of the given token ids.
        seed: 64-bit key of the position-keyed noise.
        max_new_tokens: The sequence ends with LENGTH after so many.
        min_new_tokens: End-of-sequence and stop tokens cannot be chosen before so many.
        stop_token_ids: Tokens that end the sequence beside the model's own end-of-sequence tokens.
        ignore_eos: The model's end-of-sequence tokens do not end the sequence.
        logprobs: None for none, n >= 0 for those of emitted tokens with n alternatives each.
        grammar: What the output has to look like; the sequence ends where the grammar does.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    grammar: Grammar | None = None

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequest naming the first field outside its range."""
        ranges: tuple[tuple[str, float, bool, str], ...] = (
            ("temperature", self.temperature, 0 <= self.temperature <= 100, "must be in [0, 100]"),
            (
                "top_k",
                self.top_k,
                self.top_k == -1 or 1 <= self.top_k <= MAX_COUNT,
                f"must be -1 (all) or in [1, {MAX_COUNT}]",
            ),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "must be in (0, 1]"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "must be in [0, 1]"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                0 < self.repetition_penalty <= 2,
                "must be in (0, 2]",
            ),
            (
                "frequency_penalty",
                self.frequency_penalty,
                -2 <= self.frequency_penalty <= 2,
                "must be in [-2, 2]",
            ),
            (
                "presence_penalty",
                self.presence_penalty,
                -2 <= self.presence_penalty <= 2,
                "must be in [-2, 2]",
            ),
            ("seed", self.seed, 0 <= self.seed < MAX_SEED, "must be in [0, 2^64)"),
            (
                "max_new_tokens",
                self.max_new_tokens,
                1 <= self.max_new_tokens <= MAX_COUNT,
                f"must be in [1, {MAX_COUNT}]",
            ),
            (
                "min_new_tokens",
                self.min_new_tokens,
                0 <= self.min_new_tokens <= self.max_new_tokens,
                f"must be in [0, {self.max_new_tokens}]",
            ),
        )
        for name, value, fits, message in ranges:
            # No range holds NaN, and all are bounded.
            if not fits:
                raise InvalidRequest(name, f"{message}, not {value}")
        if self.logprobs is not None and not 0 <= self.logprobs <= min(MAX_LOGPROBS, vocab_size):
            raise InvalidRequest("logprobs", f"must be in [0, {MAX_LOGPROBS}], not {self.logprobs}")
        if len(self.stop_token_ids) > vocab_size:
            raise InvalidRequest("stop_token_ids", "there are more than the vocabulary has")
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequest("stop_token_ids", f"{token} is not in the vocabulary")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                raise InvalidRequest("logit_bias", f"{token} is not in the vocabulary")
            if not math.isfinite(bias) or not -100 <= bias <= 100:
                raise InvalidRequest("logit_bias", f"must be in [-100, 100], not {bias}")
        if self.grammar is None:
            return
        # Where a grammar has ended there is nothing but an end token to choose.
        if self.ignore_eos:
            raise InvalidRequest("ignore_eos", "does not go with a grammar, which says when to end")
        if self.min_new_tokens:
            raise InvalidRequest(
                "min_new_tokens", "does not go with a grammar, which says when to end"
            )
        if len(self.grammar.text) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequest(
                "grammar",
                f"has {len(self.grammar.text)} characters; {MAX_GRAMMAR_CHARACTERS} are taken at most",
            )


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """What one request asks of speculation; None leaves the server's setting, which is also the most.

    Attributes:
        enabled: False turns drafting off for this request.
        num_steps: Depth of the draft tree.
        topk: Children per node and beams per level.
        num_draft_tokens: Rows verified per step, the root included.

    Raises:
        InvalidRequest: A number is outside [1, MAX_SPECULATION]; names it.
    """

    enabled: bool | None = None
    num_steps: int | None = None
    topk: int | None = None
    num_draft_tokens: int | None = None

    @property
    def is_off(self) -> bool:
        """Whether the request asks for plain decoding."""
        return self.enabled is False or self.num_draft_tokens == 1

    def __post_init__(self) -> None:
        for name in ("num_steps", "topk", "num_draft_tokens"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_SPECULATION:
                raise InvalidRequest(
                    f"speculation.{name}", f"must be in [1, {MAX_SPECULATION}], not {value}"
                )
