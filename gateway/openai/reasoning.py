"""Separates reasoning from the answer, and sets the chat template's variables for it."""

import enum
import re
from typing import Any

from foredraft.errors import InvalidRequest
from foredraft.text.tokenizer import Tokenizer
from gateway.openai.pieces import Piece, overlap

BEGIN, END = "<think>", "</think>"
TAIL_TOKENS = 16  # last tokens of a prompt, in which an opened answer is looked for
_SWITCHES = ("enable_thinking", "thinking")


class ReasoningStyle(enum.StrEnum):
    """Notation of reasoning in a model's text, by SGLang's names.

    QWEN3: between `<think>` and `</think>` at the beginning, if at all. DEEPSEEK_R1: the same, but
    always present: the text begins with it even without `<think>`. GPT_OSS: in a channel of its
    own.
    """

    QWEN3 = "qwen3"
    DEEPSEEK_R1 = "deepseek-r1"
    GPT_OSS = "gpt-oss"


def opening(style: ReasoningStyle, tokenizer: Tokenizer, prompt: list[int]) -> bool | None:
    """Returns whether a prompt ends inside reasoning; None where that is up to the model."""
    tail = tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False).rstrip()
    if tail.endswith(BEGIN):
        return True
    if tail.endswith(END):
        return False
    return True if style is ReasoningStyle.DEEPSEEK_R1 else None


def begun(message: str) -> bool:
    """Returns whether the beginning of an answer ends inside reasoning."""
    return message.rfind(BEGIN) > message.rfind(END)


def effort_variables(template: str, effort: str) -> dict[str, Any]:
    """Returns a chat template's variables for `reasoning_effort`: its own, or its on/off switch.

    Raises:
        InvalidRequest: The template has neither.
    """
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    for name in _SWITCHES:
        if re.search(rf"\b{name}\b", template):
            return {name: effort != "none"}
    raise InvalidRequest(
        "reasoning_effort", "the model's chat template has no such setting; leave it out"
    )


def switch_variables(is_on: bool) -> dict[str, Any]:
    """Returns variables that switch reasoning on or off in templates that have a switch."""
    return dict.fromkeys(_SWITCHES, is_on)


class ThinkSplitter:
    """Cuts reasoning off the beginning of a text that streams in.

    Line breaks around it belong to neither.

    Args:
        is_open: Whether the text begins inside reasoning; None where a `<think>` begins it.
    """

    def __init__(self, is_open: bool | None) -> None:
        self._is_open = is_open
        self._buffer = ""
        self._has_begun = False  # some of the present part has been given
        self._state = self._text if is_open is False else self._start
        if is_open is False:
            self._has_begun = True

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning, as far as known."""
        return self._state == self._thought

    def feed(self, text: str) -> list[Piece]:
        """Takes more text; returns the pieces that became certain."""
        self._buffer += text
        return self._run(is_last=False)

    def flush(self) -> list[Piece]:
        """Ends the text; returns the pieces that were held back."""
        return self._run(is_last=True)

    def _run(self, is_last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while True:
            state = self._state
            piece = state(is_last)
            if piece is not None:
                pieces.append(piece)
            if self._state == state:
                return pieces

    def _start(self, is_last: bool) -> None:
        text = self._buffer.lstrip()
        if text.startswith(BEGIN):
            self._buffer = text[len(BEGIN) :]
            self._state = self._thought
        elif is_last or not BEGIN.startswith(text):
            self._has_begun = not self._is_open
            self._state = self._thought if self._is_open else self._text

    def _thought(self, is_last: bool) -> Piece | None:
        if not self._has_begun:
            self._buffer = self._buffer.lstrip("\n")
        text, found, rest = self._buffer.partition(END)
        if found:
            self._buffer, self._state, self._has_begun = rest, self._text, False
            text = text.rstrip("\n")
            return Piece(reasoning=text) if text else None
        place = len(text)
        if not is_last:
            place -= overlap(text, END)
            place = len(text[:place].rstrip("\n"))
        text, self._buffer = text[:place], text[place:]
        self._has_begun = self._has_begun or bool(text)
        return Piece(reasoning=text) if text else None

    def _text(self, is_last: bool) -> Piece | None:
        if not self._has_begun:
            self._buffer = self._buffer.lstrip("\n")
        text, self._buffer = self._buffer, ""
        self._has_begun = self._has_begun or bool(text)
        return Piece(text=text) if text else None
