"""Which forwards have to run once on a GPU, so that none that no graph holds compiles a kernel, which would hold up a step.

Under `few_variants` most kernels are the same for all forwards; those of attention depend on the numbers of rows and keys.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from foredraft.attention.paged_triton import splits_for
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.batch import SequenceRows
from foredraft.trees.draft_tree import DraftTree

LARGER_TILES = 256  # rows times query heads of a KV head, above which attention's tiles are larger


@dataclass(frozen=True, slots=True)
class Reach:
    """How large forwards outside of graphs can be.

    Attributes:
        num_rows: Of all sequences.
        num_sequences: In one forward.
        num_keys: Of a sequence.
        num_tree_rows: Of a tree with branches, the root included; 0 where none come.
        cut_keys: See `few_variants`.
    """

    num_rows: int
    num_sequences: int
    num_keys: int
    num_tree_rows: int = 0
    cut_keys: bool = True


@dataclass(frozen=True, slots=True)
class ForwardShape:
    """A forward of one sequence, and perhaps of another one that is a tree.

    Attributes:
        num_rows: Of the one; 0 for a tree alone.
        num_keys: Of each, those of its rows included.
        num_tree_rows: Of the other.
    """

    num_rows: int
    num_keys: int
    num_tree_rows: int = 0

    def rows(self, page_size: int) -> list[SequenceRows]:
        """What a runner takes; all keys are on page 0."""
        pages, found = [0] * -(-self.num_keys // page_size), []
        if self.num_rows:
            start = self.num_keys - self.num_rows
            found.append(SequenceRows.chunk(pages, start, [0] * self.num_rows))
        if self.num_tree_rows:
            num_nodes = self.num_tree_rows - 1
            tree = DraftTree((0,) * num_nodes, (-1,) * num_nodes)
            start = self.num_keys - self.num_tree_rows
            found.append(SequenceRows.tree(pages, start, 0, tree))
        return found


def forwards_to_run(reach: Reach, kv: PagedKV, group_size: int) -> list[list[SequenceRows]]:
    """Of all shapes within reach those that launch a variant that none before launches. They write to page 0 of the cache."""
    met: set[Hashable] = set()
    kept = []
    for shape in _all_shapes(reach, group_size):
        most_rows = max(shape.num_rows, shape.num_tree_rows)
        is_cut = reach.cut_keys and not shape.num_tree_rows
        if is_cut:
            is_cut = splits_for(1, most_rows, kv, shape.num_keys, group_size) > 1
        variant = most_rows * group_size > LARGER_TILES, is_cut, shape.num_tree_rows > 0
        if variant not in met:
            met.add(variant)
            kept.append(shape.rows(kv.page_size))
    return kept


def _all_shapes(reach: Reach, group_size: int) -> Iterator[ForwardShape]:
    # Of those with one tile the fewest rows leave room for the most parts.
    for num_rows in (1, LARGER_TILES // group_size + 1):
        if num_rows <= min(reach.num_rows, reach.num_keys):
            longer = (1 << i for i in range(reach.num_keys.bit_length()))
            for num_keys in (num_rows, *(keys for keys in longer if keys > num_rows)):
                yield ForwardShape(num_rows, num_keys)
    least = LARGER_TILES // group_size + 1
    for num_tree_rows in (3, least):  # fewer rows have no branches
        if num_tree_rows <= reach.num_tree_rows:
            yield ForwardShape(0, num_tree_rows, num_tree_rows)
    if reach.num_tree_rows > 2 and reach.num_sequences > 1 and least <= reach.num_rows - 3:
        yield ForwardShape(least, least, 3)
