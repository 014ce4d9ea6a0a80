"""Finds the model that a benchmark is asked to measure."""

from pathlib import Path

from foredraft.errors import ForedraftError
from foredraft.models.registry import resolve_model_path


def model_directory(asked: str) -> Path:
    """Returns the directory of `--model-path`; ends the program with the reason if there is
    none.
    """
    try:
        return resolve_model_path(asked)
    except ForedraftError as error:
        raise SystemExit(f"--model-path: {error}") from None
