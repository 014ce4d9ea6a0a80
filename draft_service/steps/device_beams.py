"""Beam trees on a GPU by a few kernels per level: the trees of `static_beams`, for rows without
top-k and top-p.
"""

import logging

import torch

from draft_service.steps import beam_kernels
from draft_service.steps.static_beams import StaticBeams
from foredraft.kernel_launch import overlapped, power_of_two
from foredraft.sampling.rows import SamplingRows
from foredraft.trees.tree_building import MIN_RIVALS, Ordering
from foredraft.types import SamplingParams

logger = logging.getLogger(__name__)

_BLOCK = 4096  # columns of one program
# Keys, maxima and sums of the parts of some rows, see `beam_kernels.best_of_parts`.
_Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class DeviceBeams:
    """Grows the beams of one drafting round.

    All memory is allocated at once, so that a graph can hold it.

    Args:
        batch: Number of sequences, B.
        num_steps: Number of levels.
        topk: Number of children taken per node and of beams kept per level, K.
        vocab: Number of columns of the logits.
        ordering: Order of children.
        rows: Sampling parameters for `coupled` where some sequences are sampled, with the position
            of the first drafted token.
    """

    def __init__(
        self,
        batch: int,
        num_steps: int,
        topk: int,
        vocab: int,
        ordering: Ordering,
        device: torch.device,
        rows: SamplingRows | None = None,
    ) -> None:
        self._launch = overlapped(device)
        self._batch, self._topk, self._vocab = batch, topk, vocab
        self._keeps_first = ordering == "coupled"
        self._rows = rows
        # How many of a row's best columns are looked at.
        self._count = topk
        if rows is not None and topk > 1:
            self._count = min(max(topk, MIN_RIVALS), vocab)
        self._parts = -(-vocab // _BLOCK)
        self._num_candidates = topk + (num_steps - 1) * topk * topk
        num_rows = batch * topk

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self._keys = empty(num_rows, self._parts, self._count, dtype=torch.int64)
        # Each starts where memory is aligned, so that a kernel is compiled once.
        self._maxima = empty(num_rows, self._parts, dtype=torch.float32)
        self._sums = empty(num_rows, self._parts, dtype=torch.float32)
        # Buffers of the previous and the next level, by turns.
        self._values = [empty(batch, topk, dtype=torch.float32) for _ in range(2)]
        self._nodes = [empty(batch, topk) for _ in range(2)]
        self._masks = [empty(num_rows, num_steps * topk, dtype=torch.uint8) for _ in range(2)]
        self._scores = empty(batch, self._num_candidates, dtype=torch.float32)
        self._tokens, self._parents, self._places = (
            empty(batch, self._num_candidates) for _ in range(3)
        )
        self._level, self._num_steps = 0, num_steps

    def grow(
        self, logits: torch.Tensor, token_map: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the children of the current beams and selects the next beams among them.

        Args:
            logits: [rows, V], rows in the order of the beams: one for each sequence at first, then
                K.
            token_map: int64 [V], the target's token of each column.

        Returns:
            int64 [B, K] tokens of the beams, int64 [B * K] the row that each of them continues.
        """
        beams = len(logits) // self._batch
        found = self._keys, self._maxima, self._sums
        self._find_best(logits, 1, beams, token_map, found)
        return self._select(found, beams, token_map, is_shared=False)

    def grow_all(self, logits: torch.Tensor, token_map: torch.Tensor | None) -> None:
        """Grows all levels at once, where a level's logits are the same for all of its beams.

        Args:
            logits: [num_steps * B, V], level by level.
            token_map: See `grow`.
        """
        levels, parts = self._num_steps, self._parts
        keys = logits.new_empty(levels, self._batch, parts, self._count, dtype=torch.int64)
        maxima, sums = logits.new_empty(2, levels, self._batch, parts, dtype=torch.float32)
        self._find_best(logits, levels, 1, token_map, (keys, maxima, sums))
        if self._topk > 1:
            for level, found in enumerate(zip(keys, maxima, sums, strict=True)):
                self._select(found, self._topk if level else 1, token_map, is_shared=True)
            return
        beam_kernels.select_chain[(self._batch,)](
            keys, keys if token_map is None else token_map, self._scores, self._tokens,
            self._parents, self._batch, PARTS=parts, LEVELS=levels, PAD_PARTS=power_of_two(parts),
            PAD_LEVELS=power_of_two(levels), MAPPED=token_map is not None, num_warps=4,
            **self._launch,
        )  # fmt: skip

    def _select(
        self, found: _Found, beams: int, token_map: torch.Tensor | None, is_shared: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Selects the beams of the next level, see `grow`.

        Args:
            found: What `_find_best` found in the level's rows.
            beams: Number of present beams of a sequence.
            is_shared: Whether they share one row.
        """
        keys, maxima, sums = found
        level, topk, parts = self._level, self._topk, self._parts
        tokens = torch.empty(self._batch, topk, dtype=torch.int64, device=keys.device)
        sources = torch.empty(self._batch * topk, dtype=torch.int64, device=keys.device)
        old, new = level % 2, 1 - level % 2
        width = self._masks[0].shape[1]
        beam_kernels.select_beams[(self._batch,)](
            keys, maxima, sums, sources if token_map is None else token_map,
            maxima if self._rows is None else self._rows.temperature,
            self._values[old], self._nodes[old], self._masks[old],
            self._values[new], self._nodes[new], self._masks[new], tokens, sources,
            self._scores, self._tokens, self._parents, self._num_candidates, width,
            0 if level == 0 else topk + (level - 1) * topk * topk, level,
            PARTS=parts, TOPK=topk, COUNT=self._count, BEAMS=beams, PAD_TOPK=power_of_two(topk),
            PAD_COUNT=power_of_two(self._count),
            PAD_PARTS=power_of_two(parts), PAD_MASK=power_of_two(width),
            HAS_PARENTS=level > 0, MAPPED=token_map is not None, KEEP_FIRST=self._keeps_first,
            SAMPLED=self._rows is not None, SHARED=is_shared, num_warps=4, **self._launch,
        )  # fmt: skip
        self._level += 1
        return tokens, sources

    def _find_best(
        self,
        logits: torch.Tensor,
        num_levels: int,
        beams: int,
        token_map: torch.Tensor | None,
        found: _Found,
    ) -> None:
        """Finds the best columns of every part of every row.

        Args:
            logits: [num_levels * B * beams, V], of the present level and those after it.
            beams: Number of rows of a sequence in a level.
            found: Written.
        """
        keys, maxima, sums = found
        rows = self._rows
        grid = self._batch * beams, self._parts, num_levels
        passes = [(self._count, False)] if rows is None else [(0, False), (self._count, True)]
        for count, is_sampled in passes:
            beam_kernels.best_of_parts[grid](
                logits, keys, maxima, sums, keys if token_map is None else token_map,
                maxima if rows is None else rows.temperature,
                maxima if rows is None else rows.min_p,
                keys if rows is None else rows.seed, keys if rows is None else rows.position,
                logits.stride(0), self._vocab, self._level, PARTS=self._parts,
                PAD_PARTS=power_of_two(self._parts), COUNT=count, PAD_COUNT=power_of_two(max(1, count)),  # noqa: E501
                BEAMS=beams, BLOCK=_BLOCK,
                SAMPLED=is_sampled, MAPPED=token_map is not None, num_warps=8,
                **self._launch,
            )  # fmt: skip

    def seen(self) -> torch.Tensor:
        """Returns the drafted rows that each of the newest beams may see: bool [B * K, level *
        K + K]. Levels count from 0.
        """
        return self._masks[self._level % 2][:, : self._level * self._topk].view(torch.bool)

    def write(self, results: torch.Tensor) -> None:
        """Writes the most valuable candidates of all levels, after the last `grow`.

        Args:
            results: int32 [B, 2, N], written; see `StaticBeams.nodes`. Places without a node are
                -1.
        """
        nodes = results.shape[-1]
        beam_kernels.select_nodes[(self._batch,)](
            self._scores, self._tokens, self._parents, self._places, results,
            self._num_candidates, results.stride(0),
            NODES=nodes, PAD_CANDIDATES=power_of_two(self._num_candidates),
            PAD_NODES=power_of_two(nodes), num_warps=4, **self._launch,
        )  # fmt: skip


def works(num_steps: int, topk: int, vocab: int, device: torch.device) -> bool:
    """Returns whether the kernels compile here and build a known tree; logs why not.

    They are compiled for each kind of GPU where they first run; without them torch builds the
    trees.
    """
    nodes = min(topk * num_steps, 31)
    row = torch.arange(topk * vocab, device=device).view(topk, vocab)
    logits = (row * 7919 % vocab).float() * (40 / vocab)
    try:
        for rows in (None, SamplingRows.from_params([SamplingParams(seed=3)], [5], device)):
            found = DeviceBeams(1, num_steps, topk, vocab, "coupled", device, rows)
            own = rows or SamplingRows.from_params([SamplingParams(temperature=0.0)], [5], device)
            expected = StaticBeams(1, num_steps, topk, nodes + 1, "coupled", own)
            for level in range(num_steps):
                part = logits[: topk if level else 1]
                found.grow(part, None)
                expected.grow(part, None)
            results = torch.zeros(2, 1, 2, nodes, dtype=torch.int32, device=device)
            found.write(results[0])
            expected.write(results[1])
            # Equal values may come in any order; the best chain is the same.
            if not torch.equal(results[0, 0, 0, 0], results[1, 0, 0, 0]):
                logger.warning("draft trees by torch: the kernels' first token differs")
                return False
    except Exception as error:  # Triton's compiler has no exceptions of its own to name
        logger.warning("draft trees by torch, which takes longer: %s", error)
        return False
    return True
