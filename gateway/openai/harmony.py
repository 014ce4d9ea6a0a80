"""Parses gpt-oss's answers, which consist of messages in channels.

One channel is reasoning; calls are messages addressed to functions.
"""

import re

from gateway.openai.pieces import Piece, overlap

MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_HEADS = ("<|start|>", "<|channel|>", "assistant", "to=", "<|constrain|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([\w-]+)")


class HarmonyParser:
    """Cuts one continuation into pieces.

    Args:
        with_calls: Whether functions may be called; if not, messages to functions are text.
    """

    def __init__(self, with_calls: bool) -> None:
        self._with_calls = with_calls
        self._buffer = ""
        self._is_body = False
        self._kind = "text"  # kind of the body: a field of Piece

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning, as far as known."""
        return self._is_body and self._kind == "reasoning"

    def feed(self, text: str) -> list[Piece]:
        """Takes more text; returns the pieces that became certain."""
        self._buffer += text
        return self._run(is_last=False)

    def flush(self) -> list[Piece]:
        """The pieces that were held back; the text has ended."""
        return self._run(is_last=True)

    def _run(self, is_last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while True:
            before = self._is_body, len(self._buffer)
            found = self._body(is_last) if self._is_body else self._header()
            if found is not None:
                pieces.append(found)
            if (self._is_body, len(self._buffer)) == before:
                return pieces

    def _header(self) -> Piece | None:
        """Reads a message's header, once it is complete."""
        if not self._may_be_header():
            self._is_body, self._kind = True, "text"
            return None
        head, found, rest = self._buffer.partition(MESSAGE)
        if not found:
            return None
        self._buffer, self._is_body = rest, True
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        if recipient is not None and self._with_calls:
            self._kind = "arguments"
            return Piece(name=recipient[1])
        self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "text"
        return None

    def _may_be_header(self) -> bool:
        """Returns whether the buffer may be a header; models that leave headers out write text."""
        text = self._buffer.lstrip()
        return any(text.startswith(head) or head.startswith(text) for head in _HEADS)

    def _body(self, is_last: bool) -> Piece | None:
        places = [place for end in _ENDS if (place := self._buffer.find(end)) >= 0]
        if places:
            place = min(places)
            end = next(end for end in _ENDS if self._buffer.startswith(end, place))
            # The start of another message is a part of its header.
            text, rest = self._buffer[:place], self._buffer[place:]
            self._buffer = rest if end == "<|start|>" else rest[len(end) :]
            self._is_body = False
        else:
            place = len(self._buffer)
            if not is_last:
                place -= max(overlap(self._buffer, end) for end in _ENDS)
            text, self._buffer = self._buffer[:place], self._buffer[place:]
        return Piece(**{self._kind: text}) if text else None
