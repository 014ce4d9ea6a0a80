"""Parses Mistral's calls in streamed text.

They are a list of JSON, or a name and its arguments, after `[TOOL_CALLS]`.
"""

import re

from gateway.openai.pieces import Piece
from gateway.openai.tool_parser import HEADER, CallParser
from gateway.openai.tools import Convention

_NAME = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
_BEGIN = "[TOOL_CALLS]"


class MistralParser(CallParser):
    """Cuts one continuation into pieces. Text after the mark that is no call is left out."""

    def __init__(self) -> None:
        super().__init__(Convention.MISTRAL, _BEGIN, "}")
        self._is_listed = False

    def flush(self) -> list[Piece]:
        rest, self._buffer = self._buffer, ""
        return [Piece(text=rest)] if rest and self._state == self._text else []

    def _call(self) -> Piece | None:
        self._buffer = self._buffer.lstrip(" \r\n\t,")
        for mark in (_BEGIN, "["):
            if self._buffer.startswith(mark) and not _BEGIN.startswith(self._buffer):
                self._buffer = self._buffer[len(mark) :].lstrip(" \r\n\t")
                break
        if self._buffer.startswith("]"):
            self._buffer = self._buffer[1:]
            self._state, self._is_between = self._text, True
            return None
        self._is_listed = self._buffer.startswith("{")
        header = (HEADER if self._is_listed else _NAME).match(self._buffer)
        if header is None:
            return None
        self._buffer = self._buffer[header.end() :]
        self._begin_arguments()
        return Piece(name=header[1])

    def _after(self) -> None:
        """Skips the rest of a call, after which another call may follow."""
        if not self._is_listed:
            self._state, self._is_between = self._text, True
            return
        place = self._buffer.find(self._end)
        if place >= 0:
            self._buffer = self._buffer[place + 1 :]
            self._state = self._call
