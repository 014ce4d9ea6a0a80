"""Writes weights as Hugging Face checkpoints: bf16 safetensors shards under 16 MiB, an index,
checksums.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.models.weight_files import checkpoint_files

SHARD_BYTES = 15 * 2**20


def save_sharded(tensors: Mapping[str, Tensor], out: Path) -> list[Path]:
    """Writes tensors, in their order, to `model-0000i-of-0000n.safetensors` and an index.

    If they fit one file, that is all.

    Returns:
        The files written, without the index.
    """
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("model*.safetensors"), *out.glob("model.safetensors.index.json")):
        old.unlink()
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.detach().cpu().contiguous().clone()
        size += nbytes
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        index: dict[str, Any] = {
            "metadata": {"total_size": sum(t.numel() * t.element_size() for t in tensors.values())},
            "weight_map": {
                key: name for name, shard in zip(names, shards, strict=True) for key in shard
            },
        }
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    for name, shard in zip(names, shards, strict=True):
        # `save_file` makes files that nobody else may read; these are served by services of other
        # users, in containers.
        (out / name).write_bytes(save(shard, metadata={"format": "pt"}))
    return [out / name for name in names]


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Loads all tensors of a checkpoint: of model.safetensors, or of the files of its index.

    Raises:
        CheckpointError: A file is missing or broken.
    """
    tensors: dict[str, Tensor] = {}
    for file in checkpoint_files(path):
        try:
            tensors.update(load_file(str(file)))
        except SafetensorError as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error
    return tensors


def save_array(path: Path, array: np.ndarray) -> None:
    """Writes a `.npy` file; a run that is killed meanwhile leaves the previous file, or none."""
    temporary = path.with_suffix(".tmp.npy")
    np.save(temporary, array)
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON for people: indented, with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def settings_of(config: Any) -> dict[str, Any]:
    """Returns a run's settings, a dataclass, as plain values for JSON; None where there is no
    limit.
    """
    values = json.loads(json.dumps(asdict(config), default=str))
    return {name: None if value == math.inf else value for name, value in values.items()}


def to_bf16(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Converts floating-point tensors to bf16; others stay."""
    return {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
