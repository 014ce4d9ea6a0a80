"""Measures the effect of quantised weights: the model's likelihood of some texts, and how often its
best token stays the same.

python -m benchmarks.weight_rounding --model-path foredraft-demo README.md docs/operations.md
verify_service/engine/engine.py
"""

import argparse
import math
from pathlib import Path

import torch

from foredraft.attention.choice import attention_for
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.loader import load_model
from foredraft.models.registry import resolve_model_path
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner
from foredraft.text.tokenizer import Tokenizer

# Formats of weights, and their conversion during loading.
FORMS = (
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", default="foredraft-demo")
    parser.add_argument("--tokens", type=int, default=768, help="of each text, its first ones")
    parser.add_argument("texts", nargs="+", type=Path)
    args = parser.parse_args()
    path = resolve_model_path(args.model_path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = Tokenizer.from_dir(path)
    texts = [tokenizer.encode(file.read_text())[: args.tokens] for file in args.texts]
    count = sum(len(tokens) - 1 for tokens in texts)
    kinds = [("float32", torch.float32, "unquant", 128), *FORMS]
    exact: list[torch.Tensor] = []
    print(f"{count} tokens             perplexity   same best token")
    for name, dtype, kind, group in kinds:
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        found = [_log_probabilities(path, tokens, dtype, device, kind, group) for tokens in texts]
        exact = exact or found
        loss = sum(
            -float(rows[:-1].gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).sum())
            for rows, tokens in zip(found, texts, strict=True)
        )
        same = sum(
            int((rows.argmax(1) == want.argmax(1))[:-1].sum())
            for rows, want in zip(found, exact, strict=True)
        )
        print(f"{name:24} {math.exp(loss / count):10.3f} {same / count:14.1%}", flush=True)


@torch.inference_mode()
def _log_probabilities(
    path: Path,
    tokens: list[int],
    dtype: torch.dtype,
    device: torch.device,
    kind: str,
    group: int,
) -> torch.Tensor:
    """Computes [len(tokens), vocab_size] on the CPU."""
    model = load_model(path, dtype, device, quantization=kind, quantization_group_size=group)
    pages = list(range(-(-len(tokens) // PAGE_SIZE)))
    kv = PagedKV.for_model(model.config, len(pages), PAGE_SIZE, dtype, device)
    runner = ModelRunner(model, kv, attention_for(device))
    logits = runner.forward([SequenceRows.chunk(pages, 0, tokens, "all")]).logits
    return logits.float().log_softmax(1).cpu()


if __name__ == "__main__":
    main()
