"""Builds draft trees with a model that has its own KV: level by level on scratch pages, with many
sequences in each forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from draft_service.drafters.paged_sequences import PagedSequence
from draft_service.drafters.tree_limits import TreeLimits
from foredraft.attention.base import AttentionBackend
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.batch import SequenceRows
from foredraft.sampling.rows import SamplingRows
from foredraft.trees.draft_tree import DraftTree
from foredraft.trees.tree_building import BeamTree, Ordering


@dataclass(frozen=True, slots=True)
class TreeRequest:
    """Asks for a tree after the known tokens of a sequence.

    Attributes:
        sequence: Sequence that the tree continues.
        limits: Limits of the tree.
        logits: [V], logits of the newest token; None for a drafter whose rows are still to be
            computed.
        feature: [H], features of the newest token, for a head that reads its own output of the
            previous position.
    """

    sequence: PagedSequence
    limits: TreeLimits
    logits: torch.Tensor | None = None
    feature: torch.Tensor | None = None


class LevelRunner(Protocol):
    """Runs the draft model for the tokens of one level.

    Attributes:
        kv: The draft model's KV cache, with the scratch pages.
        attention: Attention backend of the model's device.
        token_map: Target token ids of the logits' columns; None where the columns are the target's.
    """

    kv: PagedKV
    attention: AttentionBackend
    token_map: torch.Tensor | None

    def run(
        self, rows: Sequence[SequenceRows], features: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes all rows; `features` are [R, H], the features that the rows read.

        Returns the logits [R, V] and, for models that have them, the features [R, H].
        """


