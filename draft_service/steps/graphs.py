"""Runs a draft's steps as CUDA graphs, for a few sizes of batches.

A step needs one upload, two launches and one download; no download where tokens and trees are
handed on on the device.
"""

import logging
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from draft_service.steps.draft_step import DraftStep, SamplingMode
from draft_service.steps.graph_cache import GraphCache
from foredraft.runner.compile_ahead import compile_ahead

logger = logging.getLogger(__name__)


class DraftGraphs:
    """Pads, uploads, runs and downloads the steps of one attach.

    The order of calls is: `records`, once `is_free`; `upload`; `extend` or `take_roots`; `draft`,
    `download` and `look_ahead` as needed; `finish`. Trees may be read once `is_done`.

    Args:
        step: The step, on its device.

    Attributes:
        step: The argument of this name.
        shape: Sizes of the steps and their trees.
        max_batch: Maximum number of sequences of a step.
        batch_sizes: Sizes that batches are padded to.
    """

    def __init__(self, step: DraftStep) -> None:
        self.step, self.shape, self.max_batch = step, step.shape, step.max_batch
        self.batch_sizes = batch_sizes(step.max_batch)
        self._graphs = GraphCache(step.device)
        on_gpu = step.device.type == "cuda"
        self._host_results = torch.zeros(step.results.shape, dtype=torch.int32, pin_memory=on_gpu)

    def set_pages(self, slot: int, first_entry: int, pages: list[int]) -> None:
        """Writes a part of a slot's page table, for the steps after this."""
        self.step.uploads.set_pages(slot, first_entry, pages)

    @property
    def is_free(self) -> bool:
        """Whether another step can be filled in: the one before the last is complete."""
        return self.step.uploads.is_free

    def records(self, num_sequences: int) -> npt.NDArray[np.void]:
        """Returns the records to fill in for a step, once `is_free`; padding is filled in
        already.
        """
        return self.step.uploads.records(num_sequences, self._batch_size(num_sequences))

    def upload(self, num_sequences: int) -> None:
        """Sends records and page updates to the device."""
        self.step.uploads.send(self._batch_size(num_sequences))

    def extend(self, num_sequences: int) -> None:
        """Computes the KV of the uploaded records' tokens; see `DraftStep.extend`."""
        batch = self._batch_size(num_sequences)
        self._graphs.run(("extend", batch), partial(self.step.extend, batch))

    def take_roots(
        self, num_sequences: int, logits: torch.Tensor | None, features: torch.Tensor | None
    ) -> None:
        """Takes logits and features from outside, instead of `extend`; see
        `DraftStep.take_roots`.
        """
        self.step.take_roots(self._batch_size(num_sequences), logits, features)

    def draft(self, num_sequences: int, any_sampled: bool, any_ranked: bool) -> None:
        """Drafts the trees that continue the roots; see `SamplingMode` for the arguments."""
        batch, mode = self._batch_size(num_sequences), self.step.mode(any_sampled, any_ranked)
        self._graphs.run(("draft", batch, mode), partial(self.step.draft, batch, mode))

    def can_look_ahead(self, num_sequences: int) -> bool:
        """Returns whether a step of so many sequences can prepare for its outcomes."""
        outcomes = self.step.outcomes
        return outcomes is not None and self._batch_size(num_sequences) <= outcomes.max_batch

    def look_ahead(self, num_sequences: int, any_sampled: bool, any_ranked: bool) -> None:
        """Prepares for the outcomes of the newest trees; see `SamplingMode` for the arguments."""
        batch, mode = self._batch_size(num_sequences), self.step.mode(any_sampled, any_ranked)
        self._graphs.run(("ahead", batch, mode), partial(self.step.look_ahead, batch, mode))

    @property
    def outcome_report(self) -> list[int]:
        """See `Outcomes.report`; a step that is not complete may be missing."""
        assert self.step.outcomes is not None
        return self.step.outcomes.host_report.tolist()

    def is_ready(self, num_sequences: int, any_sampled: bool, any_ranked: bool) -> bool:
        """Returns whether such a draft runs without waiting for the device; the first one
        waits, since it is captured.
        """
        batch, mode = self._batch_size(num_sequences), self.step.mode(any_sampled, any_ranked)
        parts = ("draft", "ahead") if self.can_look_ahead(batch) else ("draft",)
        return all(self._graphs.is_ready((part, batch, mode)) for part in parts)

    def make_ready(self, num_sequences: int, any_sampled: bool, any_ranked: bool) -> None:
        """Captures the graph of such a draft, once `is_free`."""
        mode = self.step.mode(any_sampled, any_ranked)
        self._run_padding(self._batch_size(num_sequences), [mode])

    def download(self, num_sequences: int) -> None:
        """Copies the trees to the host."""
        trees = self.step.results[:num_sequences]
        self._host_results[:num_sequences].copy_(trees, non_blocking=True)

    def finish(self) -> None:
        """Marks the end of the step, after its last call."""
        self.step.uploads.finish()

    @property
    def is_done(self) -> bool:
        """Whether everything up to `finish` is complete."""
        return self.step.uploads.is_done

    def trees(self, num_sequences: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Returns tokens and parents [B, N] once a download is complete, see
        `StaticBeams.nodes`; valid until the next step.
        """
        results = self._host_results[:num_sequences].numpy()
        return results[:, 0], results[:, 1]

    def capture(self, sampled: bool) -> None:
        """Captures every batch size; later steps replay graphs.

        The largest comes first, so that the others fit its memory.

        Args:
            sampled: Whether coupled drafts at a temperature above 0 will come; other filters are
                captured when they do.
        """
        step, device = self.step, self.step.device
        started, free = time.monotonic(), torch.cuda.mem_get_info(device)[0]
        self._graphs.start()
        modes = sorted({step.mode(False, False), step.mode(sampled, False)})
        sizes = self.batch_sizes[::-1]
        extending = [partial(step.extend, batch) for batch in sizes]
        drafting = [partial(step.draft, batch, mode) for batch in sizes for mode in modes]
        drafting += [
            partial(step.look_ahead, batch, mode)
            for batch in sizes
            for mode in modes
            if self.can_look_ahead(batch)
        ]
        num_compiled = compile_ahead([*extending, *drafting], device)
        step.drop_batches()  # nothing has filled in what these trials made
        for batch in sizes:
            self._run_padding(batch, modes)
        torch.cuda.synchronize(device)
        logger.info(
            "compiled %d kernels, and captured CUDA graphs for batches of %s, in %.1f s, %.0f MiB",
            num_compiled,
            ", ".join(map(str, self.batch_sizes)),
            time.monotonic() - started,
            (free - torch.cuda.mem_get_info(device)[0]) / 2**20,
        )

    def close(self) -> None:
        """Drops the graphs, once none runs."""
        self._graphs.close()

    def _batch_size(self, num_sequences: int) -> int:
        return next(size for size in self.batch_sizes if size >= num_sequences)

    def _run_padding(self, batch: int, modes: Sequence[SamplingMode]) -> None:
        """Runs a step of padding records, which captures what has not run before."""
        self.step.uploads.records(0, batch)
        self.step.uploads.send(batch)
        self.extend(batch)
        for mode in modes:
            self.draft(batch, *mode)
            if self.can_look_ahead(batch):
                self.look_ahead(batch, *mode)
        self.finish()


def batch_sizes(max_batch: int) -> list[int]:
    """Returns the sizes that batches are padded to."""
    sizes = [1, 2, 4, 8, *range(16, 65, 16), *range(96, 513, 32)]
    return [*(size for size in sizes if size < max_batch), max_batch]
