"""Scales of keys and values for a cache of 8-bit floats, from checkpoints or from files of
their own.
"""

import json
import math
from pathlib import Path

import torch

from foredraft.errors import CheckpointError

# Names under a layer's attention, as vLLM and SGLang read them; of keys, of values, of both.
_NAMES = (
    (slice(0, 1), ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "attn.k_scale")),
    (slice(1, 2), ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "attn.v_scale")),
    (slice(0, 2), ("kv_scale", "attn.kv_scale")),
)


def scale_targets(scales: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the memory that each tensor of scales fills, if the checkpoint has it.

    Args:
        scales: float32 [num_layers, 2], of keys and values.

    Returns:
        Views of one or two elements, by tensor name.
    """
    targets: dict[str, torch.Tensor] = {}
    for layer, row in enumerate(scales):
        for columns, names in _NAMES:
            targets |= {f"model.layers.{layer}.self_attn.{name}": row[columns] for name in names}
    return targets


def check_scales(scales: torch.Tensor, where: str) -> None:
    """Raises CheckpointError unless all scales [num_layers, 2] are positive and finite; `where`
    names their source.
    """
    for layer, row in enumerate(scales.tolist()):
        if not all(scale > 0 and math.isfinite(scale) for scale in row):
            raise CheckpointError(f"{where}: KV scales {row} of layer {layer} are not positive")


def read_scales(path: str, num_layers: int) -> torch.Tensor:
    """Reads a `--quantization-param-path`: `{"kv_cache": {"scaling_factor": {"0": {"0": 0.02,
    ...}}}}`, by rank and layer.

    Returns:
        float32 [num_layers, 2]; keys and values share a scale.

    Raises:
        CheckpointError: The file is missing or not of this kind, or its layers are not the model's.
    """
    try:
        ranks = json.loads(Path(path).read_text())["kv_cache"]["scaling_factor"]
        by_layer = {int(layer): float(scale) for layer, scale in ranks["0"].items()}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a file of KV scales: {error!r}") from error
    if len(ranks) > 1 or sorted(by_layer) != list(range(num_layers)):
        raise CheckpointError(
            f"{path}: has scales of {len(ranks)} ranks and layers {sorted(by_layer)}; the model has"
            f" one and {num_layers}"
        )
    scales = torch.tensor([by_layer[layer] for layer in range(num_layers)])
    scales = scales.unsqueeze(1).repeat(1, 2)
    check_scales(scales, path)
    return scales
