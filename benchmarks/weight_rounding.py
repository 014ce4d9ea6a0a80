"""Measures the effect of quantised weights: the model's likelihood of some texts, and how often its
best token stays the same.

python -m benchmarks.weight_rounding --model-path foredraft-demo README.md docs/operations.md
verify_service/engine/engine.py
"""

import functools
from pathlib import Path

import torch

from benchmarks.likelihood import arguments, compare
from foredraft.attention.choice import attention_for
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.loader import load_model
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner

# Formats of weights, and their conversion during loading; the first one is exact.
FORMS = (
    ("float32", torch.float32, "unquant", 128),
    ("bfloat16", torch.bfloat16, "unquant", 128),
    ("fp8", None, "fp8", 128),
    ("int8", None, "int8", 128),
    ("int4, groups of 32", None, "int4", 32),
    ("int4, groups of 64", None, "int4", 64),
    ("int4, groups of 128", None, "int4", 128),
)
PAGE_SIZE = 16


def main() -> None:
    """Prints a line for each form of the weights."""
    path, texts, device = arguments(__doc__)
    usual = torch.bfloat16 if device.type == "cuda" else torch.float32
    compare(
        texts,
        (
            (name, functools.partial(_form, path, dtype or usual, device, kind, group))
            for name, dtype, kind, group in FORMS
        ),
    )


@torch.inference_mode()
def _form(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    kind: str,
    group: int,
    tokens: list[int],
) -> torch.Tensor:
    model = load_model(path, dtype, device, quantization=kind, quantization_group_size=group)
    pages = list(range(-(-len(tokens) // PAGE_SIZE)))
    kv = PagedKV.for_model(model.config, len(pages), PAGE_SIZE, dtype, device)
    runner = ModelRunner(model, kv, attention_for(device))
    logits = runner.forward([SequenceRows.chunk(pages, 0, tokens, "all")]).logits
    return logits.float().log_softmax(1).cpu()


if __name__ == "__main__":
    main()
