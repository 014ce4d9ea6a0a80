"""Keeps the figures of a training run by step for its curves, and writes them to a file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class RunLog:
    """Appends to a file of JSON lines.

    Args:
        path: Path of the file.

    Attributes:
        entries: All entries so far, each with its "step".
    """

    def __init__(self, path: Path) -> None:
        self.entries: list[dict[str, Any]] = []
        self._path = path

    def add(self, entry: dict[str, Any]) -> None:
        """Appends an entry of figures."""
        self.entries.append(entry)
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def restore(self, entries: Sequence[dict[str, Any]]) -> None:
        """Replaces all entries by the entries in an earlier run's checkpoint."""
        self.entries = list(entries)
        self._path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))

    def having(self, figure: str) -> list[dict[str, Any]]:
        """Returns the entries that have a figure."""
        return [entry for entry in self.entries if figure in entry]
