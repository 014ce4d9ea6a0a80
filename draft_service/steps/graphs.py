"""A draft model's step as CUDA graphs: committed tokens in, KV extended, beams drafted level by
level, trees out.

Everything has a fixed shape: B sequences, R committed tokens each at most, S levels of K beams,
padded, with graphs for a few sizes of B. Lengths, pages, tokens and trees stay on the device, so a
step needs one upload, two launches and one download; none where tokens and trees are handed on
there. The same code runs operation by operation where nothing is captured, on any device.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from draft_service.steps import hand_on, plan, uploads
from draft_service.steps.batches import DraftBatches
from draft_service.steps.hand_on import HandedOn
from draft_service.steps.plan import DraftPlan, Known
from draft_service.steps.records import DraftShape
from draft_service.steps.static_beams import StaticBeams
from draft_service.steps.uploads import Uploads
from foredraft.attention.base import Batch
from foredraft.kernel_launch import overlapped
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.aside import capture_graph, run_aside
from foredraft.runner.compile_ahead import compile_ahead
from foredraft.trees.tree_building import Ordering

logger = logging.getLogger(__name__)

# Forward of a draft. Inputs: the batch, features, and the index of the features that each row
# continues (None: one after another). Outputs: logits of the batch's requested rows, their
# features.
Forward = Callable[
    [Batch, torch.Tensor | None, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor | None]
]


class Beams(Protocol):
    """Grows beam trees level by level; see `StaticBeams` for the methods."""

    def grow(
        self, logits: torch.Tensor, token_map: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def grow_all(self, logits: torch.Tensor, token_map: torch.Tensor | None) -> None: ...

    def seen(self) -> torch.Tensor: ...

    def write(self, results: torch.Tensor) -> None: ...


class DraftGraphs:
    """Captures and replays draft steps of one model over one cache.

    A sequence's drafted tokens write their KV behind its committed keys: into the rest of their
    last page, which belongs to the sequence, and then into scratch pages of its slot. Padding has a
    slot of its own.

    Args:
        forward: The model; its attention takes a batch's own plan.
        kv: Its cache, with `shape.scratch_pages` scratch pages for every slot, and for one more
            slot.
        ordering: Order of children.
        token_map: int64, target ids of the logits' columns; None where columns equal ids.
        features: Returns features [n, feature_size] for row indexes, int64 [n], in the source of
            hidden states; None for a model that reads none.
        max_batch: Maximum batch size.
        handed_on: Device memory of steps whose tokens do not come from the host; None without such
            steps.
        grown: (levels, beams of a level) of the trees; None for the numbers that the shape plans KV
            for.

    Attributes:
        num_levels, topk: Numbers of levels, and of beams of a level.
        has_blocks: Whether the levels of a plan are rows of one block.
    """

    has_blocks = False

    def __init__(
        self,
        forward: Forward,
        kv: PagedKV,
        shape: DraftShape,
        *,
        ordering: Ordering,
        token_map: torch.Tensor | None,
        features: Callable[[torch.Tensor], torch.Tensor] | None,
        max_batch: int,
        handed_on: HandedOn | None = None,
        grown: tuple[int, int] | None = None,
    ) -> None:
        self.shape = shape
        self.num_levels, self.topk = grown or (shape.num_steps, shape.topk)
        self.max_batch = max_batch
        self.batch_sizes = batch_sizes(max_batch)
        self._forward, self._kv, self._features = forward, kv, features
        self._ordering, self._token_map = ordering, token_map
        device = self._device = kv.data.device
        self._on_gpu = device.type == "cuda"
        first_page = kv.num_pages + shape.max_slots * shape.scratch_pages(kv.page_size)
        handed_on = handed_on or HandedOn.nowhere(shape, device)
        # Blocks for a step and the previous one, each in as many parts as needed.
        num_blocks = 2 * -(-shape.max_slots // max_batch)
        self._uploads = Uploads(shape, max_batch, handed_on.spare_row, num_blocks, device)
        num_keys = torch.zeros(shape.max_slots + 1, dtype=torch.int32, device=device)
        dump_slot = first_page * kv.page_size
        self._known = Known(self._uploads.tables, num_keys, handed_on, dump_slot)
        self._batches: dict[int, DraftBatches] = {}  # by batch size
        self._root_logits = torch.zeros(max_batch, shape.vocab, device=device)
        self._root_features: torch.Tensor | None = None
        if shape.feature_size:
            self._root_features = torch.zeros(
                max_batch, shape.feature_size, dtype=kv.data.dtype, device=device
            )
        self._results = torch.zeros(max_batch, 2, shape.num_nodes, dtype=torch.int32, device=device)
        self._host_results = torch.zeros(
            max_batch, 2, shape.num_nodes, dtype=torch.int32, pin_memory=self._on_gpu
        )
        self._pool: Any = None
        self._graphs: dict[tuple[object, ...], torch.cuda.CUDAGraph] = {}
        self._captures = False
        self._has_kernels = False
        self._fill = plan.fill
        self._begin_block = plan.begin_block
        self._apply_updates = uploads.apply_updates
        self._hand_on_trees = hand_on.hand_on_trees
        if self._on_gpu:
            from draft_service.steps import device_beams  # needs triton

            self._has_kernels = device_beams.works(
                self.num_levels, self.topk, shape.vocab, device, overlapped(device)
            )
        if self._has_kernels:
            from draft_service.steps import kernels

            self._fill = kernels.fill
            self._begin_block = kernels.begin_block
            self._apply_updates = kernels.apply_updates
            self._hand_on_trees = kernels.hand_on_trees

    def set_pages(self, slot: int, first_entry: int, pages: list[int]) -> None:
        """Writes a part of a slot's page table, for the steps after this."""
        self._uploads.set_pages(slot, first_entry, pages)

    @property
    def is_free(self) -> bool:
        """Returns whether another step can be filled in: the one before the last is complete."""
        return self._uploads.is_free

    def records(self, num_sequences: int) -> npt.NDArray[np.void]:
        """Returns the records to fill in for a step, once `is_free`; padding is filled in
        already.
        """
        return self._uploads.records(num_sequences, self._batch_size(num_sequences))

    def upload(self, num_sequences: int) -> None:
        """Sends records and page updates to the device."""
        self._uploads.send(self._batch_size(num_sequences))

    def extend(self, num_sequences: int) -> None:
        """Computes the KV of the uploaded records' tokens, and the logits that follow each
        sequence's last.
        """
        batch = self._batch_size(num_sequences)
        self._run(("extend", batch), lambda: self._extend(batch))

    def take_roots(
        self, num_sequences: int, logits: torch.Tensor | None, features: torch.Tensor | None
    ) -> None:
        """Takes logits [n, V] and features [n, H] of the sequences' last tokens, instead of
        `extend`. Either may be None.
        """
        self._prepare(self._batch_size(num_sequences))
        if logits is not None:
            self._root_logits[: len(logits)].copy_(logits)
        if self._root_features is not None and features is not None:
            self._root_features[: len(features)].copy_(features)

    def draft(self, num_sequences: int, any_sampled: bool, any_ranked: bool) -> None:
        """Drafts the trees that continue the roots.

        Args:
            any_sampled: Whether a sequence has a temperature above 0.
            any_ranked: Whether such a one has a top-k or top-p.
        """
        batch = self._batch_size(num_sequences)
        mode = self._mode(any_sampled, any_ranked)
        self._run(("draft", batch, *mode), lambda: self._draft(batch, *mode))

    def is_ready(self, num_sequences: int, any_sampled: bool, any_ranked: bool) -> bool:
        """Returns whether such a draft runs without waiting for the device; the first one
        waits, since it is captured.
        """
        mode = self._mode(any_sampled, any_ranked)
        key = ("draft", self._batch_size(num_sequences), *mode)
        return not self._captures or key in self._graphs

    def make_ready(self, num_sequences: int, any_sampled: bool, any_ranked: bool) -> None:
        """Captures the graph of such a draft, once `is_free`."""
        mode = self._mode(any_sampled, any_ranked)
        self._run_padding(self._batch_size(num_sequences), [mode])

    def download(self, num_sequences: int) -> None:
        """Copies the trees to the host."""
        trees = self._results[:num_sequences]
        self._host_results[:num_sequences].copy_(trees, non_blocking=True)

    def finish(self) -> None:
        """Marks the end of the step, after its last call."""
        self._uploads.finish()

    @property
    def is_done(self) -> bool:
        """Whether everything up to `finish` is complete."""
        return self._uploads.is_done

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
        started, free = time.monotonic(), torch.cuda.mem_get_info(self._device)[0]
        self._captures = True
        self._pool = torch.cuda.graph_pool_handle()
        modes = sorted({self._mode(False, False), self._mode(sampled, False)})
        sizes = self.batch_sizes[::-1]
        runs = [partial(self._draft, batch, *mode) for batch in sizes for mode in modes]
        runs = [*(partial(self._extend, batch) for batch in sizes), *runs]
        num_compiled = compile_ahead(runs, self._device)
        self._batches.clear()  # nothing has filled in what these trials made
        for batch in sizes:
            self._run_padding(batch, modes)
        torch.cuda.synchronize(self._device)
        logger.info(
            "compiled %d kernels, and captured CUDA graphs for batches of %s, in %.1f s, %.0f MiB",
            num_compiled,
            ", ".join(map(str, self.batch_sizes)),
            time.monotonic() - started,
            (free - torch.cuda.mem_get_info(self._device)[0]) / 2**20,
        )

    def close(self) -> None:
        """Drops the graphs, which hold memory and addresses, once none runs."""
        if self._captures:
            torch.cuda.synchronize(self._device)
        self._graphs.clear()

    def _batch_size(self, num_sequences: int) -> int:
        return next(size for size in self.batch_sizes if size >= num_sequences)

    def _mode(self, any_sampled: bool, any_ranked: bool) -> tuple[bool, bool]:
        sampled = any_sampled and self._ordering == "coupled"
        return sampled, sampled and any_ranked

    def _run_padding(self, batch: int, modes: Sequence[tuple[bool, bool]]) -> None:
        """Runs a step of padding records."""
        self._uploads.records(0, batch)
        self._uploads.send(batch)
        self.extend(batch)
        for mode in modes:
            self.draft(batch, *mode)
        self.finish()

    def _run(self, key: tuple[object, ...], run: Callable[[], None]) -> None:
        if not self._captures:
            run()
            return
        graph = self._graphs.get(key)
        if graph is None:
            # A real run compiles missing kernels, and is this step's result.
            run_aside(run, self._device)
            self._graphs[key], _ = capture_graph(run, self._pool)
            return
        graph.replay()

    def _prepare(self, batch: int) -> DraftBatches:
        """Does the first work of a step on the device: updates page tables and fills in the
        plan.
        """
        batches = self._batches_of(batch)
        self._apply_updates(self._uploads.updates, self._uploads.tables)
        records = self._uploads.on_device(batch)
        self._fill(batches.plan, self.shape, self._kv, records, self._known)
        return batches

    def _batches_of(self, batch: int) -> DraftBatches:
        # Made when a size first runs, which is before it is captured: graphs hold addresses.
        if batch not in self._batches:
            plan = DraftPlan.empty(self.shape, self._kv, batch)
            self._batches[batch] = DraftBatches(plan, self.shape, self._kv, self.has_blocks)
        return self._batches[batch]

    def _extend(self, batch: int) -> None:
        batches = self._prepare(batch)
        features = self._features(batches.plan.hidden_rows) if self._features is not None else None
        logits, following = self._forward(batches.committed(), features, None)
        self._root_logits[:batch].copy_(logits)
        if self._root_features is not None and following is not None:
            self._root_features[:batch].copy_(following)

    def _draft(self, batch: int, any_sampled: bool, any_ranked: bool) -> None:
        shape, batches = self.shape, self._batches_of(batch)
        beams = self._beams(batch, batches, any_sampled, any_ranked)
        logits = self._root_logits[:batch]
        features = self._root_features
        if features is not None:
            features = features[:batch]
        for level in range(shape.num_steps):
            tokens, sources = beams.grow(logits, self._token_map)
            if level + 1 == shape.num_steps:
                break
            mask = beams.seen() if shape.topk > 1 else None
            logits, features = self._forward(batches.level(level, tokens, mask), features, sources)
        self._write(batch, beams)

    def _write(self, batch: int, beams: Beams) -> None:
        """Writes the finished trees for the host, and for a verifier on the same device."""
        results = self._results[:batch]
        beams.write(results)
        records = self._uploads.on_device(batch)
        self._hand_on_trees(records, results, self._known.handed_on.trees)

    def _beams(
        self, batch: int, batches: DraftBatches, any_sampled: bool, any_ranked: bool
    ) -> Beams:
        shape = self.shape
        rows = None
        if self._ordering == "coupled":
            rows = batches.sampling(any_sampled, any_ranked)
        if self._has_kernels and not any_ranked:
            from draft_service.steps.device_beams import DeviceBeams

            return DeviceBeams(
                batch,
                self.num_levels,
                self.topk,
                shape.vocab,
                self._ordering,
                self._device,
                rows if any_sampled else None,
                overlapped(self._device),
            )
        return StaticBeams(
            batch, self.num_levels, self.topk, shape.num_nodes + 1, self._ordering, rows
        )


def batch_sizes(max_batch: int) -> list[int]:
    """Returns the sizes that batches are padded to."""
    sizes = [1, 2, 4, 8, *range(16, 65, 16), *range(96, 513, 32)]
    return [*(size for size in sizes if size < max_batch), max_batch]
