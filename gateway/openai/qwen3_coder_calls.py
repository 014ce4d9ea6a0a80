"""Parses Qwen3 Coder's calls in streamed text: tags for the call and for each parameter.

Arguments become JSON by their schema.
"""

import contextlib
import json
import re
from collections.abc import Sequence

from gateway.openai.call_grammars import is_text, properties_of
from gateway.openai.pieces import Piece
from gateway.openai.tool_parser import CallParser
from gateway.openai.tools import Convention, Function

_FUNCTION = re.compile(r"(?:<tool_call>)?\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>")
_VALUE_END, _CALL_END, _END = "</parameter>", "</function>", "</tool_call>"
_LITERALS = {"True": "true", "False": "false", "None": "null"}


class Qwen3CoderParser(CallParser):
    """Cuts one continuation into pieces; a parameter is given when it is complete.

    Args:
        functions: Functions whose schemas tell which parameters are texts.
    """

    def __init__(self, functions: Sequence[Function]) -> None:
        super().__init__(Convention.QWEN3_CODER, "<tool_call>", _END)
        self._properties = {each.name: properties_of(each.parameters or {}) for each in functions}
        self._name = ""
        self._num_parameters = 0

    def flush(self) -> list[Piece]:
        rest, self._buffer = self._buffer, ""
        return [Piece(text=rest)] if rest and self._state in (self._text, self._call) else []

    def _call(self) -> Piece | None:
        found = _FUNCTION.match(self._buffer)
        if found is None:
            return self._no_call()
        self._buffer = self._buffer[found.end() :]
        self._name, self._num_parameters = found[1], 0
        self._state = self._arguments
        return Piece(name=self._name)

    def _arguments(self) -> Piece | None:
        found = _PARAMETER.match(self._buffer)
        if found is not None:
            value, ended, rest = self._buffer[found.end() :].partition(_VALUE_END)
            if not ended:
                return None
            self._buffer = rest
            self._num_parameters += 1
            separator = "{" if self._num_parameters == 1 else ", "
            return Piece(
                arguments=f"{separator}{json.dumps(found[1])}: {self._json(found[1], value)}"
            )
        text = self._buffer.lstrip()
        if not text.startswith(_CALL_END):
            return None
        self._buffer = text[len(_CALL_END) :]
        self._state = self._after
        return Piece(arguments="}" if self._num_parameters else "{}")

    def _json(self, key: str, value: str) -> str:
        """Converts a parameter's value to JSON, without the line breaks around it."""
        value = value.removeprefix("\n").removesuffix("\n")
        schema = self._properties.get(self._name, {}).get(key)
        if is_text(schema):
            return json.dumps(value, ensure_ascii=False)
        if value in _LITERALS:
            return _LITERALS[value]
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(value, parse_constant=_refuse)
            return value.strip()
        return json.dumps(value, ensure_ascii=False)


def _refuse(name: str) -> None:
    """Takes NaN and Infinity, which JSON has not, for text."""
    raise ValueError(name)
