"""Fills in the records of captured steps, and the page tables on the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foredraft.sampling.columns import SAMPLING
from foredraft.trees.draft_tree import NO_PARENT, ROOT, DraftTree
from verify_service.executor.base import Ahead, no_wait
from verify_service.executor.captured.shared_keys import COLUMNS, Sharers, columns_of, find_groups
from verify_service.executor.captured.step_buffers import StepBuffers
from verify_service.executor.choice.sampler import VerifyRows
from verify_service.executor.choice.simulation import SimulatedAcceptance
from verify_service.executor.kernels import adjust
from verify_service.executor.records import ADJUSTMENT
from verify_service.scheduler.request import Sequence as RequestSequence


@dataclass(frozen=True, slots=True)
class Members:
    """Holds the sequences of a step and the fields of their records that stay constant.

    They are reused while consecutive steps have the same sequences.

    Attributes:
        slots: Slots of the sequences.
        sampling: Sampling columns of their records.
        is_two_phase: Whether some sequence needs a two-phase step.
        is_filtered: Whether some sequence uses top-k, top-p or min-p.
    """

    sequences: list[RequestSequence]
    slots: list[int]
    sampling: npt.NDArray[np.void]
    is_two_phase: bool
    is_filtered: bool

    @classmethod
    def of(cls, sequences: list[RequestSequence], slots: list[int]) -> "Members":
        """Creates the members of a step from its sequences and their slots."""
        samplings = [sequence.sampling for sequence in sequences]
        return cls(
            sequences,
            slots,
            SAMPLING.pack(samplings),
            any(map(needs_two_phases, sequences)),
            any(sampling.is_filtered for sampling in samplings),
        )


NOBODY = Members([], [], SAMPLING.pack([]), is_two_phase=False, is_filtered=False)


class RecordFiller:
    """Fills in the records of one step after another.

    Args:
        buffers: Buffers of the records and page tables.
        simulated: Draws the number of accepted tokens, for benchmarks.

    Attributes:
        members: Sequences of the newest step.
        shares_keys: Whether the newest step reads shared keys only once.
    """

    def __init__(self, buffers: StepBuffers, simulated: SimulatedAcceptance | None) -> None:
        self._buffers, self._simulated = buffers, simulated
        self.members = NOBODY
        self.shares_keys = False
        # Of the members: those that begin with the same pages, once somebody has asked, and what
        # the records hold of them, by number of rows.
        self._groups: list[Sharers] | None = None
        self._columns: dict[int, npt.NDArray[np.int32] | None] = {}

    def fill_ahead(self, sequences: list[RequestSequence], num_rows: int, ahead: Ahead) -> None:
        """Fills in a step that starts from the sequences' state on the device.

        Args:
            num_rows: Number of rows of each sequence, padding included.
        """
        records = self._fill(sequences, num_rows)
        records["committed"] = -1
        if ahead.fetch is None:
            records["tree"], records["num_rows"] = -1, 1
        else:
            records["tree"] = [-1 if row is None else row for row in ahead.tree_rows]
            records["num_rows"] = [1 if row is None else num_rows for row in ahead.tree_rows]
        self._force(records)
        records["parents"][:, :num_rows] = NO_PARENT

    def fill_known(self, batch: Sequence[VerifyRows], num_rows: int) -> None:
        """Fills in and uploads a step that starts from committed tokens; see `fill_ahead`."""
        sequences = [rows.sequence for rows in batch]
        records = self._fill(sequences, num_rows)
        records["committed"] = [sequence.num_computed for sequence in sequences]
        records["num_rows"] = [rows.num_rows for rows in batch]
        self._force(records)
        records["tree"] = -1
        tokens, parents = (records[name][:, :num_rows] for name in ("tokens", "parents"))
        tokens[:, 0] = [sequence.tokens[-1] for sequence in sequences]
        parents[:, 0] = ROOT
        if num_rows > 1:
            _fill_trees(tokens[:, 1:], parents[:, 1:], [rows.tree for rows in batch])
        self._buffers.upload(len(batch))

    def _fill(self, sequences: list[RequestSequence], num_rows: int) -> npt.NDArray[np.void]:
        """Fills in everything but roots and trees."""
        records = self._buffers.next_records(len(sequences))
        self._fill_pages(records, sequences)
        slots = [sequence.slot or 0 for sequence in sequences]
        if self.members.sequences != sequences or self.members.slots != slots:
            self.members = Members.of(sequences, slots)
            self._groups, self._columns = None, {}
        records["slot"] = slots
        records["sampling"] = self.members.sampling
        self.shares_keys = False
        if self.members.is_two_phase:
            _fill_adjustments(records, sequences, num_rows)
        else:
            self._fill_shared_keys(records, num_rows)
        return records

    def _fill_shared_keys(self, records: npt.NDArray[np.void], num_rows: int) -> None:
        if num_rows not in self._columns:
            self._columns[num_rows] = self._shared_keys(len(records), num_rows)
        columns = self._columns[num_rows]
        self.shares_keys = columns is not None
        if columns is not None:
            for name, column in zip(COLUMNS, columns, strict=True):
                records[name] = column

    def _shared_keys(self, num_sequences: int, num_rows: int) -> npt.NDArray[np.int32] | None:
        """Returns the members' columns for steps of so many rows; None if no keys are shared."""
        sizes = self._buffers.block_sizes(num_sequences, num_rows)
        if not sizes.count:
            return None
        if self._groups is None:
            pages = [sequence.pages for sequence in self.members.sequences]
            self._groups = find_groups(pages, self._buffers.page_size)
        blocks = sizes.cut(self._groups)
        return columns_of(blocks, num_sequences) if blocks else None

    def _force(self, records: npt.NDArray[np.void]) -> None:
        """Sets the number of accepted tokens where outcomes are simulated; a sequence without a
        tree gets one token.
        """
        records["forced"] = 0
        if self._simulated is not None:
            drawn = self._simulated.draw(len(records))
            records["forced"] = np.minimum(drawn, records["num_rows"])

    def _fill_pages(
        self, records: npt.NDArray[np.void], sequences: Sequence[RequestSequence]
    ) -> None:
        """Writes changes of page tables into the records, if each record has at most one.

        More changes are uploaded separately.
        """
        entries, new_pages = records["entry"], records["new_page"]
        new_pages[:] = 0
        others = []
        for record, sequence in enumerate(sequences):
            first, size = sequence.device_pages_from, len(sequence.pages)
            if first + 1 == size:
                entries[record], new_pages[record] = first, 1 + sequence.pages[first]
                sequence.device_pages_from = size
            elif first < size:
                others.append(sequence)
        if others:
            self.update_pages(others)

    def update_pages(
        self, sequences: Sequence[RequestSequence], settle: Callable[[], None] = no_wait
    ) -> None:
        """Copies changed entries of the sequences' page tables to the device.

        Args:
            settle: See `Step`.
        """
        updates = []
        for sequence in sequences:
            first, size = sequence.device_pages_from, len(sequence.pages)
            if first < size:
                assert sequence.slot is not None
                updates.append((sequence.slot, first, sequence.pages[first:]))
                sequence.device_pages_from = size
        self._buffers.set_pages(updates, settle)


