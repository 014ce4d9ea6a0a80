"""Packed masks: made for many sequences at a time, and applied to logits on their device."""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from foredraft.trees.draft_tree import DraftTree
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.request import Status

MANY = 4  # sequences from which on their masks are made side by side
NUM_THREADS = min(8, (os.cpu_count() or 1) // 2)


def side_by_side(work: Sequence[Callable[[], None]]) -> None:
    """Fills the masks of several sequences; that leaves the interpreter to others for most of its time."""
    if len(work) < MANY or NUM_THREADS < 2:
        for fill in work:
            fill()
        return
    for done in [_threads().submit(fill) for fill in work]:
        done.result()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_THREADS, "masks")


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


def fill_late(sequence: RequestSequence, tree: DraftTree, masks: npt.NDArray[np.int32]) -> None:
    """The masks of a sequence in a step that was started before the outcome of the one before it was known; now it is.

    Args:
        tree: What the step verifies; see `GrammarState.fill`.
        masks: int32 [rows, words], rows beyond the tree's included. A sequence that has ended meanwhile has surplus rows.
    """
    size = 1 + len(tree)
    masks[size:] = -1
    grammar = sequence.follow_grammar() if sequence.status is Status.RUNNING else None
    if grammar is not None:
        grammar.fill(tree, masks[:size])
    else:
        masks[:size] = -1
