"""Measures the effect of quantised weights: the model's likelihood of some texts, and how often its
best token stays the same.

    python -m benchmarks.weight_rounding --model-path foredraft-demo README.md docs/operations.md
"""

import functools
from pathlib import Path

import torch

from benchmarks.likelihood import arguments, compare, log_probabilities
from foredraft.models.loader import load_model

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


def _form(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    kind: str,
    group: int,
    tokens: list[int],
) -> torch.Tensor:
    model = load_model(path, dtype, device, quantization=kind, quantization_group_size=group)
    return log_probabilities(model, dtype, tokens)


if __name__ == "__main__":
    main()
