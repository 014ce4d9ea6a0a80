"""Which forwards have to run once on a GPU, so that no later one compiles a kernel, which would hold up a step for a second.

Outside of graphs the number of rows, of sequences and of keys decide which variants of the kernels a forward launches.
"""

import bisect
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from foredraft.attention.paged_triton import splits_for
from foredraft.kernel_launch import power_of_two
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.batch import SequenceRows
from foredraft.speculation.draft_tree import DraftTree

# Up to so many rows products, norms and writes to the cache are the same kernels; `layers.few_rows`, `layers.fused`.
SAME_KERNELS = (1, 4, 16, 32, 64)
MOST_SCORED = 128  # rows whose logits are all wanted; of more they would take much memory
LARGEST_TILE = (
    512  # rows times query heads of a KV head, from which on attention's tiles are the same
)
PARTS_OF_ROWS = 64  # rows from which on attention's parts may be added up otherwise


@dataclass(frozen=True, slots=True)
class Reach:
    """How large forwards outside of graphs can be.

    Attributes:
        num_rows: Of all sequences.
        num_sequences: In one forward.
        num_keys: Of a sequence.
        num_tree_rows: Of a tree with branches, the root included; 0 where none come.
    """

    num_rows: int
    num_sequences: int
    num_keys: int
    num_tree_rows: int = 0


@dataclass(frozen=True, slots=True)
class ForwardShape:
    """A forward of sequences that are all alike, but that the last ones may be trees.

    Attributes:
        num_rows: Of each; of a tree at most `Reach.num_tree_rows`.
        num_keys: Of each, those of the rows included.
        num_trees: Of the sequences.
    """

    num_sequences: int
    num_rows: int
    num_keys: int
    num_trees: int = 0

    def rows(self, page_size: int, num_tree_rows: int = 0) -> list[SequenceRows]:
        """What a runner takes; all keys are on page 0."""
        pages = [0] * -(-self.num_keys // page_size)
        start = self.num_keys - self.num_rows
        scored = self.num_sequences * self.num_rows <= MOST_SCORED
        tokens = [0] * self.num_rows
        chunk = SequenceRows.chunk(pages, start, tokens, "all" if scored else "last")
        num_nodes = min(self.num_rows, num_tree_rows) - 1
        tree = DraftTree((0,) * num_nodes, (-1,) * num_nodes)
        num_chunks = self.num_sequences - self.num_trees
        trees = [SequenceRows.tree(pages, start, 0, tree)] * self.num_trees
        return [chunk] * num_chunks + trees


def forwards_to_run(reach: Reach, kv: PagedKV, group_size: int) -> list[list[SequenceRows]]:
    """The fewest forwards found that launch every variant within reach. They write to page 0 of the cache."""
    return [
        shape.rows(kv.page_size, reach.num_tree_rows) for shape in shapes(reach, kv, group_size)
    ]


def shapes(reach: Reach, kv: PagedKV, group_size: int) -> list[ForwardShape]:
    """Of all shapes within reach, the small ones first, each that launches something that none before it does."""
    met: set[Hashable] = set()
    kept = []
    for shape in _all_shapes(reach, group_size):
        new = set(variants(shape, kv, group_size)) - met
        if new:
            kept.append(shape)
            met |= new
    return kept


def variants(shape: ForwardShape, kv: PagedKV, group_size: int) -> Iterator[Hashable]:
    """What tells the kernels of a forward from those of others; a few are told apart that are the same."""
    num_rows = shape.num_sequences * shape.num_rows
    yield "rows", bisect.bisect_left(SAME_KERNELS, num_rows)
    num_scored = num_rows if num_rows <= MOST_SCORED else shape.num_sequences
    yield "scored", bisect.bisect_left(SAME_KERNELS, num_scored)
    tile = min(max(16, power_of_two(shape.num_rows * group_size)), LARGEST_TILE)
    splits = splits_for(shape.num_sequences, shape.num_rows, kv, shape.num_keys, group_size)
    masks = (shape.num_trees > 0) + (shape.num_trees == shape.num_sequences)
    yield "attention", tile, splits > 1, masks
    if splits > 1:
        yield "sums", splits, num_rows >= PARTS_OF_ROWS


def _all_shapes(reach: Reach, group_size: int) -> Iterator[ForwardShape]:
    most = min(reach.num_rows, reach.num_keys)
    # Of those with one tile the fewest rows leave room for the most parts.
    least = (tile // group_size + 1 for tile in _doubled(LARGEST_TILE))
    sizes = sorted({*_doubled(most), *(num_rows for num_rows in least if num_rows <= most)})
    for num_sequences in _doubled(min(reach.num_sequences, reach.num_rows)):
        for num_rows in sizes:
            if num_sequences * num_rows > reach.num_rows:
                break
            for num_keys in (num_rows, *(n for n in _doubled(reach.num_keys) if n > num_rows)):
                yield ForwardShape(num_sequences, num_rows, num_keys)
                if 2 < num_rows <= reach.num_tree_rows:
                    yield ForwardShape(num_sequences, num_rows, num_keys, num_sequences)
                if num_rows > 2 and reach.num_tree_rows > 2 and num_sequences > 1:
                    yield ForwardShape(num_sequences, num_rows, num_keys, 1)


def _doubled(most: int) -> list[int]:
    """The powers of two up to a number, and that."""
    return sorted({1 << i for i in range(most.bit_length())} | {most})