class Scratch:
    """Numbers the pages for the KV of drafted tokens; every slot has the same number of them.

    They follow the verifier's pages in the draft's own pool.

    Args:
        num_pages: Number of the verifier's pages.
        page_size: Tokens per page.
        num_rows: Number of drafted tokens per slot that need KV.
        num_slots: Maximum number of sequences.
    """

    def __init__(self, num_pages: int, page_size: int, num_rows: int, num_slots: int) -> None:
        self._first_page = num_pages
        self._pages_per_slot = -(-num_rows // page_size)
        self.num_pages = self._pages_per_slot * num_slots

    def pages(self, slot: int) -> list[int]:
        """Returns the page numbers of a slot's scratch pages, in order."""
        first = self._first_page + slot * self._pages_per_slot
        return list(range(first, first + self._pages_per_slot))


class BeamDrafter:
    """Builds trees level by level.

    A drafted token attends to the committed tokens and to its own ancestors, at the positions they
    would have. The tokens of the last level are only scored, so they need no forward.

    Args:
        runner: Runs the draft model; its KV includes the scratch pages.
        scratch: Pages for the KV of drafted tokens.
        page_size: Tokens per page.
        ordering: Order in which children of a node are chosen.
    """

    def __init__(
        self, runner: LevelRunner, scratch: Scratch, page_size: int, ordering: Ordering
    ) -> None:
        self._runner = runner
        self._scratch = scratch
        self._page_size = page_size
        self._ordering = ordering

    def draft(self, requests: Sequence[TreeRequest]) -> list[DraftTree]:
        """Returns a tree for each request, in their order."""
        groups = grouped(requests)
        beams = [
            _Beams([requests[i] for i in indices], self._ordering, self._runner.token_map)
            for indices in groups.values()
        ]
        active = beams
        while active := [group for group in active if group.expand()]:
            rows = [row for group in active for row in self._rows(group)]
            read = [group.features.flatten(0, 1) for group in active if group.features is not None]
            logits, features = self._runner.run(rows, torch.cat(read) if read else None)
            sizes = [len(group.requests) * group.topk for group in active]
            for group, part in zip(active, logits.split(sizes), strict=True):
                group.logits = part.view(len(group.requests), group.topk, -1)
            if features is not None:
                for group, part in zip(active, features.split(sizes), strict=True):
                    group.features = part.view(len(group.requests), group.topk, -1)
        trees: list[DraftTree] = [DraftTree()] * len(requests)
        for indices, group in zip(groups.values(), beams, strict=True):
            for index, tree in zip(indices, group.finish(), strict=True):
                trees[index] = tree
        return trees

    def _rows(self, group: "_Beams") -> list[SequenceRows]:
        """Returns the rows of the newest level's tokens."""
        level, topk = group.level, group.topk
        ancestors = group.tree.ancestor_rows().cpu().numpy()
        rows = []
        for i, request in enumerate(group.requests):
            sequence = request.sequence
            num_keys = sequence.num_keys
            num_pages = -(-num_keys // self._page_size)
            scratch_start = num_pages * self._page_size
            gap = scratch_start - num_keys
            mask = np.zeros((topk, gap + (level + 1) * topk), np.bool_)
            mask[:, gap:] = ancestors[i]
            positions = [num_keys + depth for depth in range(level + 1) for _ in range(topk)]
            rows.append(
                SequenceRows(
                    tokens=group.tokens[i],
                    positions=positions[-topk:],
                    pages=sequence.pages[:num_pages] + self._scratch.pages(sequence.slot),
                    prefix_len=num_keys,
                    write_index=scratch_start + level * topk,
                    prefix_start=sequence.valid_from,
                    tail_mask=torch.from_numpy(mask),
                    # The keys in between are masked off; any position will do for them.
                    tail_positions=[num_keys] * gap + positions,
                    logits="all",
                )
            )
        return rows


def grouped(requests: Sequence[TreeRequest]) -> dict[tuple[int, int], list[int]]:
    """Returns the indices of requests for trees that grow together, by their steps and topk."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault((request.limits.steps, request.limits.topk), []).append(index)
    return groups


def empty_trees(
    sequences: Sequence[PagedSequence],
    limits: TreeLimits,
    ordering: Ordering,
    device: torch.device,
) -> BeamTree:
    """Returns the builder of a tree for each sequence, in their order.

    Args:
        sequences: Sequences that the trees continue; coupled drafts follow their sampling.
        limits: Limits of the largest tree.
        ordering: Order in which children of a node are chosen.
        device: Device of the logits.
    """
    (steps, topk, nodes), rows = limits, None
    if ordering == "coupled":
        rows = SamplingRows.from_params(
            [sequence.sampling for sequence in sequences],
            [sequence.num_tokens for sequence in sequences],
            device,
        )
    return BeamTree(len(sequences), steps, topk, nodes + 1, ordering, rows)


class _Beams:
    """Holds the trees of sequences that want the same number of levels and beams."""

    def __init__(
        self, requests: list[TreeRequest], ordering: Ordering, token_map: torch.Tensor | None
    ) -> None:
        self.requests = requests
        self._token_map = token_map
        self.num_steps, self.topk, _ = requests[0].limits
        known = [request.logits for request in requests if request.logits is not None]
        self.logits = torch.stack(known)[:, None]  # [B, K, V]
        features = [request.feature for request in requests if request.feature is not None]
        self.features = torch.stack(features)[:, None] if features else None  # [B, K, H]
        self.tokens: list[list[int]] = []
        self.level = -1
        self._max_nodes = [request.limits.nodes for request in requests]
        self.tree = empty_trees(
            [request.sequence for request in requests],
            TreeLimits(self.num_steps, self.topk, max(self._max_nodes)),
            ordering,
            self.logits.device,
        )

    def expand(self) -> bool:
        """Adds a level from the logits of the previous one.

        Returns whether the selected tokens need a forward.
        """
        tokens, beams = self.tree.expand(self.logits, self._token_map)
        self.level += 1
        if self.level + 1 == self.num_steps:
            return False
        if self.features is not None:
            index = beams[:, :, None].expand(-1, -1, self.features.shape[-1])
            self.features = self.features.gather(1, index)
        self.tokens = tokens.tolist()
        return True

    def finish(self) -> list[DraftTree]:
        return self.tree.finish(self._max_nodes)
