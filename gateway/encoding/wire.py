"""Messages between the gateway and an encoding process.

A request is a length and JSON; an answer is a verdict, a length and bytes.
"""

import array
import enum
import json
import struct
from typing import Any

REQUEST_HEAD = struct.Struct("<I")
ANSWER_HEAD = struct.Struct("<BI")


class Verdict(enum.IntEnum):
    """The outcome of a job."""

    DONE = 0
    REFUSED = 1  # by the request's own fault
    FAILED = 2  # by a defect


def pack_request(operation: str, *arguments: Any) -> bytes:
    """Packs a job: `encode` (text, add_special_tokens), `chat` (messages, variables) or `decode`
    (tokens, skip_special).
    """
    body = json.dumps([operation, *arguments], ensure_ascii=False).encode()
    return REQUEST_HEAD.pack(len(body)) + body


def pack_answer(verdict: Verdict, body: bytes) -> bytes:
    """Packs an answer."""
    return ANSWER_HEAD.pack(verdict, len(body)) + body


def pack_tokens(tokens: list[int]) -> bytes:
    """Packs token ids as 32-bit integers."""
    return array.array("I", tokens).tobytes()


def unpack_tokens(body: bytes) -> list[int]:
    """Unpacks token ids."""
    tokens = array.array("I")
    tokens.frombytes(body)
    return tokens.tolist()
