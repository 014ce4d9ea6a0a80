"""Compares a model with less exact forms of itself, for `kv_rounding` and `weight_rounding`.

It measures the perplexity of texts, and how often the best token stays the same.
"""

import argparse
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from benchmarks.model_paths import model_directory
from foredraft.attention.choice import attention_for
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.decoder import DecoderModel
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner
from foredraft.text.tokenizer import Tokenizer

PAGE_SIZE = 16

# Returns log-probabilities, [num_tokens, vocab_size] on the CPU, of a text's tokens.
Form = Callable[[list[int]], torch.Tensor]


def arguments(doc: str | None) -> tuple[Path, list[list[int]], torch.device]:
    """Reads the command line: directory of the model, token ids of the texts, and device."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", default="foredraft-demo")
    parser.add_argument("--tokens", type=int, default=768, help="of each text, its first ones")
    parser.add_argument("texts", nargs="+", type=Path)
    args = parser.parse_args()
    for file in args.texts:
        if not file.is_file():
            parser.error(f"{file}: no such file")
    path = model_directory(args.model_path)
    tokenizer = Tokenizer.from_dir(path)
    texts = [tokenizer.encode(file.read_text())[: args.tokens] for file in args.texts]
    return path, texts, torch.device("cuda" if torch.cuda.is_available() else "cpu")


@torch.inference_mode()
def log_probabilities(
    model: DecoderModel,
    dtype: torch.dtype,
    tokens: list[int],
    scales: list[tuple[float, float]] | None = None,
) -> torch.Tensor:
    """Computes log-probabilities of all tokens at once, [num_tokens, vocab_size] on the CPU.

    Args:
        dtype: Type of the cache's keys and values.
        scales: Scales of each layer's keys and values; None for a cache without scales.
    """
    pages = list(range(-(-len(tokens) // PAGE_SIZE)))
    kv = PagedKV.for_model(model.config, len(pages), PAGE_SIZE, dtype, model.device, 0, scales)
    runner = ModelRunner(model, kv, attention_for(model.device))
    logits = runner.forward([SequenceRows.chunk(pages, 0, tokens, "all")]).logits
    return logits.float().log_softmax(1).cpu()


def compare(texts: list[list[int]], forms: Iterable[tuple[str, Form]]) -> None:
    """Prints a line for each form of the model; the first one is exact."""
    count = sum(len(tokens) - 1 for tokens in texts)
    exact: list[torch.Tensor] = []
    print(f"{count} tokens    -log p per token   perplexity   same best token")
    for name, form in forms:
        found = [form(tokens) for tokens in texts]
        exact = exact or found
        loss = sum(
            -float(rows[:-1].gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).sum())
            for rows, tokens in zip(found, texts, strict=True)
        )
        same = sum(
            int((rows.argmax(1) == want.argmax(1))[:-1].sum())
            for rows, want in zip(found, exact, strict=True)
        )
        mean = loss / count
        print(f"{name:20} {mean:10.4f} {math.exp(mean):12.3f} {same / count:16.1%}", flush=True)
