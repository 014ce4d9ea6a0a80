"""The decoders of the `tokenizers` library, made incremental: each is a stage with a small state.

In the library they are functions of a whole list. As stages a token costs the same however long the
text is. Only broken UTF-8 in byte tokens may read differently (`_ByteFallback`).
"""

import codecs
import re
from collections.abc import Mapping
from typing import Any, Protocol

from foredraft.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([+0-9A-Fa-f][0-9A-Fa-f])>")

_ERRORS = "foredraft.text.each_byte"


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    """Replaces every broken byte by a replacement character; Python's own handler has one for all
    bytes of a character.
    """
    assert isinstance(error, UnicodeDecodeError)
    return "�" * (error.end - error.start), error.end


codecs.register_error(_ERRORS, _each_byte)


def piece_bytes(piece: str, decoder: Mapping[str, Any] | None) -> bytes:
    """Returns the UTF-8 bytes that one token's piece reads as in the middle of a text.

    Some tokens are half a character.
    """
    stages = build_stages(decoder)
    if any(isinstance(stage, _ByteLevel) for stage in stages):
        return _byte_level_bytes(piece)
    byte = _BYTE_TOKEN.fullmatch(piece)
    if byte is not None and any(isinstance(stage, _ByteFallback) for stage in stages):
        return bytes([int(byte[1], 16)])
    for text in ("x", piece):
        pieces = [text]
        for stage in stages:
            pieces = stage.feed(pieces)
    return "".join(pieces).encode()


class Stage(Protocol):
    """A decoder of the `tokenizers` library, made incremental."""

    @property
    def holds(self) -> bool:
        """Whether the stage holds text back."""
        ...

    @property
    def settled(self) -> bool:
        """Whether the text of the next token depends on that token alone."""
        ...

    def feed(self, pieces: list[str]) -> list[str]:
        """Takes the next pieces; returns those that became final."""
        ...

    def flush(self) -> list[str]:
        """Ends the sequence and returns the pieces that were held back."""
        ...


class _Stateless:
    holds = False

    @property
    def settled(self) -> bool:
        return True

    def flush(self) -> list[str]:
        return []


class _Join(_Stateless):
    """Joins tokens by spaces, as the library does without a decoder."""

    def __init__(self) -> None:
        self._started = False

    @property
    def settled(self) -> bool:
        return self._started

    def feed(self, pieces: list[str]) -> list[str]:
        result = []
        for piece in pieces:
            result.append(" " + piece if self._started else piece)
            self._started = True
        return result


class _Replace(_Stateless):
    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content

    def feed(self, pieces: list[str]) -> list[str]:
        return [piece.replace(self._pattern, self._content) for piece in pieces]


class _Metaspace(_Stateless):
    """Replaces the metaspace character by a space; by nothing in the first token, unless the scheme
    is `never`.
    """

    def __init__(self, replacement: str, strip_first: bool) -> None:
        self._replacement = replacement
        self._strip_next = strip_first

    @property
    def settled(self) -> bool:
        return not self._strip_next

    def feed(self, pieces: list[str]) -> list[str]:
        result = []
        for piece in pieces:
            result.append(piece.replace(self._replacement, "" if self._strip_next else " "))
            self._strip_next = False
        return result


class _Utf8:
    """Decodes bytes as UTF-8, and holds the beginning of a character until its end has come.

    Args:
        errors: What becomes of broken bytes, see `codecs`.
    """

    def __init__(self, errors: str) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)

    @property
    def holds(self) -> bool:
        return bool(self._decoder.getstate()[0])

    @property
    def settled(self) -> bool:
        return not self.holds

    def flush(self) -> list[str]:
        text = self._decoder.decode(b"", final=True)
        return [text] if text else []


class _ByteFallback(_Utf8):
    """Decodes byte tokens as UTF-8; each broken byte reads as a replacement character, as in
    SentencePiece.

    The library reads a whole run of byte tokens so when one of them is broken, good characters too.
    Nobody could stream that: some models write newlines, emoji and whole scripts in bytes, and
    their runs may have no end.
    """

    def __init__(self) -> None:
        super().__init__(_ERRORS)

    def feed(self, pieces: list[str]) -> list[str]:
        result: list[str] = []
        for piece in pieces:
            byte = _BYTE_TOKEN.fullmatch(piece)
            if byte is not None:
                text = self._decoder.decode(bytes([int(byte[1], 16)]))
                result.extend([text] if text else [])
            else:
                result.extend(self.flush())
                result.append(piece)
        return result


class _ByteLevel(_Utf8):
    """Decodes characters that each stand for a byte (GPT-2).

    Broken UTF-8 reads as replacement characters.
    """

    def __init__(self) -> None:
        super().__init__("replace")

    def feed(self, pieces: list[str]) -> list[str]:
        return [self._decoder.decode(_byte_level_bytes(piece)) for piece in pieces]


class _StripPieces(_Stateless):
    """Removes up to `count` leading characters of every token."""

    def __init__(self, content: str, count: int) -> None:
        self._content, self._count = content, count

    def feed(self, pieces: list[str]) -> list[str]:
        return [self._strip(piece) for piece in pieces]

    def _strip(self, piece: str) -> str:
        return piece[min(len(piece) - len(piece.lstrip(self._content)), self._count) :]


class _StripText(_Stateless):
    """Removes up to `count` leading characters of the whole text."""

    def __init__(self, content: str, count: int) -> None:
        self._content, self._count = content, count

    @property
    def settled(self) -> bool:
        return not self._count

    def feed(self, pieces: list[str]) -> list[str]:
        text = "".join(pieces)
        while text and self._count:
            if text[0] != self._content:
                self._count = 0
                break
            text = text[1:]
            self._count -= 1
        return [text]


def build_stages(decoder: Mapping[str, Any] | None) -> list[Stage]:
    """Creates the stages for the `decoder` entry of a tokenizer.json.

    Raises:
        CheckpointError: A decoder has no incremental form here.
    """
    if decoder is None:
        return [_Join()]
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    stages: list[Stage] = []
    fused = False
    for part in parts:
        kind = part["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "ByteLevel" and not fused:
            stages.append(_ByteLevel())
            fused = True
        elif kind == "ByteFallback" and not fused:
            stages.append(_ByteFallback())
        elif kind == "Metaspace" and not fused:
            strip_first = part.get("prepend_scheme", "always") != "never"
            stages.append(_Metaspace(part["replacement"], strip_first))
        elif kind == "Strip" and not part["stop"]:
            strip = _StripText if fused else _StripPieces
            stages.append(strip(part["content"], part["start"]))
        elif kind == "Replace" and _is_literal(part["pattern"], single=fused):
            stages.append(_Replace(part["pattern"]["String"], part["content"]))
        else:
            raise CheckpointError(f"tokenizer.json: cannot stream the decoder {part}")
    return stages


def _is_literal(pattern: Mapping[str, str], single: bool) -> bool:
    """Whether a pattern can be replaced piece by piece: after Fuse it must be a single
    character.
    """
    return "String" in pattern and (not single or len(pattern["String"]) == 1)


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes
    for U+0100 and on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    return alphabet | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