def _fill_trees(
    tokens: npt.NDArray[np.int32], parents: npt.NDArray[np.int32], trees: Sequence[DraftTree]
) -> None:
    """Fills in the nodes of trees, [n, nodes]; parents are row numbers."""
    size = tokens.shape[1]
    if all(len(tree) == size for tree in trees):
        tokens[:] = [tree.tokens for tree in trees]
        parents[:] = [tree.parents for tree in trees]
        parents += 1
        return
    parents[:] = NO_PARENT
    tokens[:] = 0
    for own_tokens, own_parents, tree in zip(tokens, parents, trees, strict=True):
        count = len(tree)
        own_tokens[:count] = tree.tokens
        own_parents[:count] = tree.parents
        own_parents[:count] += 1


def needs_two_phases(sequence: RequestSequence) -> bool:
    """Returns whether a request asks for more than the sampling rule."""
    sampling = sequence.sampling
    return sequence.is_masked or sampling.logprobs is not None or adjust.kinds(sampling) != 0


def _fill_adjustments(
    records: npt.NDArray[np.void], sequences: Sequence[RequestSequence], num_rows: int
) -> None:
    """Fills in the columns of the records that only two-phase steps read."""
    records["adjustment"] = ADJUSTMENT.pack(map(_adjustment, sequences))
    records["mask"] = 0
    for i, index in enumerate(masked_indexes(sequences)):
        records["mask"][index] = 1 + i * num_rows


def masked_indexes(sequences: Sequence[RequestSequence]) -> list[int]:
    """Returns the indexes of sequences that have masks."""
    return [i for i, sequence in enumerate(sequences) if sequence.is_masked]


def _adjustment(sequence: RequestSequence) -> tuple[float, ...]:
    sampling = sequence.sampling
    return (
        adjust.kinds(sampling),
        sequence.num_prompt + sampling.min_new_tokens,
        sampling.repetition_divisor,
        sampling.frequency_penalty,
        sampling.presence_penalty,
    )
