"""Measures the effect of a KV cache of fewer bits: the model's likelihood of some texts, and how
often its best token stays the same.

python -m benchmarks.kv_rounding --model-path foredraft-demo README.md docs/operations.md
verify_service/engine/engine.py
"""

import argparse
from pathlib import Path

import torch

from foredraft.attention.choice import attention_for
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.decoder import DecoderModel
from foredraft.models.loader import load_model
from foredraft.models.registry import resolve_model_path
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner
from foredraft.text.tokenizer import Tokenizer

TYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
PAGE_SIZE = 16


def main() -> None:
    """Prints a line for each type of cache."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", default="foredraft-demo")
    parser.add_argument("--tokens", type=int, default=768, help="of each text, its first ones")
    parser.add_argument("texts", nargs="+", type=Path)
    args = parser.parse_args()
    path = resolve_model_path(args.model_path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(path, torch.float32, device)
    tokenizer = Tokenizer.from_dir(path)
    texts = [tokenizer.encode(file.read_text())[: args.tokens] for file in args.texts]
    exact = [_log_probabilities(model, tokens, torch.float32) for tokens in texts]
    count = sum(len(tokens) - 1 for tokens in texts)
    print(f"{count} tokens     -log p per token   same best token")
    for dtype in TYPES:
        found = [_log_probabilities(model, tokens, dtype) for tokens in texts]
        loss = sum(
            -float(rows[:-1].gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).sum())
            for rows, tokens in zip(found, texts, strict=True)
        )
        same = sum(
            int((rows.argmax(1) == want.argmax(1))[:-1].sum())
            for rows, want in zip(found, exact, strict=True)
        )
        print(f"{str(dtype).removeprefix('torch.'):20} {loss / count:10.4f} {same / count:14.1%}")


def _log_probabilities(model: DecoderModel, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Computes [len(tokens), vocab_size] with a cache of one type and the checkpoint's scales."""
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
