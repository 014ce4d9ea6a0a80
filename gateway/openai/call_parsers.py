"""Chooses the parser for each convention of calls."""

from collections.abc import Sequence
from typing import Any

from gateway.openai.mistral_calls import MistralParser
from gateway.openai.pieces import Piece
from gateway.openai.qwen3_coder_calls import Qwen3CoderParser
from gateway.openai.tool_parser import CallParser, DeltaWriter, ToolParser
from gateway.openai.tools import Convention, Function


class CallsOrText:
    """Parses an answer that is either calls or text, which its first characters decide.

    Whatever stands in the text is no call.
    """

    def __init__(self, calls: CallParser) -> None:
        self._calls = calls
        self._buffer = ""
        self._is_text: bool | None = None  # None until it is decided

    def feed(self, text: str) -> list[Piece]:
        """Takes more text; returns the pieces that became certain."""
        if self._is_text is None:
            self._buffer += text
            start = self._buffer.lstrip()
            if len(start) < len(self._calls.begin) and self._calls.begin.startswith(start):
                return []
            self._is_text = not start.startswith(self._calls.begin)
            text, self._buffer = (self._buffer if self._is_text else start), ""
        if not self._is_text:
            return self._calls.feed(text)
        return [Piece(text=text)] if text else []

    def flush(self) -> list[Piece]:
        """Ends the text; returns the pieces that were held back."""
        return [] if self._is_text else self._calls.feed(self._buffer) + self._calls.flush()


def make_parser(
    convention: Convention, functions: Sequence[Function] = (), is_calls_or_text: bool = False
) -> CallParser | CallsOrText:
    """Creates a parser of one continuation's calls."""
    parser: CallParser
    if convention is Convention.MISTRAL:
        parser = MistralParser()
    elif convention is Convention.QWEN3_CODER:
        parser = Qwen3CoderParser(functions)
    else:
        parser = ToolParser(convention)
    return CallsOrText(parser) if is_calls_or_text else parser


class CallDeltas(DeltaWriter):
    """Renders the text of one choice in OpenAI's shape."""

    def __init__(
        self,
        convention: Convention,
        functions: Sequence[Function] = (),
        is_calls_or_text: bool = False,
    ) -> None:
        super().__init__()
        self._parser = make_parser(convention, functions, is_calls_or_text)

    def delta(self, text: str, is_last: bool) -> dict[str, Any]:
        """Returns what more text adds: `content`, `tool_calls`, both or neither."""
        pieces = self._parser.feed(text)
        return self.render(pieces + self._parser.flush() if is_last else pieces)
