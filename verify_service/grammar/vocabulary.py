"""The vocabulary in llguidance's form: the bytes of every token, and the tokens that end a text."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import llguidance

from foredraft.text.tokenizer import Tokenizer

NO_TOKEN = "NoExtensionBias"  # begins the error of llguidance for a mask without tokens
# A step's work on one row is bounded to a few milliseconds, and a grammar's automaton to some 20
# MB.
LIMITS = llguidance.LLParserLimits(
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    verbose_errors=False,
)


class _Vocabulary:
    """Provides the attributes that llguidance reads from a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        special: Iterable[int],
        eos: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(special)
        self.eos_token_id = eos
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "ignore"))


def load_vocabulary(
    path: Path, vocab_size: int, eos_token_ids: frozenset[int]
) -> llguidance.LLTokenizer:
    """Loads the vocabulary of the model in `path`.

    A model without an end token gets one behind its vocabulary, which no row of logits has.

    Args:
        vocab_size: Tokens that the model has logits for; ids without a text are allowed nowhere.

    Raises:
        CheckpointError: The tokenizer is missing or broken.
    """
    tokenizer = Tokenizer.from_dir(path)
    eos = sorted(eos_token_ids) or [vocab_size]
    size = max(vocab_size, eos[-1] + 1)
    tokens = [
        tokenizer.token_bytes(token) if tokenizer.token(token) is not None else b""
        for token in range(size)
    ]
    special = {token for token in tokenizer.special_ids if token < size}.union(eos)
    for token in eos:
        tokens[token] = tokens[token] or b"<eos>"
    wrapped = _Vocabulary(tokens, special, eos[0], lambda text: tokenizer.encode(text, False))
    return llguidance.LLTokenizer(wrapped, n_vocab=size, eos_token=eos)  # type: ignore[arg-type]
