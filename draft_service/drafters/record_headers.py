"""The part of a step's records that stays the same while a sequence lives."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from draft_service.drafters.paged_sequences import PagedSequence
from foredraft.sampling.columns import SAMPLING


class RecordHeaders:
    """Fills in slots, first keys and sampling parameters of records.

    Sampling parameters are packed once for each sequence, when it is first met.

    Args:
        num_slots: Number of slots of sequences.
    """

    def __init__(self, num_slots: int) -> None:
        # By slot: the sequence that has it, and its sampling parameters in the records' form.
        self._owners: list[PagedSequence | None] = [None] * num_slots
        self._sampling = np.zeros(num_slots, SAMPLING.block)
        self._is_sampled = np.zeros(num_slots, dtype=bool)
        self._is_ranked = np.zeros(num_slots, dtype=bool)

    def fill(
        self, records: npt.NDArray[np.void], sequences: Sequence[PagedSequence]
    ) -> npt.NDArray[np.int64]:
        """Fills in the records of sequences; returns the sequences' slots."""
        for sequence in sequences:
            if self._owners[sequence.slot] is not sequence:
                self._begin(sequence)
        slots = np.array([sequence.slot for sequence in sequences])
        records["slot"] = slots
        records["valid_from"] = [sequence.valid_from for sequence in sequences]
        records["sampling"] = self._sampling[slots]
        return slots

    def modes(self, slots: npt.NDArray[np.int64]) -> tuple[bool, bool]:
        """Returns the arguments of `DraftGraphs.draft` for the sequences of some slots."""
        return bool(self._is_sampled[slots].any()), bool(self._is_ranked[slots].any())

    def _begin(self, sequence: PagedSequence) -> None:
        slot, sampling = sequence.slot, sequence.sampling
        self._owners[slot] = sequence
        self._sampling[slot] = SAMPLING.pack([sampling])[0]
        self._is_sampled[slot] = sampling.is_sampled
        self._is_ranked[slot] = sampling.is_ranked
