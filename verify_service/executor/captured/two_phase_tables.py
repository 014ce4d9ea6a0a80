"""Tables of two-phase steps: penalties and biases by slot, masks, log-probabilities.

The forward of such a step is one graph and the choice of tokens another. Between the two the host
sends masks that depend on the previous outcome, while the forward runs.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from foredraft.sampling.sampling import log_probs
from foredraft.types import MAX_LOGPROBS
from verify_service.executor.captured.running_step import UNDER_WAY, LogProbs, pinned
from verify_service.executor.kernels.adjust import adjust_logits, count_tokens
from verify_service.executor.kernels.steps import Begun

MASK_BITS = 32
MASKS_AT_FIRST = 256
# Number of rows whose log-probabilities are computed at a time, in float32.
SCORED_ROWS_AT_ONCE = 64


class TwoPhaseTables:
    """Holds tables on the device, and pinned memory to fill them from.

    Args:
        max_step_rows: Maximum number of rows of a step, padding included.
        max_nodes: Maximum number of nodes of a draft's trees.
        num_slots: Number of slots, including the one for padding.

    Attributes:
        histories, biases: int32 and float32 [num_slots, V]; see `adjust`.
    """

    def __init__(
        self,
        *,
        max_batch: int,
        max_step_rows: int,
        max_nodes: int,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._device = device
        self.mask_words = -(-vocab_size // MASK_BITS)
        self.histories = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)
        self.biases = torch.zeros(num_slots, vocab_size, device=device)
        self._masks = torch.zeros(max_step_rows, self.mask_words, dtype=torch.int32, device=device)
        # Larger blocks are allocated on demand, which may delay a step.
        size = min(max_step_rows, MASKS_AT_FIRST)
        self._host_masks = [pinned(size, self.mask_words) for _ in range(UNDER_WAY)]
        self._host_trees = pinned(UNDER_WAY, max_batch, 2, max_nodes)
        self._trees_there = [torch.cuda.Event() for _ in range(UNDER_WAY)]
        self.num_best = min(MAX_LOGPROBS, vocab_size)
        # Log-probabilities: the emitted token's, then the best tokens'; `_best` has their ids.
        self._values = torch.zeros(max_step_rows, 1 + self.num_best, device=device)
        self._best = torch.zeros(max_step_rows, self.num_best, dtype=torch.int32, device=device)
        self._host_values = pinned(UNDER_WAY, *self._values.shape, dtype=torch.float32)
        self._host_best = pinned(UNDER_WAY, *self._best.shape)

    def set_history(self, slot: int, history: npt.NDArray[np.int32]) -> None:
        """Replaces a slot's history by another sequence's."""
        self.histories[slot].copy_(torch.from_numpy(history))

    def add_to_history(self, slot: int, tokens: Sequence[int]) -> None:
        """Counts tokens of a slot that the device has not chosen itself."""
        ids = torch.tensor(tokens).to(self._device)
        self.histories[slot].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def set_biases(self, slot: int, biases: npt.NDArray[np.float32]) -> None:
        """Replaces a slot's biases by another sequence's."""
        self.biases[slot].copy_(torch.from_numpy(biases))

    def masks(self, turn: int, num_rows: int) -> npt.NDArray[np.int32]:
        """Returns masks to be filled in for a step, int32 [num_rows, mask_words]."""
        block = self._host_masks[turn]
        if len(block) < num_rows:
            size = min(len(self._masks), 1 << (num_rows - 1).bit_length())
            block = self._host_masks[turn] = pinned(size, self.mask_words)
        return block[:num_rows].numpy()

    def upload_masks(self, turn: int, num_rows: int) -> None:
        """Sends the filled-in masks to the device."""
        if num_rows:
            block = self._host_masks[turn][:num_rows]
            self._masks[:num_rows].copy_(block, non_blocking=True)

    def send_trees(self, turn: int, trees: torch.Tensor) -> None:
        """Copies trees [n, 2, N] that a draft has left on the device to the host."""
        self._host_trees[turn, : len(trees)].copy_(trees, non_blocking=True)
        self._trees_there[turn].record()

    def are_trees_there(self, turn: int) -> bool:
        """Returns whether the copied trees have arrived."""
        return self._trees_there[turn].query()

    def trees(self, turn: int) -> npt.NDArray[np.int32]:
        """Waits for the trees of a step and returns them, int32 [max_batch, 2, N]."""
        self._trees_there[turn].synchronize()
        return self._host_trees[turn].numpy()

    def adjust(
        self, logits: torch.Tensor, records: torch.Tensor, begun: Begun, positions: torch.Tensor
    ) -> torch.Tensor:
        """Applies penalties, biases and masks; see `adjust_logits`."""
        return adjust_logits(
            logits, records, begun, positions, self.histories, self.biases, self._masks
        )

    def count(self, records: torch.Tensor, length: torch.Tensor, emitted: torch.Tensor) -> None:
        """Counts emitted tokens; see `count_tokens`."""
        count_tokens(records, length, emitted, self.histories)

    def keep_logprobs(self, logits: torch.Tensor, chosen: torch.Tensor) -> None:
        """Computes log-probabilities for every row of a step.

        Args:
            logits: [rows, V], as the target gave them.
            chosen: int64 [rows].
        """
        for first in range(0, len(logits), SCORED_ROWS_AT_ONCE):
            rows = slice(first, min(first + SCORED_ROWS_AT_ONCE, len(logits)))
            tokens = chosen[rows].clamp_min(0)  # NO_TOKEN where logits are broken
            own, best, values = log_probs(logits[rows].float(), tokens, self.num_best)
            self._values[rows, 0] = own
            self._values[rows, 1:] = values
            self._best[rows] = best.to(torch.int32)

    def send_logprobs(self, turn: int, num_rows: int) -> LogProbs:
        """Copies log-probabilities to the host."""
        values, best = self._host_values[turn, :num_rows], self._host_best[turn, :num_rows]
        values.copy_(self._values[:num_rows], non_blocking=True)
        best.copy_(self._best[:num_rows], non_blocking=True)
        return LogProbs(values.numpy(), best.numpy())
