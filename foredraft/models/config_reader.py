"""Reads values of a JSON configuration, and checks each."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError


class Reader:
    """Reads a JSON object; missing keys and wrong types are errors that name the file and the
    key.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def fail(self, message: str) -> CheckpointError:
        """Returns the error to raise."""
        return CheckpointError(f"{self.where}: {message}")

    def size(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer."""
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise self.fail(f"{key} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(f"{key} must be a positive integer, not {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        """Returns a number."""
        value = self.raw.get(key)
        if value is None:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):  # Python's JSON knows NaN and Infinity
            raise self.fail(f"{key} must be a number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Returns a truth value."""
        value = self.raw.get(key)
        return default if value is None else bool(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Returns an object; empty where there is none."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.fail(f"{key} must be an object, not {value!r}")
        return value or {}


def read_json(file: Path) -> dict[str, Any]:
    """Returns a file's JSON object.

    Raises:
        CheckpointError: It cannot be read, or is something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return content
