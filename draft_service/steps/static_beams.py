"""Beam trees for CUDA graphs: fixed shapes, and no value is read back.

They equal the trees of `tree_building.BeamTree`, as tensors.
"""

import math
from dataclasses import replace

import torch

from foredraft.sampling.sampling import greedy, perturbed_top, scrub
from foredraft.trees.tree_building import BeamTree
from foredraft.types import NO_TOKEN


class StaticBeams(BeamTree):
    """Grows beam trees without reading a value back, so that a CUDA graph can hold it.

    See `BeamTree` for the methods. Which rows are sampled is decided on the device; a promise of
    the rows still saves work.
    """

    def grow(
        self, logits: torch.Tensor, token_map: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Does the same as `expand`, for rows in the order of the beams.

        Args:
            logits: [rows, V], one for each sequence at first, then K.

        Returns:
            int64 [B, K] tokens of the beams, int64 [B * K] the row that each of them continues.
        """
        width = len(logits) // self.batch
        tokens, beams = self.expand(logits.float().view(self.batch, width, -1), token_map)
        owner = torch.arange(0, len(logits), width, device=logits.device)
        return tokens, (beams + owner[:, None]).flatten()

    def grow_all(self, logits: torch.Tensor, token_map: torch.Tensor | None) -> None:
        """Grows all levels, where a level's logits are the same for all of its beams.

        Args:
            logits: [levels * B, V], level by level.
        """
        for level, rows in enumerate(logits.split(self.batch)):
            self.grow(rows.repeat_interleave(self.topk if level else 1, 0), token_map)

    def seen(self) -> torch.Tensor:
        """Returns the drafted rows that each of the newest beams may see: bool [B * K, level *
        K + K]. Levels count from 0.
        """
        return self.ancestor_rows().flatten(0, 1)

    def write(self, results: torch.Tensor) -> None:
        """Writes `nodes` to int32 [B, 2, N]."""
        for row, part in enumerate(self.nodes()):
            results[:, row].copy_(part)

    def nodes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the most valuable candidates of all levels by value, after the last `expand`.

        Returns:
            int64 [B, N] each, N = num_draft_tokens - 1: tokens, `NO_TOKEN` after the last node;
            parents, earlier nodes or -1.
        """
        num_nodes = self.num_draft_tokens - 1
        tokens = torch.cat(self._all_tokens, -1)
        batch, num_candidates = tokens.shape
        index = torch.arange(num_nodes, device=tokens.device).expand(batch, -1)
        if self.topk == 1:
            tokens = torch.nn.functional.pad(
                tokens, (0, max(0, num_nodes - num_candidates)), value=NO_TOKEN
            )
            return tokens[:, :num_nodes], index - 1
        keys = torch.cat(self._all_keys, -1)
        if num_candidates < num_nodes:
            keys = torch.nn.functional.pad(keys, (0, num_nodes - num_candidates), value=-math.inf)
        # A child's value is at most its parent's and its index is higher: a stable order takes the
        # parent first.
        order = keys.sort(dim=-1, descending=True, stable=True)
        is_node = order.values[:, :num_nodes] > -math.inf
        chosen = torch.where(is_node, order.indices[:, :num_nodes], num_candidates)
        # One more entry for absent nodes, and in `place` one before for the root.
        tokens = torch.nn.functional.pad(tokens, (0, 1), value=NO_TOKEN).gather(1, chosen)
        parents = torch.nn.functional.pad(torch.cat(self._all_parents, -1), (0, 1), value=-1)
        place = tokens.new_full((batch, num_candidates + 2), -1)
        place.scatter_(1, chosen + 1, index)
        return tokens, place.gather(1, parents.gather(1, chosen) + 1)

    def _children(
        self, logits: torch.Tensor, token_map: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = scrub(logits)
        rows = self._rows
        if rows is None or not rows.any_sampled:
            return self._likeliest(logits)
        num_beams = logits.shape[0] // self.batch
        if num_beams > 1:
            owner = torch.arange(self.batch, device=logits.device)[:, None]
            rows = rows.take(owner.expand(-1, num_beams).flatten())
        rows = replace(rows, position=rows.position + self._level)
        is_sampled = (rows.temperature > 0)[:, None]
        if self.topk == 1:
            sampled, _ = perturbed_top(logits, rows, 1, token_map)
            columns = torch.where(is_sampled, sampled, greedy(logits)[:, None])
            return columns, torch.zeros_like(columns)
        columns, values = self._likeliest(logits)
        sampled, scores = self._coupled(logits, rows, token_map)
        return torch.where(is_sampled, sampled, columns), torch.where(is_sampled, scores, values)
