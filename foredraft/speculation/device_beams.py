"""Beam trees on a GPU by a few kernels per level; the trees of `static_beams`, for rows that are not sampled."""

import torch

from foredraft.speculation import beam_kernels
from foredraft.speculation.tree_building import Ordering

_BLOCK = 4096  # columns of one program


class DeviceBeams:
    """Beams of one drafting round; all memory is taken at once, so that a graph can hold it.

    Args:
        batch: Number of sequences, B.
        num_steps: Levels.
        topk: Children taken per node and beams kept per level, K.
        vocab: Columns of the logits.
        ordering: `coupled` keeps the chain of first children, as it does for greedy rows.
    """

    def __init__(
        self,
        batch: int,
        num_steps: int,
        topk: int,
        vocab: int,
        ordering: Ordering,
        device: torch.device,
    ) -> None:
        self._batch, self._topk, self._vocab = batch, topk, vocab
        self._keeps_first = ordering == "coupled"
        self._parts = -(-vocab // _BLOCK)
        self._num_candidates = topk + (num_steps - 1) * topk * topk
        rows = batch * topk

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self._keys = empty(rows, self._parts, topk, dtype=torch.int64)
        self._maxima, self._sums = empty(2, rows, self._parts, dtype=torch.float32)
        # Of the level before and the next one, by turns.
        self._values = empty(2, batch, topk, dtype=torch.float32)
        self._nodes = empty(2, batch, topk)
        self._masks = empty(2, rows, num_steps * topk, dtype=torch.uint8)
        self._scores = empty(batch, self._num_candidates, dtype=torch.float32)
        self._tokens, self._parents, self._places = empty(3, batch, self._num_candidates)
        self._level = 0

    def grow(
        self, logits: torch.Tensor, token_map: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the children of the current beams and selects the next beams among them.

        Args:
            logits: [rows, V], rows in the order of the beams: one for each sequence at first, then K.
            token_map: int64 [V], the target's token of each column.

        Returns:
            int64 [B, K] tokens of the beams, int64 [B * K] the row that each of them continues.
        """
        level, topk, parts = self._level, self._topk, self._parts
        num_rows = len(logits)
        beams = num_rows // self._batch
        beam_kernels.best_of_parts[(num_rows, parts)](
            logits, self._keys, self._maxima, self._sums, logits.stride(0), self._vocab,
            PARTS=parts, TOPK=topk, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
        tokens = torch.empty(self._batch, topk, dtype=torch.int64, device=logits.device)
        sources = torch.empty(self._batch * topk, dtype=torch.int64, device=logits.device)
        old, new = level % 2, 1 - level % 2
        width = self._masks.shape[-1]
        beam_kernels.select_beams[(self._batch,)](
            self._keys, self._maxima, self._sums, sources if token_map is None else token_map,
            self._values[old], self._nodes[old], self._masks[old],
            self._values[new], self._nodes[new], self._masks[new], tokens, sources,
            self._scores, self._tokens, self._parents, self._num_candidates, width,
            0 if level == 0 else topk + (level - 1) * topk * topk, level,
            PARTS=parts, TOPK=topk, BEAMS=beams, PAD_TOPK=_power_of_two(topk),
            PAD_PARTS=_power_of_two(parts), PAD_MASK=_power_of_two(width),
            HAS_PARENTS=level > 0, MAPPED=token_map is not None, KEEP_FIRST=self._keeps_first, num_warps=4,
        )  # fmt: skip
        self._level += 1
        return tokens, sources

    def seen(self) -> torch.Tensor:
        """Which drafted rows each beam selected last may see: bool [B * K, level * K + K], levels counted from 0."""
        return self._masks[self._level % 2][:, : self._level * self._topk].view(torch.bool)

    def write(self, results: torch.Tensor) -> None:
        """The most valuable candidates of all levels, after the last `grow`.

        Args:
            results: int32 [B, 3, N], written; see `StaticBeams.nodes`. Places without a node are -1.
        """
        nodes = results.shape[-1]
        beam_kernels.select_nodes[(self._batch,)](
            self._scores, self._tokens, self._parents, self._places, results,
            self._num_candidates, results.stride(0),
            NODES=nodes, PAD_CANDIDATES=_power_of_two(self._num_candidates),
            PAD_NODES=_power_of_two(nodes), num_warps=4,
        )  # fmt: skip


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
