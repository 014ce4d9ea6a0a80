"""Token ids to text, piece by piece: what `Tokenizer.decode` would give for all of them, never half a character.
Only broken UTF-8 in byte tokens may read differently (`stages._ByteFallback`).
"""

from collections.abc import Sequence

from foredraft.text.stages import build_stages
from foredraft.text.tokenizer import Tokenizer

# How much of the prompt decides how the first output token reads: the longest character has 4 bytes,
# and special tokens that are left out may lie between them.
CONTEXT_TOKENS = 16


class Detokenizer:
    """Turns one sequence's tokens into text as they come.

    The pieces of all tokens and of `flush`, joined, equal the library's decode of all of them, where byte tokens spell
    valid UTF-8.

    Args:
        tokenizer: Whose tokens.
        context: The prompt. Its text is not given again, but it decides whether the first piece
            keeps its leading space and completes a character that the prompt left open.
        skip_special_tokens: Leave special tokens out.
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
        # What every token reads as while no stage remembers anything; shared by all sequences.
        self._texts = tokenizer.settled_texts(skip_special_tokens)
        self._settled = False
        for token in context[-CONTEXT_TOKENS:]:
            self.feed(token)
        self._settled = self._is_settled()

    def feed(self, token: int) -> str:
        """The text that became final with this token; empty while a character is incomplete."""
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
        """Whether a character is incomplete: `flush` now would give some text."""
        return not self._settled and any(stage.holds for stage in self._stages)

    def flush(self) -> str:
        """The sequence ended: what is left, with a replacement character for half a character."""
        pieces: list[str] = []
        for stage in self._stages:
            pieces = stage.feed(pieces)
            pieces.extend(stage.flush())
        self._settled = self._is_settled()
        return "".join(pieces)
