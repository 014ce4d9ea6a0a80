"""Removes near-duplicates by shared lines, and filters tables of data and minified code."""

import hashlib
from collections.abc import Iterable

MIN_LINE = 30
"""Least characters of a line that counts; shorter ones occur everywhere."""


def line_hashes(text: str) -> list[int]:
    """Returns 64-bit hashes of the stripped lines that have at least MIN_LINE characters."""
    hashes = []
    for line in text.splitlines():
        stripped = line.strip()
        if len(stripped) >= MIN_LINE:
            digest = hashlib.blake2b(stripped.encode("utf-8", "replace"), digest_size=8).digest()
            hashes.append(int.from_bytes(digest, "little"))
    return hashes


class Deduplicator:
    """Rejects a document if most of its long lines were in documents kept before.

    Args:
        max_seen: The largest share of already seen lines that a kept document may have.
    """

    def __init__(self, max_seen: float = 0.6) -> None:
        self.max_seen = max_seen
        self._lines: set[int] = set()
        self._documents: set[bytes] = set()

    def add(self, text: str) -> bool:
        """Returns True, and remembers the document, when it is new enough to keep."""
        digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()
        if digest in self._documents:
            return False
        hashes = line_hashes(text)
        if hashes:
            seen = sum(value in self._lines for value in hashes)
            if seen > self.max_seen * len(hashes):
                return False
        self._documents.add(digest)
        self._lines.update(hashes)
        return True

    def block(self, texts: Iterable[str]) -> None:
        """Remembers held-out documents, so that copies of them are not kept for training."""
        for text in texts:
            self._lines.update(line_hashes(text))


def drop_repeated_lines(text: str, seen: set[int]) -> str:
    """Removes long lines in `seen`, such as navigation and boilerplate; adds the rest to `seen`."""
    kept = []
    for line in text.splitlines():
        stripped = line.strip()
        if len(stripped) >= MIN_LINE:
            digest = hash(stripped)
            if digest in seen:
                continue
            seen.add(digest)
        kept.append(line)
    return "\n".join(kept)


def is_readable(text: str, min_chars: int = 200) -> bool:
    """Returns whether text looks written by people: many letters, short lines, no long data."""
    if len(text) < min_chars:
        return False
    lines = text.splitlines()
    if max(map(len, lines)) > 2000 or len(text) / len(lines) > 400:
        return False
    letters = sum(character.isalpha() for character in text)
    return letters > 0.4 * len(text)
