"""Measures the effect of a KV cache of fewer bits: the model's likelihood of some texts, and how
often its best token stays the same.

python -m benchmarks.kv_rounding --model-path foredraft-demo README.md docs/operations.md
verify_service/engine/engine.py
"""

import functools

import torch

from benchmarks.likelihood import arguments, compare
from foredraft.attention.choice import attention_for
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.decoder import DecoderModel
from foredraft.models.loader import load_model
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner

TYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
PAGE_SIZE = 16


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


@torch.inference_mode()
def _form(model: DecoderModel, dtype: torch.dtype, tokens: list[int]) -> torch.Tensor:
    """Computes log-probabilities with a cache of one type and the checkpoint's scales."""
    pages = list(range(-(-len(tokens) // PAGE_SIZE)))
    scales = [(keys, values) for keys, values in model.kv_scales.tolist()]
    kv = PagedKV.for_model(
        model.config, len(pages), PAGE_SIZE, dtype, model.device, 0,
        scales if dtype.itemsize == 1 else None,
    )  # fmt: skip
    runner = ModelRunner(model, kv, attention_for(model.device))
    chunk = SequenceRows.chunk(pages, 0, tokens, "all")
    return runner.forward([chunk]).logits.float().log_softmax(1).cpu()


if __name__ == "__main__":
    main()
