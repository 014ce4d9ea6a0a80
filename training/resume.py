"""Saves the state of a run in files of less than 60 MiB, so that a later run continues exactly."""

import io
import pickle
import struct
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import CheckpointError

PART_BYTES = 48 * 2**20
# What torch raises for files that are not its own, and what another structure in them raises.
_BROKEN = (
    EOFError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
)
_TENSOR = "__tensor__"  # key of a tensor's placeholder, which has its number and shape


def save_state(state: dict[str, Any], path: Path, part_bytes: int = PART_BYTES) -> None:
    """Writes `path`, which holds everything but tensors, and files beside it of at most
    `part_bytes` of tensors each.

    `path` is replaced when all others have been written, so a run that is killed leaves the state
    before or this one.

    Args:
        state: Dictionaries, lists and tuples of tensors, numbers and strings; "step" tells one save
            from the next.
    """
    tensors: list[Tensor] = []

    def set_aside(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        return {_TENSOR: len(tensors) - 1, "shape": list(value.shape)}

    rest = _replace(state, set_aside)
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for number, tensor in enumerate(tensors):
        flat = tensor.detach().cpu().flatten()
        rows = max(1, part_bytes // flat.element_size())
        for piece, values in enumerate(flat.split(rows) if len(flat) else (flat,)):
            if parts[-1] and size + values.nbytes > part_bytes:
                parts.append({})
                size = 0
            parts[-1][f"{number}.{piece}"] = values.clone()
            size += values.nbytes
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not safetensors: in a folder with a model these would be taken for the model's.
    names = [f"{path.stem}-step{state['step']}-{i}.pt" for i in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        _write(part, path.with_name(name))
    _write({"state": rest, "parts": names}, path)
    for old in path.parent.glob(f"{path.stem}-step*.pt"):
        if old.name not in names:
            old.unlink()


def drop_state(path: Path) -> None:
    """Removes a state that `save_state` wrote; there need be none."""
    if path.is_file():
        path.unlink()
    for part in path.parent.glob(f"{path.stem}-step*.pt"):
        part.unlink()


def load_state(path: Path, keys: Collection[str] = ()) -> dict[str, Any]:
    """Reads a state that `save_state` wrote, with tensors on the CPU.

    Args:
        keys: What the state has to have.

    Raises:
        CheckpointError: Files are missing, have another format, or are of another command.
    """
    try:
        saved = _read(path)
        pieces: dict[int, dict[int, Tensor]] = {}
        for name in saved["parts"]:
            for key, values in _read(path.with_name(name)).items():
                number, piece = map(int, key.split("."))
                pieces.setdefault(number, {})[piece] = values

        def put_back(value: Any) -> Any:
            if not isinstance(value, dict) or _TENSOR not in value:
                return value
            found = pieces[value[_TENSOR]]
            return torch.cat([found[i] for i in range(len(found))]).view(value["shape"])

        state: dict[str, Any] = _replace(saved["state"], put_back)
    except OSError as error:
        raise CheckpointError(f"{path} is no state to resume from: {error}") from error
    except _BROKEN as error:
        raise CheckpointError(f"{path} is no state to resume from") from error
    if missing := sorted(set(keys) - set(state)):
        raise CheckpointError(f"{path} is no state to resume from: it has no {missing[0]}")
    return state


def _replace(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a copy in which `change` has replaced values, at any depth."""
    changed = change(value)
    if changed is not value:
        return changed
    if isinstance(value, dict):
        return {key: _replace(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replace(item, change) for item in value)
    return value


def _write(content: dict[str, Any], path: Path) -> None:
    # torch's own writer does not say that a disk is full.
    buffer = io.BytesIO()
    torch.save(content, buffer)
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_bytes(buffer.getbuffer())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(path)


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return content
