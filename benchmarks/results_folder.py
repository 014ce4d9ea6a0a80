"""The folder that benchmarks write their results to."""

import argparse
import os
from pathlib import Path


def results_folder(place: str) -> Path:
    """Makes the folder that a flag names; a `type` for argparse, so that a place where there can be
    none is told before anything is measured.
    """
    folder = Path(place)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{folder}: no folder can be made: {error.strerror}"
        ) from None
    if not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{folder}: no file can be written there")
    return folder
