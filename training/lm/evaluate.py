"""Computes a model's loss and bits per byte on held-out documents by domain, beside baselines."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from training.baselines import nats_to_bits_per_byte
from training.lm.model import Llama
from training.text_data import Document


@dataclass(frozen=True, slots=True)
class DomainScore:
    """A model's cost on one domain: nats per token, bits per byte, and the amount of text."""

    loss: float
    bits_per_byte: float
    tokens: int
    bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for a report."""
        return asdict(self)


def heldout_texts(documents: Sequence[Document], max_bytes: int) -> dict[str, list[str]]:
    """Chooses documents evenly spread over each domain, about `max_bytes` of text per domain."""
    by_domain: dict[str, list[str]] = defaultdict(list)
    for document in documents:
        by_domain[document.domain].append(document.text)
    chosen = {}
    for domain, texts in sorted(by_domain.items()):
        total = sum(len(text) for text in texts)
        stride = max(1, round(total / max_bytes))
        chosen[domain] = texts[::stride]
    return chosen


@torch.no_grad()
def score_domains(
    model: Llama, tokenizer: Tokenizer, texts: Mapping[str, list[str]], rows: int
) -> dict[str, DomainScore]:
    """Scores every token of every document once, with at least half a context of history where the
    document has it.

    Args:
        model: The model, on the device to use.
        tokenizer: The model's tokenizer, which puts END_OF_TEXT in front.
        texts: Held-out documents by domain.
        rows: Number of windows scored at once.
    """
    device = next(model.parameters()).device
    length = model.shape.context_length
    scores = {}
    for domain, documents in texts.items():
        windows = []
        count = 0
        for encoding in tokenizer.encode_batch_fast(documents, add_special_tokens=True):
            for window, fresh in _windows(encoding.ids, length):
                windows.append((window, fresh))
                count += fresh
        windows.sort(key=lambda item: len(item[0]))
        nats = 0.0
        for start in range(0, len(windows), rows):
            nats += _score(model, windows[start : start + rows], length, rows, device)
        size = sum(len(text.encode()) for text in documents)
        scores[domain] = DomainScore(nats / count, nats_to_bits_per_byte(nats, size), count, size)
    return scores


def _windows(ids: list[int], length: int) -> list[tuple[list[int], int]]:
    """Returns half-overlapping windows: (at most length + 1 ids, number of last ids to score)."""
    windows = [(ids[: length + 1], len(ids[: length + 1]) - 1)]
    end = length + 1
    while end < len(ids):
        new_end = min(len(ids), end + length // 2)
        windows.append((ids[max(0, new_end - length - 1) : new_end], new_end - end))
        end = new_end
    return windows


def _score(
    model: Llama, windows: list[tuple[list[int], int]], length: int, rows: int, device: Any
) -> float:
    # One shape for all calls, so that a compiled model is compiled once.
    tokens = torch.zeros(rows, length + 1, dtype=torch.int64)
    fresh = torch.zeros(rows, length, dtype=torch.bool)
    for row, (window, count) in enumerate(windows):
        tokens[row, : len(window)] = torch.tensor(window)
        fresh[row, len(window) - 1 - count : len(window) - 1] = True
    tokens, fresh = tokens.to(device), fresh.to(device)
    hidden, _ = model(tokens[:, :-1])
    return float(token_losses(model, hidden, tokens[:, 1:])[fresh].double().sum())


def token_losses(model: Llama, hidden: Tensor, targets: Tensor) -> Tensor:
    """Computes the cross-entropy of every target, float32 [B, T]."""
    logits = model.logits(hidden).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(
        targets.shape
    )
