"""Finds calls of tools in streamed text."""

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from gateway.decoding import Completion
from gateway.openai.pieces import Piece, is_json, overlap
from gateway.openai.tools import Convention

HEADER = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)'
)
_MARK = "<tool_call>"
# A header without white space, as far as it came.
_CUT_HEADER = re.compile(r'\{"name":"[^"\\]*(?:"(?:,(?:"[a-z]*"?:?)?)?)?')
_LEAST_MARK = "<tool"  # less of a mark may be text
_BETWEEN = " \t\r\n;"  # what may stand between calls, and is no text


class CallParser(ABC):
    """Cuts one continuation into pieces; the base class of the parsers of all conventions.

    Args:
        convention: Convention of calls.
        begin: Mark that begins a call.
        end: Mark that ends a call.

    Attributes:
        begin: Mark that begins a call.
    """

    def __init__(self, convention: Convention, begin: str, end: str) -> None:
        self.convention = convention
        self.begin = begin
        self._end = end
        self._buffer = ""
        self._state = self._text
        self._is_between = False  # after a call, with nothing but white space since
        self._depth = 0
        self._in_string = self._is_escaped = False

    def feed(self, text: str) -> list[Piece]:
        """Takes more text; returns the pieces that became certain."""
        self._buffer += text
        return list(self._run())

    def flush(self) -> list[Piece]:
        """Ends the text; returns the pieces that were held back."""
        rest, self._buffer = self._buffer, ""
        if self._state == self._after:
            return []
        return [Piece(text=rest)] if rest else []

    def _run(self) -> Iterator[Piece]:
        while True:
            before = self._state, len(self._buffer)
            piece = self._state()
            if piece is not None:
                yield piece
            if (self._state, len(self._buffer)) == before:
                return

    def _text(self) -> Piece | None:
        if self._is_between:
            self._buffer = self._buffer.lstrip(_BETWEEN)
            self._is_between = not self._buffer
        place = self._buffer.find(self.begin)
        if place >= 0:
            self._state = self._call
        else:
            place = len(self._buffer) - overlap(self._buffer, self.begin)
        text, self._buffer = self._buffer[:place], self._buffer[place:]
        return Piece(text=text) if text else None

    @abstractmethod
    def _call(self) -> Piece | None:
        """Reads a call's name, once it is complete."""

    def _begin_arguments(self) -> None:
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self._state = self._arguments

    def _no_call(self) -> Piece | None:
        """Returns text that only began like a call, once its end mark has come."""
        place = self._buffer.find(self._end)
        if place < 0:
            return None
        place += len(self._end)
        text, self._buffer = self._buffer[:place], self._buffer[place:]
        self._state = self._text
        return Piece(text=text)

    def _arguments(self) -> Piece | None:
        """Reads as much of a JSON value as has come; it ends where its brackets close."""
        for place, character in enumerate(self._buffer):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self._state = self._after
                    place += self._depth == 0  # below that it closes what is around a bare value
                    text, self._buffer = self._buffer[:place], self._buffer[place:]
                    return Piece(arguments=text)
        text, self._buffer = self._buffer, ""
        return Piece(arguments=text) if text else None

    def _after(self) -> None:
        """Skips the rest of a call."""
        place = self._buffer.find(self._end)
        if place >= 0:
            self._buffer = self._buffer[place + len(self._end) :]
            self._state = self._text
            self._is_between = True


def _is_cut_call(text: str) -> bool:
    """Returns whether a text is the beginning of a call that was cut, which no client can use."""
    if text.startswith(_LEAST_MARK) and _MARK.startswith(text):
        return True
    if not text.startswith(_MARK):
        return False
    header = re.sub(r"\s", "", text.removeprefix(_MARK))
    return '{"name":"'.startswith(header) or _CUT_HEADER.fullmatch(header) is not None


class ToolParser(CallParser):
    """Parses calls written as JSON.

    Text that is no call stays text. A call between marks that was cut before its name is dropped.
    """

    def __init__(self, convention: Convention) -> None:
        is_llama = convention is Convention.LLAMA
        begin = '{"name": "' if is_llama else _MARK
        super().__init__(convention, begin, "}" if is_llama else "</tool_call>")
        self._skip = 0 if is_llama else len(begin)  # before a call's JSON

    def flush(self) -> list[Piece]:
        if self.begin == _MARK and _is_cut_call(self._buffer):
            self._buffer = ""
        return super().flush()

    def _call(self) -> Piece | None:
        header = HEADER.match(self._buffer, self._skip)
        if header is not None:
            self._buffer = self._buffer[header.end() :]
            self._begin_arguments()
            return Piece(name=header[1])
        return self._no_call()


class DeltaWriter:
    """Writes the pieces of one choice in OpenAI's shape.

    Attributes:
        num_calls: Number of calls so far.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._arguments: list[str] = []  # of the newest call

    def has_whole_calls(self, end: Completion) -> bool:
        """Returns whether there are calls, and none was cut by a stop of the request."""
        return self.num_calls > 0 and (not end.is_by_request or is_json("".join(self._arguments)))

    def render(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Renders pieces: `reasoning_content`, `content`, `tool_calls`, any or none of them."""
        texts = {
            "reasoning_content": "".join(piece.reasoning for piece in pieces),
            "content": "".join(piece.text for piece in pieces),
        }
        found: dict[str, Any] = {name: text for name, text in texts.items() if text}
        calls: list[dict[str, Any]] = []
        for piece in pieces:
            if piece.name is not None:
                calls.append(
                    {
                        "index": self.num_calls,
                        "id": f"call_{uuid.uuid4().hex[:24]}",
                        "type": "function",
                        "function": {"name": piece.name, "arguments": ""},
                    }
                )
                self.num_calls += 1
                self._arguments.clear()
            elif piece.arguments:
                if not calls:
                    calls.append({"index": self.num_calls - 1, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += piece.arguments
                self._arguments.append(piece.arguments)
        if calls:
            found["tool_calls"] = calls
        return found
