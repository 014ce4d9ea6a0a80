"""Packed token masks: filled for many sequences at a time, applied to logits on their device."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from foredraft.cpu.threads import num_cores
from foredraft.trees.draft_tree import DraftTree
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.request import Status

MANY = 4  # sequences from which on their masks are made side by side
NUM_THREADS = min(8, num_cores() // 2)


def side_by_side(work: Sequence[Callable[[], None]]) -> None:
    """Fills the masks of several sequences in parallel, mostly outside of the interpreter's
    lock.
    """
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
    """Makes tokens that a mask does not allow impossible, in place.

    Args:
        logits: float32 [n, vocab].
        rows: Indexes of the rows of `logits` that have a mask.
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


def fill_masks(sequence: RequestSequence, tree: DraftTree, masks: npt.NDArray[np.int32]) -> None:
    """Writes which tokens a sequence may take after its newest one and after each node of a tree.

    Args:
        tree: See `GrammarState.fill`.
        masks: int32 [1 + nodes, words], C-contiguous.
    """
    grammar = sequence.follow_grammar()
    if grammar is not None:
        grammar.fill(tree, masks)
    else:
        masks.fill(-1)
    if sequence.limits is not None:
        sequence.limits.fill(sequence.newest(sequence.limits.num_before), tree, masks)


def fill_two_phase_masks(
    sequence: RequestSequence, tree: DraftTree, masks: npt.NDArray[np.int32]
) -> None:
    """Fills in the masks of a sequence for a two-phase step, once the previous outcome is known.

    Args:
        tree: Tree that the step verifies; see `GrammarState.fill`.
        masks: int32 [rows, words], to be filled in. Rows beyond the tree, and all rows of a
            sequence that has ended meanwhile, allow every token.
    """
    size = 1 + len(tree)
    masks[size:] = -1
    if sequence.status is Status.RUNNING:
        fill_masks(sequence, tree, masks[:size])
    else:
        masks[:size] = -1
