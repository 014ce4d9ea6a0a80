"""Messages that rank 0 sends the other ranks: a header, followed by records and int32 arrays.

Nothing is unpickled, since messages may come from another host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from foredraft.record_layout import WORD, Layout
from foredraft.runner.batch import SequenceRows, StepRows
from foredraft.sampling.rows import SamplingRows
from verify_service.executor.records import PageUpdate


class Kind(IntEnum):
    """Kinds of messages."""

    STOP = 0
    SETUP = 1  # creates the cache and the captured steps
    FORWARD = 2
    MOVE = 3  # moves accepted rows' keys and values
    LOGITS = 4  # computes logits of hidden states, which are broadcast next
    # Messages for captured steps, see `graphs`.
    PAGES = 5  # parts of page tables
    STEP = 6
    PREPARE = 7  # captures a step
    TWO_PHASE_STEP = 8  # a two-phase step
    GRAPH_FORWARD = 9
    MIXED = 10  # a forward with prompts
    MIXED_WARM_UP = 11
    # Messages about the logits of the newest forward, see `choice`.
    CHOICE = 12
    GATHER = 13
    MEMORY = 14  # gathers the ranks' free GPU memory


# Begins every message.
HEADER = Layout(
    ("kind", np.int32),
    ("count", np.int32),  # number of records, of sequences, or of rows of logits
    ("num_layers", np.int32),  # number of layers whose input residual stream is wanted
)
SEQUENCE = Layout(
    ("num_rows", np.int32),
    ("num_pages", np.int32),
    ("prefix_start", np.int32),
    ("prefix_len", np.int32),
    ("write_index", np.int32),
    ("logits", np.int32),  # index in LOGITS
    ("reach", np.int32),
    ("num_mask", np.int32),  # elements of the mask, 0 for none
    ("num_tail", np.int32),  # positions of the tail's keys, 0 for none
)
MIXED_ROWS = Layout(
    ("slot", np.int32),
    ("start", np.int32),
    ("num_rows", np.int32),
    ("num_parents", np.int32),  # number of a tree's nodes, or NO_TREE
    ("logits", np.int32),  # index in LOGITS
    ("reach", np.int32),
)
NO_TREE = -1
PAGES = Layout(("slot", np.int32), ("first", np.int32), ("num_pages", np.int32))
PATH = Layout(("committed", np.int32), ("num_pages", np.int32), ("num_rows", np.int32))
CHOICE = Layout(
    ("row", np.int32),  # row of the forward's logits
    ("temperature", np.float32),
    ("min_p", np.float32),
    ("seed", np.int64),
    ("position", np.int64),
)
LOGITS = ("all", "last", "none")

Path = tuple[Sequence[int], int, Sequence[int]]  # page table, committed keys, accepted rows


@dataclass(frozen=True, slots=True)
class Forward:
    """Holds the arguments of `ModelRunner.forward`."""

    rows: list[SequenceRows]
    capture: tuple[int, ...]
    all_hidden: bool


class Reader:
    """Reads a message from its beginning on, part by part in the order of writing.

    Attributes:
        kind, count, num_layers: Fields of the header.
    """

    def __init__(self, message: bytes) -> None:
        self._message, self._begin = message, 0
        [header] = self.records(HEADER, 1)
        self.kind = Kind(int(header["kind"]))
        self.count, self.num_layers = int(header["count"]), int(header["num_layers"])

    def records(self, layout: Layout, count: int) -> npt.NDArray[np.void]:
        """Returns the next records, of a layout."""
        return self._next(layout.whole(), count)

    def words(self, length: int) -> npt.NDArray[np.int32]:
        """Returns the next int32 numbers."""
        return self._next(np.dtype(np.int32), length)

    def ints(self, length: int) -> list[int]:
        """Returns the next int32 numbers as a list."""
        return self.words(length).tolist()

    def _next(self, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        found = np.frombuffer(self._message, dtype, count, self._begin)
        self._begin += found.nbytes
        return found


def kind_of(message: bytes) -> Kind:
    """Returns the kind of a message."""
    return Reader(message).kind


def stop() -> bytes:
    """Returns the message that ends a rank."""
    return header(Kind.STOP)


def setup(cache: tuple[int, int, int], sizes: Sequence[int] = ()) -> bytes:
    """Returns the message that creates a worker's cache, and its captured steps if `sizes` are
    given.

    Args:
        cache: Number of pages, tokens per page, number of scratch pages.
        sizes: Sizes of captured steps, see `graphs.GraphSizes.numbers`.
    """
    return header(Kind.SETUP, len(sizes)) + _ints([*cache, *sizes])


def read_setup(message: bytes) -> tuple[tuple[int, int, int], list[int]]:
    """Returns the arguments of `setup` from its message."""
    rest = Reader(message)
    num_pages, page_size, num_scratch = rest.ints(3)
    return (num_pages, page_size, num_scratch), rest.ints(rest.count)


def forward(rows: Sequence[SequenceRows], capture: Sequence[int], all_hidden: bool) -> bytes:
    """Returns the message for `ModelRunner.forward`."""
    own_headers, arrays = [], [_ints([*capture, all_hidden])]
    for one in rows:
        mask = b"" if one.tail_mask is None else _ints(one.tail_mask.flatten().tolist())
        tail = b"" if one.tail_positions is None else _ints(one.tail_positions)
        own_headers.append(
            (
                len(one.tokens),
                len(one.pages),
                one.prefix_start,
                one.prefix_len,
                one.write_index,
                LOGITS.index(one.logits),
                one.reach,
                len(mask) // WORD,
                len(tail) // WORD,
            )
        )
        arrays += [_ints(one.tokens), _ints(one.positions), _ints(one.pages), mask, tail]
    begin = header(Kind.FORWARD, len(rows), len(capture))
    return begin + packed(SEQUENCE, own_headers) + b"".join(arrays)


def read_forward(message: bytes) -> Forward:
    """Returns the arguments of `forward` from its message."""
    rest = Reader(message)
    sequences = rest.records(SEQUENCE, rest.count)
    *capture, all_hidden = rest.ints(rest.num_layers + 1)  # the flag comes after the layers
    rows = []
    for own in sequences:
        num_rows = int(own["num_rows"])
        tokens, positions = rest.ints(num_rows), rest.ints(num_rows)
        pages = rest.ints(int(own["num_pages"]))
        mask, tail = rest.ints(int(own["num_mask"])), rest.ints(int(own["num_tail"]))
        rows.append(
            SequenceRows(
                tokens=tokens,
                positions=positions,
                pages=pages,
                prefix_len=int(own["prefix_len"]),
                write_index=int(own["write_index"]),
                prefix_start=int(own["prefix_start"]),
                tail_mask=torch.tensor(mask).bool().view(num_rows, -1) if mask else None,
                tail_positions=tail or None,
                logits=LOGITS[int(own["logits"])],  # type: ignore[arg-type]
                reach=int(own["reach"]),
            )
        )
    return Forward(rows, tuple(capture), bool(all_hidden))


def move(paths: Sequence[Path]) -> bytes:
    """Returns the message for `ModelRunner.commit_paths`."""
    records = [(committed, len(pages), len(rows)) for pages, committed, rows in paths]
    arrays = [_ints(pages) + _ints(rows) for pages, _, rows in paths]
    return header(Kind.MOVE, len(paths)) + packed(PATH, records) + b"".join(arrays)


def read_move(message: bytes) -> list[Path]:
    """Returns the arguments of `move` from its message."""
    rest = Reader(message)
    return [
        (rest.ints(int(own["num_pages"])), int(own["committed"]), rest.ints(int(own["num_rows"])))
        for own in rest.records(PATH, rest.count)
    ]


def logits(num_rows: int) -> bytes:
    """Returns the message for `ModelRunner.logits`."""
    return header(Kind.LOGITS, num_rows)


def read_logits(message: bytes) -> int:
    """Returns the number of rows from the message of `logits`."""
    return Reader(message).count


def choice(index: Sequence[int], rows: SamplingRows) -> bytes:
    """Returns the message for a choice of tokens at some rows, without top-k and top-p.

    Args:
        index: Indices of the rows in the forward's logits.
        rows: Sampling parameters of the rows.
    """
    own = (rows.temperature, rows.min_p, rows.seed, rows.position)
    columns = zip(index, *(each.tolist() for each in own), strict=True)
    return header(Kind.CHOICE, len(index)) + packed(CHOICE, list(columns))


def read_choice(message: bytes) -> tuple[list[int], SamplingRows]:
    """Returns the arguments of `choice` from its message."""
    rest = Reader(message)
    count, read = rest.count, rest.records(CHOICE, rest.count)
    columns = {name: torch.from_numpy(read[name].copy()) for name in CHOICE.names[1:]}
    rows = SamplingRows(
        **columns,
        top_p=torch.ones(count),
        top_k=torch.zeros(count, dtype=torch.int64),
        any_sampled=bool((columns["temperature"] > 0).any()),
        any_ranked=False,
        any_filtered=bool((columns["min_p"] > 0).any()),
    )
    return read["row"].tolist(), rows


def gather(index: Sequence[int]) -> bytes:
    """Returns the message that asks for whole rows of the forward's logits."""
    return header(Kind.GATHER, len(index)) + _ints(index)


