"""Values that cross the services' borders: sampling parameters, finish reasons. Torch-free."""

import enum
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from foredraft.errors import InvalidRequest

NO_TOKEN = -1  # marks an absent token: padding of a tree, or no choice because logits are NaN
MAX_LOGPROBS = 20
MAX_SEED = 2**64
MAX_BAD_WORDS = 1024  # sequences of tokens
MAX_BAD_WORD_TOKENS = 128
LEAST_DIVISOR = 1e-6  # of logits, by a repetition penalty
MAX_COUNT = 2**31 - 1  # largest value of the protos' fields
MAX_SPECULATION = 1024  # maximum of steps, topk and draft tokens; beyond any server's limits


class FinishReason(enum.StrEnum):
    """Reason why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class GrammarKind(enum.StrEnum):
    """Language of a grammar."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the output must follow; JSON text for schemas and structural tags."""

    kind: GrammarKind
    text: str


MAX_GRAMMAR_CHARACTERS = 2**18
# Between the parts of JSON there is one space at most: a model that likes white space could go on
# with it for ever. A schema's x-guidance comes before it.
JSON_WHITESPACE = r"\x20"


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a parameter may have; NaN is in no range.

    Attributes:
        least, most: The bounds.
        is_open: Whether `least` itself is left out.
        all_of_them: A number outside the bounds that stands for no limit.
        text: The bounds as messages have them, where the numbers themselves do not read well.
    """

    least: float
    most: float
    is_open: bool = False
    all_of_them: int | None = None
    text: str = ""

    def __contains__(self, value: float) -> bool:
        if value == self.all_of_them:
            return True
        return self.least <= value <= self.most and not (self.is_open and value == self.least)

    def __str__(self) -> str:
        bounds = self.text or f"{'(' if self.is_open else '['}{self.least}, {self.most}]"
        return f"{'' if self.all_of_them is None else f'{self.all_of_them} (all) or '}in {bounds}"


def parameter(default: Any, about: str, allowed: Range | None = None) -> Any:
    """Declares a sampling parameter: requests, messages, checks and docs take it from here.

    Args:
        default: Value where a request gives none.
        about: Effect of the parameter, in a sentence.
        allowed: Range of its values.
    """
    made = {"metadata": {"about": about, "range": allowed}}
    if callable(default):
        return field(default_factory=default, **made)  # type: ignore[call-overload]
    return field(default=default, **made)  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one sequence, and the conditions of its end."""

    temperature: float = parameter(1.0, "0 chooses greedily.", Range(0, 100))
    top_k: int = parameter(
        -1, "Keep the k most likely tokens; -1 keeps all.", Range(1, MAX_COUNT, all_of_them=-1)
    )
    top_p: float = parameter(
        1.0,
        "Keep the smallest set of tokens whose probability reaches this.",
        Range(0, 1, is_open=True),
    )
    min_p: float = parameter(
        0.0, "Drop tokens less likely than this times the most likely one.", Range(0, 1)
    )
    repetition_penalty: float = parameter(
        1.0,
        "Divides positive and multiplies negative logits of tokens seen in prompt or output.",
        Range(0, 2, is_open=True),
    )
    frequency_penalty: float = parameter(
        0.0, "Subtracted from a logit once per occurrence in the output.", Range(-2, 2)
    )
    presence_penalty: float = parameter(
        0.0, "Subtracted from the logits of tokens that occur in the output.", Range(-2, 2)
    )
    logit_bias: Mapping[int, float] = parameter(dict, "Added to the logits of these token ids.")
    seed: int = parameter(
        0, "64-bit key of the position-keyed noise.", Range(0, MAX_SEED - 1, text="[0, 2^64)")
    )
    max_new_tokens: int = parameter(
        128, "The sequence ends with LENGTH after so many.", Range(1, MAX_COUNT)
    )
    min_new_tokens: int = parameter(
        0, "End-of-sequence and stop tokens cannot be chosen before so many."
    )
    stop_token_ids: tuple[int, ...] = parameter(
        (), "Tokens that end the sequence beside the model's own end-of-sequence tokens."
    )
    ignore_eos: bool = parameter(
        False, "The model's end-of-sequence tokens do not end the sequence."
    )
    logprobs: int | None = parameter(
        None, "None for none, n >= 0 for those of emitted tokens with n alternatives each."
    )
    prompt_logprobs: int | None = parameter(
        None, "As `logprobs`, for the prompt's tokens but the first one that is reported on."
    )
    prompt_logprobs_from: int = parameter(
        0, "Index of the first token of the prompt that is reported on.", Range(0, MAX_COUNT)
    )
    bad_words: tuple[tuple[int, ...], ...] = parameter(
        (), "Sequences of tokens that the output may not hold."
    )
    allowed_token_ids: tuple[int, ...] = parameter(
        (), "The only tokens that may be chosen; all where none are given."
    )
    grammar: Grammar | None = parameter(
        None, "What the output has to look like; the sequence ends where the grammar does."
    )

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn rather than chosen greedily."""
        return self.temperature > 0

    @property
    def is_ranked(self) -> bool:
        """Whether tokens are drawn from the first of their ranking alone, which takes a look at all
        logits of a row.
        """
        return self.is_sampled and (self.top_k > 0 or self.top_p < 1)

    @property
    def is_filtered(self) -> bool:
        """Whether tokens are drawn from some of the vocabulary alone."""
        return self.is_ranked or (self.is_sampled and self.min_p > 0)

    @property
    def repetition_divisor(self) -> float:
        """The repetition penalty, but not so small that it makes logits infinite."""
        return max(self.repetition_penalty, LEAST_DIVISOR)

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on which tokens have occurred."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    def validate(self, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> None:
        """Raises InvalidRequest naming the first field outside its range."""
        for name, allowed in RANGES.items():
            if (value := getattr(self, name)) not in allowed:
                raise InvalidRequest(name, f"must be {allowed}, not {value}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise InvalidRequest(
                "min_new_tokens",
                f"must be in [0, {self.max_new_tokens}], not {self.min_new_tokens}",
            )
        most = min(MAX_LOGPROBS, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= most:
                raise InvalidRequest(name, f"must be in [0, {most}], not {count}")
        if len(self.stop_token_ids) > vocab_size:
            raise InvalidRequest("stop_token_ids", "there are more than the vocabulary has")
        check_tokens("stop_token_ids", self.stop_token_ids, vocab_size)
        check_tokens("logit_bias", self.logit_bias, vocab_size)
        for bias in self.logit_bias.values():
            if not math.isfinite(bias) or not -100 <= bias <= 100:
                raise InvalidRequest("logit_bias", f"must be in [-100, 100], not {bias}")
        self._validate_limits(vocab_size, eos_token_ids)
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
                f"has {len(self.grammar.text)} characters; {MAX_GRAMMAR_CHARACTERS} are taken at"
                " most",
            )

    def _validate_limits(self, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        held_back = {*self.stop_token_ids, *eos_token_ids} if self.min_new_tokens else set()
        if not self.bad_words and not self.allowed_token_ids:
            if len(held_back) >= vocab_size > 0:  # a draft, which knows none, asks with 0
                raise InvalidRequest(
                    "stop_token_ids", "leaves no token that may stand before min_tokens"
                )
            return
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest("bad_words", f"has more than {MAX_BAD_WORDS} sequences of tokens")
        for word in self.bad_words:
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(
                    "bad_words", f"a word has 1 to {MAX_BAD_WORD_TOKENS} tokens, not {len(word)}"
                )
        if len(self.allowed_token_ids) > vocab_size:
            raise InvalidRequest("allowed_token_ids", "there are more than the vocabulary has")
        for word in self.bad_words:
            check_tokens("bad_words", word, vocab_size)
        check_tokens("allowed_token_ids", self.allowed_token_ids, vocab_size)
        # Some token can be chosen wherever the output stands, so that no step is without one.
        free = set(self.allowed_token_ids or range(vocab_size))
        free -= {word[-1] for word in self.bad_words}
        free -= held_back
        if not free:
            name = "allowed_token_ids" if self.allowed_token_ids else "bad_words"
            raise InvalidRequest(
                name,
                "leaves no token that may stand anywhere: allow one that ends no bad word, and is"
                " no end where min_tokens holds ends back",
            )


def check_tokens(name: str, tokens: Collection[int], vocab_size: int) -> None:
    """Raises InvalidRequest, naming a field, for the first token id outside a vocabulary."""
    # Prompts are long: two passes in C find out whether there is one.
    if not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size):
        return
    token = next(token for token in tokens if not 0 <= token < vocab_size)
    raise InvalidRequest(
        name, f"token id {token} is not in the vocabulary, which has ids 0 to {vocab_size - 1}"
    )


RANGES: Mapping[str, Range] = {
    each.name: each.metadata["range"]
    for each in fields(SamplingParams)
    if each.metadata["range"] is not None
}


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """A request's settings of speculation.

    None leaves the server's setting, which is also the maximum.

    Attributes:
        enabled: Whether drafting is allowed for this request.
        num_steps: Depth of the draft tree.
        topk: Number of children per node and of beams per level.
        num_draft_tokens: Number of rows verified per step, the root included.

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


@dataclass(frozen=True, slots=True)
class FusionShape:
    """Sizes and parts of a draft's projection of hidden states.

    Attributes:
        num_inputs: Number of elements of a row of hidden states, all streams side by side.
        num_outputs: Number of elements of a row of features.
        has_projection: Whether there is a linear projection; else the row keeps its width.
        num_stream_norms: Number of streams that are normalised each by itself; 0 for none.
        normalizes_input: Whether the whole row is normalised.
        has_bias: Whether the projection has a bias.
        normalizes_output: Whether the features are normalised.
        eps: Epsilon of the norms.
    """

    num_inputs: int
    num_outputs: int
    has_projection: bool = True
    num_stream_norms: int = 0
    normalizes_input: bool = False
    has_bias: bool = False
    normalizes_output: bool = False
    eps: float = 1e-6
