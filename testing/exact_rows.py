"""Attention over one text's queries, keys and values: alone, in chunks, in chains, on a path of
a tree.

A row must have the same bits, whatever computes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foredraft.attention.base import AttentionBackend, SequenceSpan
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.batch import ancestor_mask
from testing.attention_spans import batch_of, slots_of

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the text that one sequence of a step computes behind the earlier keys.

    Attributes:
        start: Its first position.
        num_rows: Number of rows of a chunk, a chain or a single token; not read for a tree.
        parents: Parents of a tree's nodes; None for consecutive rows.
        path: Rows of the tree that belong to the text, from the root down; the others hold
            arbitrary tokens.
    """

    start: int
    num_rows: int = 1
    parents: tuple[int, ...] | None = None
    path: tuple[int, ...] = ()


def random_tree(rng: np.random.Generator, start: int, depth: int, num_nodes: int) -> Part:
    """Returns a tree with a path of the text of `depth` nodes below the root, and nodes of
    other paths between them.
    """
    parents: list[int] = []
    path, last = [0], -1
    for node in range(num_nodes):
        missing = depth + 1 - len(path)
        if missing and (num_nodes - node <= missing or rng.random() < 0.4):
            parents.append(last)
            path.append(node + 1)
            last = node
        else:
            parents.append(int(rng.integers(-1, node)) if node else -1)
    return Part(start, parents=tuple(parents), path=tuple(path))


class ExactText:
    """Queries, keys and values of a text, in a cache of pages in any order.

    Args:
        heads: Query heads and KV heads.
        dtype: Type of queries and outputs.
        kv_dtype: Type of the cache.
    """

    def __init__(
        self,
        num_positions: int,
        heads: tuple[int, int],
        head_dim: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._rng = np.random.default_rng(num_positions)
        self._dtype, self._device, self._head_dim = dtype, device, head_dim
        self.num_positions, self.heads = num_positions, heads
        self.queries = self._random(num_positions, heads[0])
        # Some are far larger than the others: sums without rounding errors would agree in
        # any order.
        self.keys, self.values = (self._random(num_positions, heads[1]) for _ in range(2))
        self.keys[::97] *= 6
        self.values[::53] *= 30
        num_pages = 4 * num_positions // PAGE_SIZE + 64
        self.kv = PagedKV(1, num_pages, PAGE_SIZE, heads[1], head_dim, kv_dtype, device)

    def rows(
        self, backend: AttentionBackend, parts: Sequence[Part], window: int | None = None
    ) -> dict[int, torch.Tensor]:
        """Computes the parts in one step.

        Returns:
            For each of the text's positions among them, its output [heads * head_dim]; of the last
            part that has it.
        """
        free = list(self._rng.permutation(self.kv.num_pages))
        spans: list[SequenceSpan] = []
        queries: list[torch.Tensor] = []
        where: dict[int, int] = {}
        for part in parts:
            first_row = sum(span.num_rows for span in spans)
            span, own, positions = self._span(first_row, part, free)
            spans.append(span)
            queries.append(own)
            where |= {position: first_row + row for row, position in positions.items()}
        batch = batch_of(spans, PAGE_SIZE)
        batch.positions = batch.positions.to(self._device)
        heads, kv_heads = self.heads
        plan = backend.plan(batch, self.kv, (window,), heads // kv_heads)
        size = heads * self._head_dim
        out = torch.full((batch.num_rows, size), torch.nan, dtype=self._dtype, device=self._device)
        backend.attend(plan, torch.cat(queries), 0, window, self._head_dim**-0.5, out)
        return {position: out[row] for position, row in where.items()}

    def _span(
        self, first_row: int, part: Part, free: list[int]
    ) -> tuple[SequenceSpan, torch.Tensor, dict[int, int]]:
        """Returns the part's span, its queries, and the text's positions by row."""
        num_rows = part.num_rows if part.parents is None else 1 + len(part.parents)
        num_keys = part.start + num_rows
        pages = np.array([free.pop() for _ in range(-(-num_keys // PAGE_SIZE))])
        mask = tail_positions = None
        positions = np.arange(part.start, num_keys)
        rows = range(num_rows)
        if part.parents is not None:
            mask = ancestor_mask(part.parents)
            positions = tail_positions = part.start + mask.sum(1).numpy() - 1
            rows = part.path  # type: ignore[assignment]
        known = {row: int(positions[row]) for row in rows}
        span = SequenceSpan(
            first_row, positions, pages, 0, part.start, part.start, mask, tail_positions
        )
        own = [self._random(num_rows, heads) for heads in (self.heads[0], *2 * self.heads[1:])]
        of_text = self.queries, self.keys, self.values
        for mine, theirs in zip(own, of_text, strict=True):
            mine[list(known)] = theirs[list(known.values())]
        before = slots_of(span, PAGE_SIZE, 0, part.start).to(self._device)
        after = slots_of(span, PAGE_SIZE, part.start, num_keys).to(self._device)
        self.kv.write(0, before, torch.cat((self.keys, self.values), 1)[: part.start])
        self.kv.write(0, after, torch.cat(own[1:], 1))
        return span, own[0], known

    def _random(self, num_rows: int, heads: int) -> torch.Tensor:
        numbers = self._rng.normal(size=(num_rows, heads, self._head_dim))
        return torch.from_numpy(numbers).to(self._device, self._dtype)


def parts_with_other_bits(
    found: dict[int, torch.Tensor], wanted: dict[int, torch.Tensor]
) -> list[int]:
    """Returns the positions whose outputs differ in some bit."""
    return [
        position
        for position, row in found.items()
        if not torch.equal(row.view(torch.uint8), wanted[position].view(torch.uint8))
    ]
