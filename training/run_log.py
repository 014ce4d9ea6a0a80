"""Figures of a training run by step: kept for its curves, and written to a file as they come."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class RunLog:
    """Appends to a file of JSON lines.

    Args:
        path: The file.

    Attributes:
        entries: All so far, each with its "step".
    """

    def __init__(self, path: Path) -> None:
        self.entries: list[dict[str, Any]] = []
        self._path = path

    def add(self, entry: dict[str, Any]) -> None:
        """Writes down some figures."""
        self.entries.append(entry)
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def restore(self, entries: Sequence[dict[str, Any]]) -> None:
        """Goes on from an earlier run's, or from none; what it wrote after its checkpoint is gone."""
        self.entries = list(entries)
        self._path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))

    def having(self, figure: str) -> list[dict[str, Any]]:
        """The entries with some figure."""
        return [entry for entry in self.entries if figure in entry]
