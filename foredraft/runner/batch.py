"""Builds the batch of one forward from the rows of its sequences."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from foredraft.attention.base import Batch, SequenceSpan
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.trees.draft_tree import DraftTree, depths


@dataclass(frozen=True, slots=True)
class StepRows:
    """Describes the rows of one target sequence, which follow its committed keys.

    Attributes:
        slot: Number of the sequence's page table on the device, where tables are kept there.
        start: Number of committed keys.
        tokens: Input tokens; for a tree the root comes first.
        parents: Parents of the tree's nodes, as in `DraftTree`; None where each row follows the
            previous one.
        logits: Rows whose logits are computed.
        reach: Length that length-dependent rotary embeddings are stretched to (the prompt's), where
            it exceeds the rows' own; 0 for their own.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    parents: Sequence[int] | None
    logits: Literal["all", "last", "none"]
    reach: int = 0


@dataclass(slots=True)
class SequenceRows:
    """Describes the rows of one sequence in one forward.

    A key's index is its position in the order of the page table.

    Attributes:
        tokens: [n], input tokens.
        positions: [n], absolute; rotary embeddings and windows use them.
        pages: Page table for at least write_index + n keys. Further entries are not read.
        prefix_len: Keys [prefix_start, prefix_len) are visible to every row, subject to a layer's
            window; their position is their index.
        write_index: First of the key indexes write_index .. write_index + n - 1 that the rows write
            their KV at.
        prefix_start: First key that exists (a draft's valid-from position).
        tail_mask: bool [n, write_index + n - prefix_len]: which keys from prefix_len on each row
            sees, its own included. None for causal rows; then write_index == prefix_len.
        tail_positions: Positions of those keys, where they differ from their indexes.
        logits: Rows whose logits are computed.
        reach: See `StepRows`.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    pages: Sequence[int]
    prefix_len: int
    write_index: int
    prefix_start: int = 0
    tail_mask: torch.Tensor | None = None
    tail_positions: Sequence[int] | None = None
    logits: Literal["all", "last", "none"] = "all"
    reach: int = 0

    @classmethod
    def of(cls, rows: StepRows, pages: Sequence[int]) -> "SequenceRows":
        """Creates the rows of a target sequence with its page table."""
        if rows.parents is None:
            return cls.chunk(pages, rows.start, rows.tokens, rows.logits, rows.reach)
        tree = DraftTree(tuple(rows.tokens[1:]), tuple(rows.parents))
        return cls.tree(pages, rows.start, rows.tokens[0], tree)

    @classmethod
    def chunk(
        cls,
        pages: Sequence[int],
        start: int,
        tokens: Sequence[int],
        logits: Literal["all", "last", "none"] = "last",
        reach: int = 0,
    ) -> "SequenceRows":
        """Creates rows of consecutive tokens from position `start` on, after a prefix whose KV
        exists.
        """
        positions = range(start, start + len(tokens))
        return cls(tokens, positions, pages, start, start, logits=logits, reach=reach)

    @classmethod
    def tree(
        cls, pages: Sequence[int], committed_len: int, root: int, tree: DraftTree
    ) -> "SequenceRows":
        """Creates the rows of a draft tree.

        Row 0 is the root, the newest token, at position `committed_len`.
        """
        levels = depths(tree.parents)
        positions = [committed_len, *(committed_len + depth for depth in levels)]
        is_chain = tree.is_chain
        return cls(
            tokens=[root, *tree.tokens],
            positions=positions,
            pages=pages,
            prefix_len=committed_len,
            write_index=committed_len,
            tail_mask=None if is_chain else ancestor_mask(tree.parents),
            tail_positions=None if is_chain else positions,
        )


def ancestor_mask(parents: Sequence[int]) -> torch.Tensor:
    """Returns which rows of a tree each of its rows may attend to.

    Args:
        parents: Parent of every node, as in `DraftTree`.

    Returns:
        bool [n + 1, n + 1]: entry (i, j) says whether row j is row i or an ancestor of it. Row 0 is
        the root.
    """
    mask = np.eye(len(parents) + 1, dtype=np.bool_)
    for index, parent in enumerate(parents):
        mask[index + 1] |= mask[parent + 1]
    return torch.from_numpy(mask)


def build_batch(rows: Sequence[SequenceRows], kv: PagedKV) -> Batch:
    """Concatenates the rows of sequences to one batch.

    Args:
        rows: At least one sequence.
        kv: Cache that the sequences' pages are in.

    Raises:
        ValueError: A page table, mask or position list does not fit its rows, or names a page
            outside the cache.
    """
    page_size, num_slots, device = kv.page_size, kv.data.shape[2], kv.data.device
    tokens: list[int] = []
    pages: list[int] = []
    ends: list[tuple[int, int]] = []  # behind each sequence's rows, and behind its pages
    for sequence in rows:
        num_pages = _num_pages(sequence, page_size)
        tokens.extend(sequence.tokens)
        pages.extend(sequence.pages[:num_pages])
        ends.append((len(tokens), len(pages)))
    # One array for all sequences, whose spans are parts of it: making one takes a microsecond.
    all_pages, begins = np.array(pages, np.int64), [(0, 0), *ends[:-1]]
    all_positions = np.concatenate([_array(sequence.positions) for sequence in rows])
    spans = [
        _span(sequence, row, all_positions[row:end_row], all_pages[page:end_page])
        for sequence, (row, page), (end_row, end_page) in zip(rows, begins, ends, strict=True)
    ]
    counts = [span.num_rows for span in spans]
    indexes = np.arange(len(tokens))
    indexes += np.repeat([span.write_index - span.first_row for span in spans], counts)
    first_pages = np.repeat([page for _, page in begins], counts)
    slots = all_pages[first_pages + indexes // page_size] * page_size + indexes % page_size
    if slots.min() < 0 or slots.max() >= num_slots:
        raise ValueError(f"a page table names a page outside the cache of {num_slots} slots")
    logit_rows = _logit_rows(spans)
    parts = tokens, all_positions, slots, logit_rows or (), _reaches(rows)
    uploaded = _uploaded(parts, device)
    return Batch(
        tokens=uploaded[0],
        positions=uploaded[1],
        slots=uploaded[2],
        spans=spans,
        logit_rows=None if logit_rows is None else uploaded[3],
        reaches=uploaded[4] if len(uploaded[4]) else None,
    )


def _uploaded(
    parts: Sequence[Sequence[int] | npt.NDArray[np.int64]], device: torch.device
) -> list[torch.Tensor]:
    """Returns int64 tensors on the device, by one copy that does not wait for what the device has
    yet to do.
    """
    # Kernels have variants for what begins at 16 bytes.
    rooms = [len(part) + len(part) % 2 for part in parts]
    block = torch.empty(sum(rooms), dtype=torch.int64, pin_memory=device.type == "cuda")
    begins = itertools.accumulate(rooms, initial=0)
    places = [slice(begin, begin + len(part)) for begin, part in zip(begins, parts, strict=False)]
    numbers = block.numpy()
    for place, part in zip(places, parts, strict=True):
        numbers[place] = part
    sent = block.to(device, non_blocking=True)
    return [sent[place] for place in places]


def _array(numbers: Sequence[int]) -> npt.NDArray[np.int64]:
    if isinstance(numbers, range):  # numpy would read it number by number
        return np.arange(numbers.start, numbers.stop, numbers.step)
    return np.asarray(numbers, np.int64)


def _logit_rows(spans: Sequence[SequenceSpan]) -> list[int] | None:
    """Returns the rows whose logits are computed; None for all."""
    if not any(span.first_wanted for span in spans):
        return None
    firsts = (span.first_row for span in spans)
    wanted = (range(span.first_wanted, span.num_rows) for span in spans)
    return [first + row for first, rows in zip(firsts, wanted, strict=True) for row in rows]


def _reaches(rows: Sequence[SequenceRows]) -> npt.NDArray[np.int64]:
    """Returns each row's reach; none at all where no sequence has one."""
    if not any(sequence.reach for sequence in rows):
        return np.empty(0, np.int64)
    return np.repeat([one.reach for one in rows], [len(one.tokens) for one in rows])


def _num_pages(rows: SequenceRows, page_size: int) -> int:
    """Returns how many entries of the page table are read.

    Raises:
        ValueError: The table is too short, or a mask or position list does not fit the rows.
    """
    num_rows = len(rows.tokens)
    num_keys = rows.write_index + num_rows
    num_tail = num_keys - rows.prefix_len
    if num_rows == 0 or len(rows.positions) != num_rows:
        raise ValueError(f"{num_rows} tokens with {len(rows.positions)} positions")
    if not 0 <= rows.prefix_start <= rows.prefix_len <= rows.write_index:
        raise ValueError(
            f"prefix_start {rows.prefix_start}, prefix_len {rows.prefix_len} and write_index "
            f"{rows.write_index} are not in order"
        )
    num_pages = -(-num_keys // page_size)
    if len(rows.pages) < num_pages:
        raise ValueError(f"{len(rows.pages)} pages of {page_size} do not hold {num_keys} keys")
    if rows.tail_mask is None and rows.write_index != rows.prefix_len:
        raise ValueError("keys between prefix_len and write_index need a tail_mask")
    if rows.tail_mask is not None and tuple(rows.tail_mask.shape) != (num_rows, num_tail):
        raise ValueError(f"tail_mask is {tuple(rows.tail_mask.shape)}, not {(num_rows, num_tail)}")
    if rows.tail_positions is not None and len(rows.tail_positions) != num_tail:
        raise ValueError(f"{len(rows.tail_positions)} tail_positions for {num_tail} keys")
    return num_pages


def _span(
    rows: SequenceRows,
    first_row: int,
    positions: npt.NDArray[np.int64],
    pages: npt.NDArray[np.int64],
) -> SequenceSpan:
    num_rows = len(positions)
    return SequenceSpan(
        first_row=first_row,
        positions=positions,
        pages=pages,
        prefix_start=rows.prefix_start,
        prefix_len=rows.prefix_len,
        write_index=rows.write_index,
        tail_mask=rows.tail_mask,
        tail_positions=None
        if rows.tail_positions is None
        else np.asarray(rows.tail_positions, dtype=np.int64),
        first_wanted={"all": 0, "last": num_rows - 1, "none": num_rows}[rows.logits],
    )