def read_gather(message: bytes) -> list[int]:
    """Returns the indices of the rows from the message of `gather`."""
    rest = Reader(message)
    return rest.ints(rest.count)


def pages(updates: Sequence[PageUpdate]) -> bytes:
    """Returns the message for `StepBuffers.set_pages`."""
    records = [(slot, first, len(own)) for slot, first, own in updates]
    arrays = [_ints(own) for _, _, own in updates]
    return header(Kind.PAGES, len(updates)) + packed(PAGES, records) + b"".join(arrays)


def read_pages(message: bytes) -> list[PageUpdate]:
    """Returns the arguments of `pages` from its message."""
    rest = Reader(message)
    return [
        (int(own["slot"]), int(own["first"]), rest.ints(int(own["num_pages"])))
        for own in rest.records(PAGES, rest.count)
    ]


def mixed(rows: Sequence[StepRows], capture: Sequence[int]) -> bytes:
    """Returns the message for `MixedGraphs.forward`."""
    records, arrays = [], [_ints(capture)]
    for one in rows:
        parents = NO_TREE if one.parents is None else len(one.parents)
        logits = LOGITS.index(one.logits)
        records.append((one.slot, one.start, len(one.tokens), parents, logits, one.reach))
        arrays += [_ints(one.tokens), _ints(one.parents or ())]
    begin = header(Kind.MIXED, len(rows), len(capture))
    return begin + packed(MIXED_ROWS, records) + b"".join(arrays)


