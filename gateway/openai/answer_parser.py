"""Cuts a model's answer into the parts that it consists of."""

from gateway.openai.tool_parser import Piece, ToolParser
from gateway.openai.tools import Convention


class AnswerParser:
    """Cuts one continuation into pieces as its text streams in.

    Args:
        convention: How calls are written, None where none is looked for.
    """

    def __init__(self, convention: Convention | None) -> None:
        self._calls = None if convention is None else ToolParser(convention)

    @property
    def is_plain(self) -> bool:
        """Whether the text is the answer, as it stands."""
        return self._calls is None

    def feed(self, text: str) -> list[Piece]:
        """The pieces that became certain."""
        if self._calls is None:
            return [Piece(text=text)] if text else []
        return self._calls.feed(text)

    def flush(self) -> list[Piece]:
        """The pieces that were held back; the text has ended."""
        return [] if self._calls is None else self._calls.flush()
