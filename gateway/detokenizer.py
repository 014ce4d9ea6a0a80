"""Converts token ids to text piece by piece, never giving half a character.

The joined pieces equal what `Tokenizer.decode` gives for all tokens. Only broken UTF-8 in byte
tokens may read differently (`stages._ByteFallback`).
"""

from collections.abc import Sequence

from foredraft.text.stages import build_stages
from foredraft.text.tokenizer import Tokenizer

# Number of prompt tokens that decide how the first output token reads: a character has up to 4
# bytes, and special tokens that are left out may lie between them.
CONTEXT_TOKENS = 16


class Detokenizer:
    """Turns one sequence's tokens into text as they come.

    The pieces of all tokens and of `flush`, joined, equal the library's decode of all of them,
    where byte tokens spell valid UTF-8.

    Args:
        tokenizer: The tokenizer that the ids belong to.
        context: Token ids of the prompt. Its text is not returned again, but it decides whether the
            first piece keeps its leading space and completes a character that the prompt left open.
        skip_special_tokens: Whether special tokens are left out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stages = build_stages(tokenizer.decoder)
        # Text of each token while no stage holds anything back; shared by all sequences.
        self._texts = tokenizer.settled_texts(skip_special_tokens)
        self._settled = False
        for token in context[-CONTEXT_TOKENS:]:
            self.feed(token)
        self._settled = self._is_settled()

    def feed(self, token: int) -> str:
        """Returns the text that this token completes; empty while a character is incomplete."""
        if self._settled:
            known = self._texts.get(token)
            if known is not None:
                return known
        text = self._decode(token)
        was_settled, self._settled = self._settled, self._is_settled()
        if was_settled and self._settled:
            self._texts[token] = text
        return text

    def _is_settled(self) -> bool:
        return all(stage.settled for stage in self._stages)

    def _decode(self, token: int) -> str:
        if token in self._skipped:
            return ""
        piece = self._tokenizer.token(token)
        if piece is None:
            return ""
        pieces = [piece]
        for stage in self._stages:
            pieces = stage.feed(pieces)
        return "".join(pieces)

    @property
    def holds(self) -> bool:
        """Whether a character is incomplete, so that `flush` would return some text."""
        return not self._settled and any(stage.holds for stage in self._stages)

    def flush(self) -> str:
        """Ends the sequence; returns the rest, with U+FFFD for half a character."""
        pieces: list[str] = []
        for stage in self._stages:
            pieces = stage.feed(pieces)
            pieces.extend(stage.flush())
        self._settled = self._is_settled()
        return "".join(pieces)