def read_mixed(message: bytes) -> tuple[list[StepRows], list[int]]:
    """Returns the arguments of `mixed` from its message."""
    rest = Reader(message)
    records, capture = rest.records(MIXED_ROWS, rest.count), rest.ints(rest.num_layers)
    rows = []
    for own in records:
        tokens, num_parents = rest.ints(int(own["num_rows"])), int(own["num_parents"])
        rows.append(
            StepRows(
                slot=int(own["slot"]),
                start=int(own["start"]),
                tokens=tokens,
                parents=None if num_parents == NO_TREE else rest.ints(num_parents),
                logits=LOGITS[int(own["logits"])],  # type: ignore[arg-type]
                reach=int(own["reach"]),
            )
        )
    return rows, capture


def mixed_warm_up(capture: Sequence[int], has_branches: bool) -> bytes:
    """Returns the message for `MixedGraphs.warm_up`."""
    return header(Kind.MIXED_WARM_UP, has_branches, len(capture)) + _ints(capture)


def read_mixed_warm_up(message: bytes) -> tuple[list[int], bool]:
    """Returns the arguments of `mixed_warm_up` from its message."""
    rest = Reader(message)
    return rest.ints(rest.num_layers), bool(rest.count)


def header(kind: Kind, count: int = 0, num_layers: int = 0) -> bytes:
    """Returns the header that every message begins with."""
    return packed(HEADER, [(kind, count, num_layers)])


def packed(layout: Layout, rows: Sequence[tuple[int | float, ...]]) -> bytes:
    """Returns rows as the bytes of records of a layout."""
    records = np.zeros(len(rows), layout.whole())
    for name, values in zip(layout.names, zip(*rows, strict=True), strict=bool(rows)):
        records[name] = values
    return records.tobytes()


def _ints(values: Sequence[int]) -> bytes:
    return np.asarray(values, np.int32).tobytes()
