"""Identifies checkpoints, and the target that a draft was made for. Torch-free."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.models.config_reader import read_json

_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16
_TARGET_KEYS = ("verifier_name_or_path", "target_model_name_or_path", "target_model")


def checksum(directory: Path) -> str:
    """Computes SHA-256 in hexadecimal over config.json and, for each file of weights, its name,
    size and 64 samples of 64 KiB.

    A few MiB of a file tell trained weights apart, and reading all of a large one would delay every
    start.
    """
    found = hashlib.sha256()
    config = directory / "config.json"
    if config.is_file():
        found.update(config.read_bytes())
    for path in sorted([*directory.glob("*.safetensors"), *directory.glob("pytorch_model*.bin")]):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        last = max(size - _SAMPLE_BYTES, 0)
        offsets = sorted({last * sample // (_SAMPLES - 1) for sample in range(_SAMPLES)})
        with path.open("rb") as file:
            for offset in offsets:
                file.seek(offset)
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()


def trained_for(directory: str | os.PathLike[str]) -> str:
    """Returns the target that a draft's config.json names as its own, by name or path; empty
    where it names none.
    """
    file = Path(directory) / "config.json"
    if not file.is_file():
        return ""
    raw: Mapping[str, Any] = read_json(file)
    section = raw.get("speculators_config")
    verifier = section.get("verifier") if isinstance(section, Mapping) else None
    names = [verifier.get("name_or_path")] if isinstance(verifier, Mapping) else []
    names += [raw.get(key) for key in _TARGET_KEYS]
    return next((name for name in names if isinstance(name, str) and name), "")
