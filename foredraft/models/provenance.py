"""Identifies checkpoints, and the target that a draft was made for. Torch-free."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.models.config import ModelConfig
from foredraft.models.config_reader import read_json
from foredraft.models.weight_files import weight_files

_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16
_TARGET_KEYS = ("verifier_name_or_path", "target_model_name_or_path", "target_model")


def model_checksum(directory: Path) -> str:
    """Computes the checksum of a whole model, which notes in config.json do not change: of what
    is read of that file, and of the weights as `checksum` samples them.
    """
    config = _fields(ModelConfig.from_dir(directory))
    return _checksum(directory, json.dumps(config, sort_keys=True).encode())


def checksum(directory: Path) -> str:
    """Computes SHA-256 in hexadecimal over config.json and, for each file of weights that is
    loaded, its name, size and 64 samples of 64 KiB.

    A few MiB of a file tell trained weights apart, and reading all of a large one would delay every
    start.
    """
    config = directory / "config.json"
    return _checksum(directory, config.read_bytes() if config.is_file() else b"")


def _checksum(directory: Path, config: bytes) -> str:
    found = hashlib.sha256(config)
    files = weight_files(directory, "model.safetensors")
    for path in files or weight_files(directory, "pytorch_model.bin"):
        if not path.is_file():  # of a model whose weights are not loaded
            continue
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        last = max(size - _SAMPLE_BYTES, 0)
        offsets = sorted({last * sample // (_SAMPLES - 1) for sample in range(_SAMPLES)})
        with path.open("rb") as file:
            for offset in offsets:
                file.seek(offset)
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()


def _fields(value: Any) -> Any:
    """Returns a dataclass as a dictionary without fields that have their default, so that later
    versions may add fields.
    """
    if isinstance(value, tuple):
        return [_fields(one) for one in value]
    if not dataclasses.is_dataclass(value):
        return dict(value) if isinstance(value, Mapping) else value
    kept = {}
    for field in dataclasses.fields(value):
        own = getattr(value, field.name)
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if own != default:
            kept[field.name] = _fields(own)
    return kept


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
