"""Small heads loaded from files, in any of the published layouts."""

from pathlib import Path
from typing import Any

import torch

from draft_service.models.draft_head import DraftHead
from draft_service.models.head_loader import load_head
from draft_service.models.shared_weights import load_shared_weights
from foredraft.models.config import ModelConfig
from testing.draft_heads import TinyHead

CPU = torch.device("cpu")


def load(
    path: Path, algorithm: str, target: Path, dtype: torch.dtype = torch.float32, **options: Any
) -> DraftHead:
    config = ModelConfig.from_dir(target)
    shared = load_shared_weights(target, config, dtype, CPU)
    return load_head(path, algorithm, config, shared, dtype, CPU, **options)  # type: ignore[arg-type]


def renamed(head: TinyHead, *pairs: tuple[str, str]) -> TinyHead:
    tensors = {}
    for name, tensor in head.tensors.items():
        for old, new in pairs:
            if name.startswith(old):
                name = new + name.removeprefix(old)
        tensors[name] = tensor
    return TinyHead(head.algorithm, head.config, tensors, head.num_streams)


def speculators(head: TinyHead, **options: Any) -> TinyHead:
    """Returns the same head in the layout of the speculators library."""
    layer = {**head.config, "model_type": "llama"}
    vocab = layer.pop("draft_vocab_size", None)
    del layer["architectures"]
    kind = head.algorithm.lower()
    config = {
        "architectures": ["Eagle3Speculator" if kind == "eagle3" else "EagleSpeculator"],
        "speculators_model_type": kind,
        "transformer_layer_config": layer,
        "draft_vocab_size": vocab,
        **options,
    }
    return TinyHead(head.algorithm, config, head.tensors, head.num_streams)
