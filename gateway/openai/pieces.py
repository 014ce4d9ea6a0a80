"""The pieces that an answer's text is cut into."""

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer: text, reasoning, the beginning of a call, or more of the latest call's
    arguments.
    """

    text: str = ""
    name: str | None = None
    arguments: str = ""
    reasoning: str = ""


def overlap(text: str, mark: str) -> int:
    """Returns the number of characters at the end of `text` that may begin `mark`."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


def is_json(text: str) -> bool:
    """Returns whether a text is complete JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
