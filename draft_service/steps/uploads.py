"""Uploads of a draft step of fixed shape: records of the sequences, and changes of their page
tables.

Steps may wait in the stream before the device runs them. Therefore they are filled into pinned
blocks that are used in turn, and a block is reused only when its step is complete.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from draft_service.steps.records import DraftShape, record
from foredraft.record_layout import WORD

PAGE_UPDATES = 512  # maximum number of page updates in one upload


class _Block:
    """A host block: page updates, then records."""

    def __init__(self, max_batch: int, kind: np.dtype[Any], is_pinned: bool) -> None:
        size = 3 * PAGE_UPDATES + max_batch * kind.itemsize // WORD
        self.host = torch.zeros(size, dtype=torch.int32, pin_memory=is_pinned)
        self.updates = self.host[: 3 * PAGE_UPDATES].view(3, PAGE_UPDATES).numpy()
        self.records = self.host[3 * PAGE_UPDATES :].numpy().view(kind)
        self.num_updates = PAGE_UPDATES  # number of updates that the block still holds
        self.done = torch.cuda.Event() if is_pinned else None

    @property
    def is_done(self) -> bool:
        return self.done is None or self.done.query()


class Uploads:
    """Holds the blocks of one attach, and their memory on the device.

    Args:
        max_batch: Maximum number of records of a step.
        spare_row: Row of `HandedOn` for records that use none.
        num_blocks: Maximum number of steps that are not complete.
        device: Device of the steps.
    """

    def __init__(
        self,
        shape: DraftShape,
        max_batch: int,
        spare_row: int,
        num_blocks: int,
        device: torch.device,
    ) -> None:
        self._shape, self._spare_row = shape, spare_row
        kind = record(shape.num_rows)
        self._width = kind.itemsize // WORD
        self._padding = np.zeros((), kind)
        self._padding["slot"], self._padding["row"] = shape.max_slots, spare_row
        self._is_pinned = device.type == "cuda"
        self._blocks = [_Block(max_batch, kind, self._is_pinned) for _ in range(num_blocks)]
        self._now = 0
        self._inputs = torch.zeros_like(self._blocks[0].host, pin_memory=False, device=device)
        # Page tables of the slots and of padding. Unused updates go to padding's first entry.
        self.tables = torch.zeros(
            shape.max_slots + 1, shape.max_pages, dtype=torch.int32, device=device
        )
        self._updates: dict[tuple[int, int], int] = {}  # pages by slot and entry

    @property
    def is_free(self) -> bool:
        """Whether another step can be filled in."""
        return self._blocks[(self._now + 1) % len(self._blocks)].is_done

    @property
    def is_done(self) -> bool:
        """Whether everything up to the newest `finish` is complete."""
        return self._blocks[self._now].is_done

    def set_pages(self, slot: int, first_entry: int, pages: list[int]) -> None:
        """Writes a part of a slot's page table, for the steps after this."""
        room = max(0, self._shape.max_pages - first_entry)
        for i, page in enumerate(pages[:room]):
            # The later of two updates of an entry counts; the device applies them in any order.
            self._updates[slot, first_entry + i] = page

    def records(self, num_sequences: int, batch: int) -> npt.NDArray[np.void]:
        """Returns the `num_sequences` records to fill in for a step, once `is_free`; the rest
        of `batch` is filled in already.

        They are views of a pinned block, with `tokens` and `hidden_rows` [R]: indices of the
        tokens' hidden states in the source, which are read where the model has features.
        """
        self._now = (self._now + 1) % len(self._blocks)
        rows = self._blocks[self._now].records[:batch]
        rows[num_sequences:] = self._padding
        rows = rows[:num_sequences]
        rows["row"], rows["step"] = self._spare_row, 0
        return rows

    def send(self, batch: int) -> None:
        """Sends the records and the page updates to the device."""
        self._fill_updates()
        end = 3 * PAGE_UPDATES + batch * self._width
        self._inputs[:end].copy_(self._blocks[self._now].host[:end], non_blocking=True)

    def finish(self) -> None:
        """Marks the end of the step that was sent last."""
        done = self._blocks[self._now].done
        if done is not None:
            done.record()

    def on_device(self, batch: int) -> torch.Tensor:
        """Returns the records that were sent, int32 [batch, width]."""
        start = 3 * PAGE_UPDATES
        return self._inputs[start : start + batch * self._width].view(batch, self._width)

    @property
    def updates(self) -> torch.Tensor:
        """The page updates that were sent, int32 [3, PAGE_UPDATES]."""
        return self._inputs[: 3 * PAGE_UPDATES].view(3, PAGE_UPDATES)

    def _fill_updates(self) -> None:
        """Writes page updates into the block, as many as it holds; further ones are applied
        before, at once.
        """
        slots = [slot for slot, _ in self._updates]
        entries = [entry for _, entry in self._updates]
        numbers = list(self._updates.values())
        self._updates.clear()
        late = max(0, len(slots) - PAGE_UPDATES)
        if late:
            early = torch.tensor([slots[:late], entries[:late], numbers[:late]])
            if self._is_pinned:
                early = early.pin_memory()
            early = early.to(self.tables.device, non_blocking=True)
            apply_updates(early.to(torch.int32), self.tables)
        count = len(slots) - late
        block = self._blocks[self._now]
        updates = block.updates
        updates[0, :count], updates[1, :count], updates[2, :count] = (
            slots[late:],
            entries[late:],
            numbers[late:],
        )
        if count < block.num_updates:
            updates[0, count : block.num_updates] = self._shape.max_slots
            updates[1:, count : block.num_updates] = 0
        block.num_updates = count


def apply_updates(updates: torch.Tensor, tables: torch.Tensor) -> None:
    """Writes page updates into tables.

    Args:
        updates: int32 [3, n]: slots, entries, pages.
        tables: int32 [slots + 1, max_pages], changed.
    """
    slots, entries, pages = updates
    tables.index_put_((slots.long(), entries.long()), pages)
