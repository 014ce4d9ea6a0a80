"""Cuts a model's answer into its parts: reasoning, text and calls."""

from dataclasses import dataclass
from typing import Protocol

from gateway.decoding import Chunk
from gateway.openai.call_parsers import CallsOrText, make_parser
from gateway.openai.harmony import HarmonyParser
from gateway.openai.pieces import Piece
from gateway.openai.reasoning import ReasoningStyle, ThinkSplitter
from gateway.openai.tool_parser import CallParser
from gateway.openai.tools import Convention, Function


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Settings for parsing the answers to a request.

    Attributes:
        convention: Notation of calls, None where calls are not parsed.
        style: Notation of reasoning, None where it is not separated.
        is_open: Whether answers begin inside reasoning; None where the model decides.
        functions: Functions that may be called.
        is_calls_or_text: Whether answers are either calls or text, never both.
    """

    convention: Convention | None = None
    style: ReasoningStyle | None = None
    is_open: bool | None = None
    functions: tuple[Function, ...] = ()
    is_calls_or_text: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the text is the answer, without parsing."""
        return self.convention is None and self.style is None

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether special tokens separate the parts, so that the text must keep them."""
        return self.is_harmony or self.convention is Convention.MISTRAL

    @property
    def is_harmony(self) -> bool:
        """Whether answers come in gpt-oss's channels."""
        return self.style is ReasoningStyle.GPT_OSS or self.convention is Convention.HARMONY


class _Splitter(Protocol):
    @property
    def is_reasoning(self) -> bool: ...
    def feed(self, text: str) -> list[Piece]: ...
    def flush(self) -> list[Piece]: ...


class AnswerParser:
    """Cuts one continuation into pieces as its text streams in.

    Attributes:
        is_plain: Whether the text is the answer, without parsing.
        num_reasoning_tokens: Number of reasoning tokens so far.
    """

    def __init__(self, form: AnswerFormat) -> None:
        self.is_plain = form.is_plain
        self.num_reasoning_tokens = 0
        self._splitter: _Splitter | None = None
        self._calls: CallParser | CallsOrText | None = None
        if form.is_harmony:
            self._splitter = HarmonyParser(form.convention is not None)
            return
        if form.style is not None:
            self._splitter = ThinkSplitter(form.is_open)
        if form.convention is not None:
            self._calls = make_parser(form.convention, form.functions, form.is_calls_or_text)

    def read(self, chunk: Chunk) -> list[Piece]:
        """Returns the pieces that a chunk makes certain."""
        if self._splitter is None:
            pieces = self.feed(chunk.text)
        else:
            # One by one, so that tokens of the reasoning are counted.
            pieces = [piece for token in chunk.tokens for piece in self.feed_token(token.text)]
        return pieces if chunk.completion is None else pieces + self.flush()

    def feed_token(self, text: str) -> list[Piece]:
        """Parses the text of one token like `feed`, and counts reasoning tokens."""
        pieces = self.feed(text)
        if self._splitter is not None and self._splitter.is_reasoning:
            self.num_reasoning_tokens += 1
        return pieces

    def feed(self, text: str) -> list[Piece]:
        """Returns the pieces that more text makes certain."""
        if self._splitter is None:
            return self._find_calls(text)
        return self._followed(self._splitter.feed(text))

    def flush(self) -> list[Piece]:
        """Ends the text; returns the pieces that were held back."""
        pieces = [] if self._splitter is None else self._followed(self._splitter.flush())
        return pieces if self._calls is None else pieces + self._calls.flush()

    def _followed(self, pieces: list[Piece]) -> list[Piece]:
        """Finds calls in the texts of pieces; returns all pieces."""
        found: list[Piece] = []
        for piece in pieces:
            found += self._find_calls(piece.text) if piece.text else [piece]
        return found

    def _find_calls(self, text: str) -> list[Piece]:
        if self._calls is not None:
            return self._calls.feed(text)
        return [Piece(text=text)] if text else []
