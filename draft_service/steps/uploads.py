"""What the host sends a draft's step of fixed shape: records of the sequences and changes of their page tables.

Steps may lie in the stream for a while before the device comes to them, so they are filled into pinned blocks that go
round: a block is filled anew only when the step that it was sent with is done.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from draft_service.steps.records import HEADER, ROW, SLOT, DraftShape

PAGE_UPDATES = 512  # of one upload


@dataclass(slots=True)
class StepRecords:
    """What the host fills in for a step, views of one pinned block.

    Attributes:
        header: int32 [B, HEADER].
        tokens: int32 [B, R].
        places: int32 [B, R], of each token's hidden state in the source; read where the model has features.
    """

    header: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    places: npt.NDArray[np.int32]


class _Block:
    """Page updates, then records, on the host."""

    def __init__(self, max_batch: int, width: int, is_pinned: bool) -> None:
        size = 3 * PAGE_UPDATES + max_batch * width
        self.host = torch.zeros(size, dtype=torch.int32, pin_memory=is_pinned)
        self.updates = self.host[: 3 * PAGE_UPDATES].view(3, PAGE_UPDATES).numpy()
        self.records = self.host[3 * PAGE_UPDATES :].view(max_batch, width).numpy()
        self.num_updates = PAGE_UPDATES  # that are in it from the time before
        self.done = torch.cuda.Event() if is_pinned else None

    @property
    def is_done(self) -> bool:
        return self.done is None or self.done.query()


class Uploads:
    """The blocks of one attach, and their place on the device.

    Args:
        max_batch: Records of a step at most.
        spare_row: Of what is handed on, for records that have none.
        num_blocks: Steps under way at most.
        device: Where the steps run.
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
        self._width = HEADER + 2 * shape.num_rows
        self._is_pinned = device.type == "cuda"
        self._blocks = [_Block(max_batch, self._width, self._is_pinned) for _ in range(num_blocks)]
        self._now = 0
        self._inputs = torch.zeros_like(self._blocks[0].host, pin_memory=False, device=device)
        # Of each slot, one for padding: its pages. Unused updates go to padding's first entry.
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
        """Whether everything up to the newest `finish` is done."""
        return self._blocks[self._now].is_done

    def set_pages(self, slot: int, first_entry: int, pages: list[int]) -> None:
        """Writes a part of a slot's page table, for the steps after this."""
        room = max(0, self._shape.max_pages - first_entry)
        for i, page in enumerate(pages[:room]):
            # Of two for one entry the later counts; the device takes them in any order.
            self._updates[slot, first_entry + i] = page

    def records(self, num_sequences: int, batch: int) -> StepRecords:
        """What to fill in for a step, once `is_free`: `num_sequences`; the others of `batch` are filled in already."""
        self._now = (self._now + 1) % len(self._blocks)
        rows, end = self._blocks[self._now].records[:batch], HEADER + self._shape.num_rows
        padding = rows[num_sequences:]
        padding[:] = 0
        padding[:, SLOT] = self._shape.max_slots
        rows[:, ROW] = self._spare_row
        rows = rows[:num_sequences]
        return StepRecords(rows[:, :HEADER], rows[:, HEADER:end], rows[:, end:])

    def send(self, batch: int) -> None:
        """Sends the records and the page updates to the device."""
        self._fill_updates()
        end = 3 * PAGE_UPDATES + batch * self._width
        self._inputs[:end].copy_(self._blocks[self._now].host[:end], non_blocking=True)

    def finish(self) -> None:
        """The step that was sent last ends here."""
        done = self._blocks[self._now].done
        if done is not None:
            done.record()

    def on_device(self, batch: int) -> torch.Tensor:
        """The records that were sent, int32 [batch, width]."""
        start = 3 * PAGE_UPDATES
        return self._inputs[start : start + batch * self._width].view(batch, self._width)

    @property
    def updates(self) -> torch.Tensor:
        """The page updates that were sent, int32 [3, PAGE_UPDATES]."""
        return self._inputs[: 3 * PAGE_UPDATES].view(3, PAGE_UPDATES)

    def _fill_updates(self) -> None:
        """Puts page updates into the block, as many as it holds; more of them wait for nothing and go first."""
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
