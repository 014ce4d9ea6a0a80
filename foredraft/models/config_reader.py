"""Reads values of a JSON configuration, and checks each."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError

MAX_SIZE = 2**31 - 1  # sizes and positions travel in 32 bits
MAX_LAYERS = 4096  # far above any model's


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

    def size(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """Returns a positive integer."""
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise self.fail(f"{key} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(f"{key} must be a positive integer, not {value!r}")
        if value > most:
            raise self.fail(f"{key} must be at most {most}, not {value}")
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

    def positive(self, key: str, default: float) -> float:
        """Returns a number above 0."""
        value = self.number(key, default)
        if value <= 0:
            raise self.fail(f"{key} must be above 0, not {value:g}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Returns a truth value, which some files write as 0 or 1."""
        value = self.raw.get(key)
        if value is None:
            return default
        if value not in (True, False):
            raise self.fail(f"{key} must be true or false, not {value!r}")
        return bool(value)

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
