"""Chooses the parser for each convention of calls."""

from collections.abc import Sequence
from typing import Any

from gateway.openai.mistral_calls import MistralParser
from gateway.openai.qwen3_coder_calls import Qwen3CoderParser
from gateway.openai.tool_parser import CallParser, DeltaWriter, ToolParser
from gateway.openai.tools import Convention, Function


def make_parser(convention: Convention, functions: Sequence[Function] = ()) -> CallParser:
    """Creates a parser of one continuation's calls."""
    if convention is Convention.MISTRAL:
        return MistralParser()
    if convention is Convention.QWEN3_CODER:
        return Qwen3CoderParser(functions)
    return ToolParser(convention)


class CallDeltas(DeltaWriter):
    """Renders the text of one choice in OpenAI's shape."""

    def __init__(self, convention: Convention, functions: Sequence[Function] = ()) -> None:
        super().__init__()
        self._parser = make_parser(convention, functions)

    def delta(self, text: str, is_last: bool) -> dict[str, Any]:
        """Returns what more text adds: `content`, `tool_calls`, both or neither."""
        pieces = self._parser.feed(text)
        return self.render(pieces + self._parser.flush() if is_last else pieces)
