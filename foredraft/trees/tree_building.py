"""Builds draft trees from a draft model's logits, level by level, for a whole batch.

The drafter runs the model. A draft decides only what is worth verifying, never what is right.
Candidates have one of two orders:

- `topk`: by the draft's own probability at temperature 1. A node's value is the product of the
  probabilities on its path (EAGLE-2, Li et al. 2024).
- `coupled`: by the score that the sampling rule would give to the draft's logits, noise included,
  under the request's temperature and filters. The first is what the target chooses if it agrees
  with the draft.

In the coupled order a node's value is the product over its path of the estimated probability that
the target's perturbed best token is this child. With perturbed scores s_i of the draft, and the
target's logits differing from the draft's by independent Gumbel noise of scale `DISAGREEMENT`, the
target's scores are s_i plus that noise over the temperature, so that P(child i is the best) =
softmax_i(temperature * s_i / DISAGREEMENT): near 1 where the draft's best leads by a wide gap,
shared where the gap is small. A greedy request is the limit of temperature 0, where it becomes the
probability of `topk`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from foredraft.sampling.rows import SamplingRows
from foredraft.sampling.sampling import greedy, perturbed_top, scrub
from foredraft.trees.draft_tree import EMPTY, DraftTree

Ordering = Literal["topk", "coupled"]

# 1 makes the greedy limit the draft's own probability, which is known to estimate acceptance well.
DISAGREEMENT = 1.0
# Perturbed scores that share the probability; further ones are too far behind to matter.
MIN_RIVALS = 16


class BeamTree:
    """Builds the trees of a batch by beam search, in one drafting round.

    For each of `num_steps` levels call `expand` with the draft's logits for the rows that it
    returned last (the root at first); then `finish`. Under `coupled` the chain of first children
    always survives and is always in the tree, so that a draft that equals the target is accepted
    completely.

    Args:
        batch: Number of sequences, B.
        num_steps: Number of levels.
        topk: Number of children taken per node and of beams kept per level, K.
        num_draft_tokens: Number of rows to verify, the root included.
        ordering: Order of candidates, see the module.
        rows: Sampling parameters of the sequences for `coupled`, with the position of the first
            drafted token.
    """

    def __init__(
        self,
        batch: int,
        num_steps: int,
        topk: int,
        num_draft_tokens: int,
        ordering: Ordering = "topk",
        rows: SamplingRows | None = None,
    ) -> None:
        if min(num_steps, topk, num_draft_tokens) < 1:
            raise ValueError("num_steps, topk and num_draft_tokens must be at least 1")
        if ordering == "coupled" and (rows is None or len(rows) != batch):
            raise ValueError("a coupled tree needs the sampling rows of its sequences")
        self.batch = batch
        self.num_steps = num_steps
        self.topk = topk
        self.num_draft_tokens = num_draft_tokens
        self._rows = rows if ordering == "coupled" else None
        self._level = 0
        # State of the newest beams; at first the root is the only one.
        self._values: torch.Tensor | None = None  # log values [B, K]
        self._nodes: torch.Tensor | None = None  # candidate indices [B, K]
        self._ancestors: torch.Tensor | None = None  # bool [B, K, level * K + K]
        # Candidates of all levels, [B, K] then [B, K * K] each; a candidate's index is its
        # place in the whole.
        self._all_keys: list[torch.Tensor] = []
        self._all_tokens: list[torch.Tensor] = []
        self._all_parents: list[torch.Tensor] = []
        self._num_candidates = 0

    def expand(
        self, logits: torch.Tensor, token_map: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the children of the current beams and selects the next beams among them.

        Args:
            logits: float32 [B, 1, V] for the root, then [B, K, V], in the order of the beams
                returned last.
            token_map: int64 [V], the target's token id of each column, for a reduced draft
                vocabulary.

        Returns:
            int64 [B, K] tokens of the selected beams (the target's ids), and int64 [B, K] the beam
            of the previous level that each of them continues (0 at the first level).
        """
        batch, num_beams, vocab = logits.shape
        if self._level >= self.num_steps:
            raise ValueError("every level is expanded already")
        if self.topk > vocab:
            raise ValueError(f"topk {self.topk} exceeds the vocabulary of {vocab}")
        if self.topk == 1:  # a chain: its one child is always taken
            columns, _ = self._children(logits[:, 0], token_map)
            tokens = columns if token_map is None else token_map[columns]
            self._all_tokens.append(tokens)
            self._level += 1
            return tokens, torch.zeros_like(tokens)
        columns, values = self._children(logits.reshape(batch * num_beams, vocab), token_map)
        values = values.nan_to_num(nan=-math.inf, neginf=-math.inf)  # rows without any token
        tokens = columns if token_map is None else token_map[columns]
        tokens = tokens.reshape(batch, num_beams * self.topk)
        values = values.reshape(batch, num_beams, self.topk)
        if self._values is not None:
            values = values + self._values[:, :, None]
        values = values.reshape(batch, -1)
        keys = values
        if self._rows is not None:
            keys = values.clone()
            keys[:, 0] = math.inf  # the first child of the first beam: the chain that always stays
        picked = keys.sort(dim=-1, descending=True, stable=True).indices[:, : self.topk]
        beams = picked // self.topk
        self._remember(keys, tokens, num_beams)
        self._nodes = picked + self._num_candidates
        self._num_candidates += tokens.shape[1]
        self._values = values.gather(-1, picked)
        self._ancestors = self._next_ancestors(beams)
        self._level += 1
        return tokens.gather(-1, picked), beams

    def ancestor_rows(self) -> torch.Tensor:
        """Returns which draft rows the newest beams may attend to, beside the committed prefix.

        Returns:
            bool [B, K, level * K + K], level counted from 0; row level * K + beam is that beam,
            itself included.
        """
        if self.topk == 1:
            return torch.ones(self.batch, 1, self._level, dtype=torch.bool)
        assert self._ancestors is not None, "expand comes first"
        return self._ancestors

    def finish(self, max_nodes: Sequence[int] | None = None) -> list[DraftTree]:
        """Returns trees of the most valuable candidates of all levels, ordered by value.

        A parent comes before its children, and the first nodes of a tree are the best tree of that
        size.

        Args:
            max_nodes: Limit below num_draft_tokens - 1 for every sequence.
        """
        if not self._all_tokens:
            return [EMPTY] * self.batch
        if self.topk == 1:
            chains = torch.cat(self._all_tokens, -1).tolist()
            grown = [DraftTree(tuple(chain), tuple(range(-1, len(chain) - 1))) for chain in chains]
            most = self.num_draft_tokens - 1
            limits = [most] * self.batch if max_nodes is None else max_nodes
            return [tree.first(min(n, most)) for tree, n in zip(grown, limits, strict=True)]
        keys = torch.cat(self._all_keys, -1)
        # A child's value is at most its parent's and its index is higher: a stable order takes the
        # parent first.
        order = keys.sort(dim=-1, descending=True, stable=True)
        best = order.indices[:, : self.num_draft_tokens - 1]
        usable = (order.values[:, : best.shape[1]] > -math.inf).sum(-1).tolist()
        chosen = best.tolist()
        tokens = torch.cat(self._all_tokens, -1).tolist()
        parents = torch.cat(self._all_parents, -1).tolist()
        trees = []
        for row in range(self.batch):
            limit = usable[row] if max_nodes is None else min(usable[row], max_nodes[row])
            nodes = chosen[row][:limit]
            index = {-1: -1} | {node: i for i, node in enumerate(nodes)}
            trees.append(
                DraftTree(
                    tuple(tokens[row][node] for node in nodes),
                    tuple(index[parents[row][node]] for node in nodes),
                )
            )
        return trees

    def _children(
        self, logits: torch.Tensor, token_map: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the K best columns [R, K] of logits [R, V] and their log values [R, K], best
        first.
        """
        logits = scrub(logits)
        if self._rows is None or not self._rows.any_sampled:
            return self._likeliest(logits)
        rows, num_beams = self._rows, logits.shape[0] // self.batch
        if num_beams > 1:
            owner = torch.arange(self.batch, device=logits.device)
            rows = rows.take(owner.repeat_interleave(num_beams))
        rows = replace(rows, position=rows.position + self._level)
        is_sampled = rows.temperature > 0
        if bool(is_sampled.all()):
            return self._coupled(logits, rows, token_map)
        columns, values = self._likeliest(logits)
        if bool(is_sampled.any()):
            columns[is_sampled], values[is_sampled] = self._coupled(
                logits[is_sampled], rows.take(is_sampled), token_map
            )
        return columns, values

    def _likeliest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.topk == 1:
            return greedy(logits)[:, None], torch.zeros_like(logits[:, :1])
        columns = logits.topk(self.topk, dim=-1).indices.sort(dim=-1).values
        top, order = logits.gather(-1, columns).sort(dim=-1, descending=True, stable=True)
        return columns.gather(-1, order), top - logits.logsumexp(-1, keepdim=True)

    def _coupled(
        self, logits: torch.Tensor, rows: SamplingRows, token_map: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_rivals = self.topk if self.topk == 1 else max(self.topk, MIN_RIVALS)
        columns, scores = perturbed_top(logits, rows, min(num_rivals, logits.shape[-1]), token_map)
        values = (scores * (rows.temperature[:, None] / DISAGREEMENT)).log_softmax(-1)
        return columns[:, : self.topk], values[:, : self.topk]

    def _remember(self, keys: torch.Tensor, tokens: torch.Tensor, num_beams: int) -> None:
        parents = (
            torch.full_like(tokens, -1)
            if self._nodes is None
            else self._nodes[:, :num_beams].repeat_interleave(self.topk, -1)
        )
        self._all_keys.append(keys)
        self._all_tokens.append(tokens)
        self._all_parents.append(parents)

    def _next_ancestors(self, beams: torch.Tensor) -> torch.Tensor:
        own = torch.eye(self.topk, dtype=torch.bool, device=beams.device)
        own = own.expand(self.batch, -1, -1)
        if self._ancestors is None:
            return own
        width = self._ancestors.shape[-1]
        inherited = self._ancestors.gather(1, beams[:, :, None].expand(-1, -1, width))
        return torch.cat([inherited, own], -1)
