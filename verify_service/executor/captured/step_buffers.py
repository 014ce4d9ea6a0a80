"""What the host and captured decode steps exchange: records and page tables in, outcomes out.

A step's buffers are filled in this order: `next_records`, `set_pages`, `upload`; then the step
starts, and `download` fetches its outcome. There are `UNDER_WAY` sets of host buffers, taken in
turns.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from foredraft.models.decoder import ModelOutput
from foredraft.trees.draft_tree import NO_PARENT
from verify_service.executor.base import no_wait
from verify_service.executor.captured.running_step import UNDER_WAY, RunningStep, pinned
from verify_service.executor.captured.shapes import PaddedShapes
from verify_service.executor.captured.shared_keys import BlockSizes
from verify_service.executor.captured.step import DecodeStep, StepKind
from verify_service.executor.records import PageUpdate, record

PAGE_UPDATES = 8192  # maximum number of page table entries in one upload


class StepBuffers:
    """Moves the data of one step after another between the host and the memory of a `DecodeStep`.

    Args:
        step: The computation, which owns the memory on the device.
        shapes: Shapes that its steps are padded to.
        on_pages: Called with page updates before they are made; None for nobody.

    Attributes:
        turn: Index of the newest step's buffers, 0 .. UNDER_WAY - 1.
        page_size: Number of tokens of a page.
    """

    def __init__(
        self,
        step: DecodeStep,
        shapes: PaddedShapes,
        on_pages: Callable[[Sequence[PageUpdate]], None] | None = None,
    ) -> None:
        self._step, self._shapes, self._on_pages = step, shapes, on_pages
        self.turn, self.page_size = 0, step.page_size
        self._blocks = pinned(UNDER_WAY, *step.inputs.shape)
        kind = record(step.max_rows)
        self._records = [block.numpy().view(kind)[:, 0] for block in self._blocks]
        self._padding = np.zeros((), kind)
        self._padding["slot"], self._padding["tree"] = step.num_slots, -1
        self._padding["parents"] = NO_PARENT
        self._updates = pinned(UNDER_WAY, 3 * PAGE_UPDATES, dtype=torch.int64)
        self._sent_updates = torch.zeros(
            3 * PAGE_UPDATES, dtype=torch.int64, device=step.inputs.device
        )
        self._results = pinned(UNDER_WAY, *step.results.shape)
        self._done = [torch.cuda.Event() for _ in range(UNDER_WAY)]

    def next_records(self, num_sequences: int) -> npt.NDArray[np.void]:
        """Takes the next buffers, and returns their records to fill in [num_sequences], with
        `tokens` and `parents`. Padding is filled in already.

        They are views of pinned memory. A tree's rows are the root, then its nodes; see
        `kernels.trees` for their parents.
        """
        self.next_turn()
        batch = self._shapes.batch_size(num_sequences)
        host = self._records[self.turn]
        if num_sequences < batch:
            host[num_sequences:batch] = self._padding
        return host[:num_sequences]

    def next_turn(self) -> None:
        """Takes the next buffers, for callers that fill in no records of sequences."""
        self.turn = (self.turn + 1) % UNDER_WAY

    def block_sizes(self, num_sequences: int, num_rows: int) -> BlockSizes:
        """Returns the sizes of blocks that read shared keys together in a step."""
        return self._step.block_sizes(self._shapes.batch_size(num_sequences), num_rows)

    def fill_padding(self, num_sequences: int) -> None:
        """Takes the next buffers, for a step of sequences that do not exist."""
        self.next_turn()
        self._records[self.turn][:num_sequences] = self._padding

    def all_records(self, num_sequences: int) -> npt.NDArray[np.int32]:
        """Returns all records that `next_records` gave last, padding included, [batch, words]."""
        return self._blocks[self.turn][: self._shapes.batch_size(num_sequences)].numpy()

    def await_free_buffers(self) -> None:
        """Waits until the memory that `next_records` returns may be overwritten; for callers that
        wait for no outcome.
        """
        self._done[(self.turn + 1) % UNDER_WAY].synchronize()

    def set_pages(
        self, updates: Sequence[PageUpdate], settle: Callable[[], None] = no_wait
    ) -> None:
        """Writes parts of page tables.

        Call it after `next_records`, or `next_turn` where no records are sent; it holds for that
        step and later ones.

        Args:
            settle: See `Step`; called if there are so many that the host waits for the device.
        """
        if not updates:
            return
        if self._on_pages is not None:
            self._on_pages(updates)
        slots, entries, pages = (
            list(itertools.chain.from_iterable(values))
            for values in zip(
                *(([slot] * len(own), range(a, a + len(own)), own) for slot, a, own in updates),
                strict=True,
            )
        )
        for start in range(0, len(slots), PAGE_UPDATES):
            if start:
                settle()
                torch.cuda.current_stream().synchronize()  # the pinned block is still being read
            end = min(start + PAGE_UPDATES, len(slots))
            # Whole, as the host would wait for a device to take single rows of it.
            block = self._updates[self.turn][: 3 * (end - start)]
            block.numpy().reshape(3, -1)[:] = slots[start:end], entries[start:end], pages[start:end]
            sent = self._sent_updates[: len(block)]
            sent.copy_(block, non_blocking=True)
            slot, entry, page = sent.view(3, -1)
            self._step.tables.index_put_((slot, entry), page.to(torch.int32))

    def upload(self, num_sequences: int) -> None:
        """Sends the filled-in records to the device.

        Call it before the step starts, and before anything that the step waits for.
        """
        batch = self._shapes.batch_size(num_sequences)
        self._step.inputs[:batch].copy_(self._blocks[self.turn][:batch], non_blocking=True)

    def download(self, kind: StepKind, num_sequences: int, output: ModelOutput) -> RunningStep:
        """Starts to copy the newest step's outcome to the host, behind the step itself."""
        results, done = self._results[self.turn], self._done[self.turn]
        results[: kind.batch].copy_(self._step.results[: kind.batch], non_blocking=True)
        logprobs = None
        if kind.with_logprobs:
            logprobs = self._step.two_phase.send_logprobs(self.turn, kind.batch * kind.rows)
        done.record()
        return RunningStep(output, results[:num_sequences], done, kind.rows, logprobs)
