"""Measures the effect of a KV cache of fewer bits: the model's likelihood of some texts, and how
often its best token stays the same.

    python -m benchmarks.kv_rounding --model-path foredraft-demo README.md docs/operations.md
"""

import functools

import torch

from benchmarks.likelihood import arguments, compare, log_probabilities
from foredraft.models.decoder import DecoderModel
from foredraft.models.loader import load_model

TYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def main() -> None:
    """Prints a line for each type of cache."""
    path, texts, device = arguments(__doc__)
    model = load_model(path, torch.float32, device)
    compare(
        texts,
        (
            (str(dtype).removeprefix("torch."), functools.partial(_form, model, dtype))
            for dtype in TYPES
        ),
    )


def _form(model: DecoderModel, dtype: torch.dtype, tokens: list[int]) -> torch.Tensor:
    """Computes log-probabilities with a cache of one type and the checkpoint's scales."""
    scales = [(keys, values) for keys, values in model.kv_scales.tolist()]
    return log_probabilities(model, dtype, tokens, scales if dtype.itemsize == 1 else None)


if __name__ == "__main__":
    main()
