"""Lists the forwards that a GPU runs at start, so that no kernel is compiled during a step.

They cover forwards outside of graphs. Under `few_variants` most kernels are the same for all of
them; kernels of attention depend on the numbers of rows and keys, exact products and rotation on
whether the rows are many.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from foredraft.attention.base import AttentionBackend
from foredraft.attention.triton_plan import FEW_ROWS
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.batch import SequenceRows
from foredraft.trees.draft_tree import DraftTree

MANY_ROWS = 1025  # from which on exact products take larger tiles, see `exact_gemm`
LARGER_TILES = 256  # rows times query heads of a KV head, above which attention's tiles are larger


@dataclass(frozen=True, slots=True)
class Reach:
    """Limits the size of forwards outside of graphs.

    Attributes:
        num_rows: Maximum number of rows of all sequences.
        num_sequences: Maximum number of sequences in one forward.
        num_keys: Maximum number of keys of a sequence.
        num_tree_rows: Maximum number of rows of a tree with branches, the root included; 0 without
            such trees.
        cut_keys: Whether attention may cut keys into parts, see `few_variants`.
        halved_rows: Number of rows from which on halves are computed in turns, see
            `DecoderModel.halved_rows`; None where they never are.
    """

    num_rows: int
    num_sequences: int
    num_keys: int
    num_tree_rows: int = 0
    cut_keys: bool = True
    halved_rows: int | None = None


@dataclass(frozen=True, slots=True)
class ForwardShape:
    """Describes a forward of one causal sequence, of one tree, or of both.

    Attributes:
        num_rows: Number of rows of the causal sequence; 0 for a tree alone.
        num_keys: Number of keys of each sequence, its rows' own keys included.
        num_tree_rows: Number of rows of the tree; 0 for a causal sequence alone.
    """

    num_rows: int
    num_keys: int
    num_tree_rows: int = 0

    def rows(self, page_size: int) -> list[SequenceRows]:
        """Returns the rows to run; all keys are on page 0."""
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


def forwards_to_run(
    reach: Reach, kv: PagedKV, group_size: int, attention: AttentionBackend
) -> list[list[SequenceRows]]:
    """Selects, among all shapes within reach, those that launch a new kernel variant.

    They write to page 0 of the cache.
    """
    met: set[Hashable] = set()
    kept = []
    for shape in _all_shapes(reach, group_size):
        most_rows = max(shape.num_rows, shape.num_tree_rows)
        is_cut = reach.cut_keys and not shape.num_tree_rows
        if is_cut:
            is_cut = attention.cuts_keys(1, most_rows, shape.num_keys, group_size, kv)
        num_lines, is_tree = most_rows * group_size, shape.num_tree_rows > 0
        tile = (num_lines > FEW_ROWS or is_tree) + (num_lines > LARGER_TILES)
        variant = tile, is_cut, is_tree
        if variant not in met:
            met.add(variant)
            kept.append(shape.rows(kv.page_size))
    # Kernels of prompts: of attention, of exact products, of heads.
    num_rows = max(MANY_ROWS, attention.prompt_rows(group_size, kv) or 0)
    num_rows = min(num_rows, reach.num_rows, reach.num_keys)
    kept.append(ForwardShape(num_rows, num_rows).rows(kv.page_size))
    halved = reach.halved_rows
    if halved is not None and halved <= reach.num_rows:
        num_prompts = -(-halved // reach.num_keys)
        length = -(-halved // num_prompts)
        kept.append(num_prompts * ForwardShape(length, length).rows(kv.page_size))
    return kept


def _all_shapes(reach: Reach, group_size: int) -> Iterator[ForwardShape]:
    # Among forwards of one tile, those with the fewest rows have the most parts.
    for num_rows in (1, FEW_ROWS // group_size + 1, LARGER_TILES // group_size + 1):
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
