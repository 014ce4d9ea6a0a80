"""Packed masks applied to logits on their device."""

from collections.abc import Sequence

import torch


def allow_only(logits: torch.Tensor, rows: Sequence[int], masks: torch.Tensor) -> None:
    """Makes what a mask does not allow impossible, in place.

    Args:
        logits: float32 [n, vocab].
        rows: Which rows have a mask.
        masks: int32 [len(rows), words] on the CPU; bit v % 32 of word v // 32 is token v.
    """
    device, vocab_size = logits.device, logits.shape[1]
    words = masks.to(device)
    bits = torch.arange(32, dtype=torch.int32, device=device)
    allowed = ((words.unsqueeze(-1) >> bits) & 1).bool().flatten(1)[:, :vocab_size]
    if len(rows) == len(logits):
        logits.masked_fill_(~allowed, float("-inf"))
        return
    index = torch.tensor(rows).to(device)
    logits.index_copy_(0, index, logits[index].masked_fill_(~allowed, float("-inf")))
