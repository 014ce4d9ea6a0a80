"""The target's forward of a step with prompts as a CUDA graph: rows of any sequences side by side,
padded to a fixed total.

Operation by operation the host needs 6 ms to start a forward of 16 layers and 17 ms for one of 32,
whatever the rows, and twice that where it is busy.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from foredraft.attention.base import AttentionBackend, Batch
from foredraft.attention.triton_plan import TritonPlan
from foredraft.kernel_launch import few_variants
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.decoder import DecoderModel, ModelOutput
from foredraft.runner.aside import capture_graph, run_aside
from foredraft.runner.batch import StepRows, ancestor_mask
from foredraft.trees.draft_tree import depths
from verify_service.executor.base import no_wait
from verify_service.executor.captured.graph_store import GraphStore, Shortage
from verify_service.executor.captured.listener import StepListener

# Close enough together that padding costs little where the device, not the host, is what takes
# time.
_ROW_SIZES = (*range(32, 257, 32), *range(320, 513, 64), *range(640, 1025, 128))
_MORE_ROW_SIZES = tuple(range(1280, 2049, 256))
# Multiplications of a rank in a layer up to which the device may take less time than the host does
# to launch the layer: 1,024 rows of an 8B model, 2,048 of one that two ranks share.
_CAPTURED_PRODUCTS = 23 * 10**10
# Without a graph, cutting a sequence's keys into parts pays only beyond this number of keys.
SHORT_KEYS = 2048
# More than 1,024 rows that see more keys have faster attention outside of graphs.
_LONG_KEYS = 8192
_NUMBERS = 5  # of each sequence, see `_Parts`
NO_BLOCK = 1 << 20

Part = TypeVar("Part")


class _Parts(NamedTuple, Generic[Part]):
    """The parts of an upload, which lie one after the other; or their lengths.

    Attributes:
        tokens, keys, positions: Token of each row, index of its key, and its position.
        owners: Sequence of each row; -1 for padding.
        sequences: [_NUMBERS, sequences]: slot, first row, number of rows, number of committed keys,
            whether the rows are causal.
        blocks: [2, blocks], see `TritonPlan`; NO_BLOCK for padding.
        wanted: Rows with logits.
    """

    tokens: Part
    keys: Part
    positions: Part
    owners: Part
    sequences: Part
    blocks: Part
    wanted: Part


@dataclass(frozen=True, slots=True)
class MixedKind:
    """Identifies a captured graph.

    Attributes:
        size: Number of rows in all, padding included.
        layers: Layers whose input (the residual stream) the graph keeps for a draft.
        has_branches: Whether there is a tree with branches.
    """

    size: int
    layers: tuple[int, ...]
    has_branches: bool


class MixedGraphs:
    """Captures and replays forwards of one model over one cache.

    Args:
        kv: Cache with a scratch page, for padding rows.
        tables: int32 [num_slots + 1, pages] on the device: page tables by slot; the last row
            belongs to no sequence.
        max_tree: Maximum number of rows of a tree, the root included.
        max_rows: Maximum number of rows in all; at most the largest of `mixed_sizes` is used.
        pool: Memory that is shared with other graphs, which never run at the same time.
        shortage: Whether that memory has run out.
        listener: Hears of every forward; None for nobody.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv: PagedKV,
        attention: AttentionBackend,
        *,
        tables: torch.Tensor,
        max_tree: int,
        max_rows: int,
        pool: Any = None,
        shortage: Shortage | None = None,
        listener: StepListener | None = None,
    ) -> None:
        self._model, self._kv, self._attention = model, kv, attention
        self._tables, self._pool, self._listener = tables, pool, listener
        self._num_slots = tables.shape[0] - 1
        self._group_size = model.group_size
        self.sizes = mixed_sizes(model, max_rows)
        largest, device = self.sizes[-1], kv.data.device
        num_ints = max(sum(self._lengths(size)) for size in self.sizes)
        self._ints = torch.zeros(num_ints, dtype=torch.int32, device=device)
        self._masks = torch.zeros(largest, max_tree, dtype=torch.uint8, device=device)
        self._host_ints, self._host_masks = (
            torch.zeros(of.shape, dtype=of.dtype, pin_memory=device.type == "cuda")
            for of in (self._ints, self._masks)
        )
        self._hidden = torch.zeros(
            largest, model.config.hidden_size, dtype=model.dtype, device=device
        )
        self._streams: dict[tuple[int, ...], torch.Tensor] = {}
        self._uploaded = torch.cuda.Event()
        self._graphs: GraphStore[MixedKind, torch.cuda.CUDAGraph] = GraphStore(
            shortage or Shortage()
        )

    def takes(self, rows: Sequence[StepRows]) -> bool:
        """Returns whether there is a graph for these rows, and a graph is the faster way."""
        counts = [len(one.tokens) for one in rows]
        if sum(counts) > self.sizes[-1] or len(rows) > self._num_slots:
            return False
        if any(one.reach for one in rows):  # the graphs' rotary embeddings depend only on positions
            return False
        num_keys = max(one.start + count for one, count in zip(rows, counts, strict=True))
        if num_keys <= SHORT_KEYS:
            return True
        if sum(counts) > _ROW_SIZES[-1] and num_keys > _LONG_KEYS:
            return False
        return not self._attention.cuts_keys(
            len(rows), max(counts), num_keys, self._group_size, self._kv
        )

    def forward(
        self,
        rows: Sequence[StepRows],
        layers: Sequence[int],
        settle: Callable[[], None] = no_wait,
    ) -> ModelOutput:
        """Computes rows that `takes` has accepted, and writes their keys and values.

        Args:
            settle: See `Step`; called where there is no graph.

        Returns:
            Logits of the rows that ask for them, in memory of their own; hidden states and streams
            of all rows, valid until the next forward.
        """
        if self._listener is not None:
            self._listener.mixed(rows, layers)
        num_rows = sum(len(one.tokens) for one in rows)
        size = next(size for size in self.sizes if size >= num_rows)
        kind = MixedKind(size, tuple(layers), any(one.parents is not None for one in rows))
        if not self._graphs.has_graphs(kind):
            settle()
        wanted = self._upload(kind, rows)
        if kind not in self._graphs:
            self._graphs.add(kind, partial(self._capture, kind))
        graph = self._graphs[kind]
        if graph is None:
            self._make_room(kind)
            self.compute(kind)
        else:
            graph.replay()
        hidden = self._hidden[:num_rows]
        with few_variants(cut_keys=True):  # rows of any number
            logits = self._model.lm_head(hidden[wanted])
        if not layers:
            return ModelOutput(logits, hidden)
        streams = self._streams[kind.layers][:num_rows]
        captured = list(streams.split(self._model.config.hidden_size, 1))
        return ModelOutput(logits, hidden, captured, streams, kind.layers)

    def await_upload(self) -> None:
        """Waits until the device has read the last upload, so that host memory may be overwritten.

        The chunks of a prompt need no wait, so the host may be several forwards ahead.
        """
        self._uploaded.synchronize()

    def runs(self, layers: Sequence[int], has_branches: bool) -> list[Callable[[], object]]:
        """Returns what `warm_up` captures, as functions that `compile_ahead` takes."""
        kinds = self._kinds(layers, has_branches)
        for kind in kinds:
            self._make_room(kind)
        return [partial(self._try, kind) for kind in kinds]

    def warm_up(self, layers: Sequence[int], has_branches: bool) -> None:
        """Captures all sizes, the largest first, so that the others fit its memory.

        Args:
            has_branches: Whether there will be trees that are no chains; else these are captured
                when they come.
        """
        if self._listener is not None:
            self._listener.mixed_warm_up(layers, has_branches)
        for kind in self._kinds(layers, has_branches):
            self._upload(kind, ())
            self._graphs.add(kind, partial(self._capture, kind))

    def _kinds(self, layers: Sequence[int], has_branches: bool) -> list[MixedKind]:
        return [
            MixedKind(size, tuple(layers), with_branches)
            for size in reversed(self.sizes)
            for with_branches in {False, has_branches}
        ]

    def close(self) -> None:
        """Frees the graphs, as DecodeGraphs does."""
        self._graphs.clear()

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs."""
        return sum(graph is not None for graph in self._graphs.values())

    def _lengths(self, size: int) -> _Parts[int]:
        """Returns the lengths of the parts of an upload."""
        num_sequences = min(size, self._num_slots)
        num_blocks = -(-size * self._group_size // self._block(size)) + num_sequences
        return _Parts(size, size, size, size, _NUMBERS * num_sequences, 2 * num_blocks, size)

    @staticmethod
    def _cut(ints: torch.Tensor, lengths: _Parts[int]) -> _Parts[torch.Tensor]:
        """Returns the parts of an upload in `ints`, which begin there."""
        return _Parts(*ints[: sum(lengths)].split(lengths))

    def _block(self, size: int) -> int:
        return self._attention.block_rows(size, self._group_size, self._model.dtype, self._kv)

    def _upload(self, kind: MixedKind, rows: Sequence[StepRows]) -> torch.Tensor:
        """Sends the rows to the device; returns the rows with logits there."""
        self.await_upload()
        lengths = self._lengths(kind.size)
        total = sum(lengths)
        parts = _Parts(*(part.numpy() for part in self._cut(self._host_ints, lengths)))
        counts = np.array([len(one.tokens) for one in rows], dtype=np.int64)
        first_rows = np.cumsum(counts) - counts
        starts = np.array([one.start for one in rows], dtype=np.int64)
        num_rows = int(counts.sum())
        for part in (parts.tokens, parts.keys, parts.positions):
            part[num_rows:] = 0
        parts.owners[num_rows:] = -1
        parts.tokens[:num_rows] = list(itertools.chain.from_iterable(one.tokens for one in rows))
        parts.owners[:num_rows] = np.repeat(np.arange(len(rows)), counts)
        keys = np.arange(num_rows) + np.repeat(starts - first_rows, counts)
        parts.keys[:num_rows] = parts.positions[:num_rows] = keys
        if kind.has_branches:
            self._fill_trees(parts.positions, rows, first_rows)
        table = parts.sequences.reshape(_NUMBERS, -1)
        table[:] = 0
        table[0] = self._num_slots
        table[:, : len(rows)] = (
            [one.slot for one in rows],
            first_rows,
            counts,
            starts,
            [one.parents is None for one in rows],
        )
        self._fill_blocks(parts.blocks.reshape(2, -1), counts, self._block(kind.size))
        asked = np.array([_first_wanted(one) for one in rows], dtype=np.int64)
        index = np.flatnonzero(np.arange(num_rows) >= np.repeat(first_rows + asked, counts))
        parts.wanted[: len(index)] = index
        self._ints[:total].copy_(self._host_ints[:total], non_blocking=True)
        if kind.has_branches:
            self._masks[: kind.size].copy_(self._host_masks[: kind.size], non_blocking=True)
        self._uploaded.record()
        return self._cut(self._ints, lengths).wanted[: len(index)].long()

    def _fill_blocks(self, blocks: np.ndarray, counts: np.ndarray, block_rows: int) -> None:
        """Lists the blocks of rows that one program each computes.

        The list runs backwards: programs begin with the last sequences, which are prompts, and with
        the last rows of each, which see most keys.

        Args:
            blocks: [2, blocks], filled: sequence, and number among its blocks.
            counts: Number of rows of each sequence.
            block_rows: See `AttentionBackend.block_rows`.
        """
        blocks[0], blocks[1] = 0, NO_BLOCK
        numbers = -(-counts * self._group_size // block_rows)
        sequence = np.repeat(np.arange(len(counts)), numbers)
        block = np.arange(len(sequence)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
        blocks[:, : len(sequence)] = sequence[::-1], block[::-1]

    def _fill_trees(
        self, positions: np.ndarray, rows: Sequence[StepRows], first_rows: np.ndarray
    ) -> None:
        masks = self._host_masks.numpy()
        masks[: len(positions)] = 0
        for one, first in zip(rows, first_rows.tolist(), strict=True):
            if one.parents is None:
                continue
            count = len(one.tokens)
            masks[first : first + count, :count] = ancestor_mask(one.parents).numpy()
            positions[first + 1 : first + count] = one.start + np.array(depths(one.parents))

    def _capture(self, kind: MixedKind) -> torch.cuda.CUDAGraph:
        """Runs once, which compiles missing kernels, and then captures."""
        self._make_room(kind)
        run_aside(lambda: self._try(kind), self._hidden.device)
        return capture_graph(lambda: self.compute(kind), self._pool)[0]

    def _try(self, kind: MixedKind) -> None:
        with self._model.without_repeats():
            self.compute(kind)

    def _make_room(self, kind: MixedKind) -> None:
        """Allocates memory for the captured streams, outside the memory of the graphs."""
        if kind.layers not in self._streams:
            width = len(kind.layers) * self._model.config.hidden_size
            self._streams[kind.layers] = self._hidden.new_zeros(self._hidden.shape[0], width)

    def compute(self, kind: MixedKind) -> None:
        """Computes the captured forward, from uploaded rows to hidden states and streams in memory
        that stays.
        """
        size, kv = kind.size, self._kv
        parts = self._cut(self._ints, self._lengths(size))
        tokens, keys, positions, owners = (part.long() for part in parts[:4])
        slot, first_row, num_rows, start, is_causal = parts.sequences.view(_NUMBERS, -1)
        tables = self._tables[slot.long()]
        page = tables[owners.clamp_min(0), keys // kv.page_size].long()
        slots = page * kv.page_size + keys % kv.page_size
        slots = torch.where(owners < 0, kv.num_pages * kv.page_size, slots)
        mask = tail_positions = None
        if kind.has_branches:
            mask = self._masks[:size]
            columns = torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device)
            rows = (first_row[:, None] + columns).clamp_max(size - 1)
            tail_positions = positions[rows.long()].to(torch.int32)
        plan = TritonPlan(
            kv=kv,
            page_tables=tables,
            first_row=first_row,
            num_rows=num_rows,
            prefix_start=torch.zeros_like(start),
            prefix_len=start,
            write_index=start,
            positions=positions,
            tail_mask=mask,
            is_causal=is_causal.to(torch.int8) if kind.has_branches else None,
            tail_positions=tail_positions,
            max_rows=size,
            num_splits=1,
            blocks=parts.blocks.view(2, -1),
        )
        batch = Batch(tokens, positions, slots, (), plan=plan)
        hidden, _, streams = self._model.states(batch, kv, self._attention, kind.layers)
        self._hidden[:size].copy_(hidden)
        if streams is not None:
            self._streams[kind.layers][:size].copy_(streams)


def mixed_sizes(model: DecoderModel, max_rows: int) -> list[int]:
    """Returns the numbers of rows of a model's captured forwards, in ascending order.

    Args:
        max_rows: Maximum number of rows of a step with prompts; the last size may be larger.
    """
    most = _CAPTURED_PRODUCTS // model.layer_products
    sizes = (*_ROW_SIZES, *(size for size in _MORE_ROW_SIZES if size <= most))
    return [size for before, size in itertools.pairwise((0, *sizes)) if before < max_rows]


def _first_wanted(rows: StepRows) -> int:
    count = len(rows.tokens)
    return {"all": 0, "last": count - 1, "none": count}[rows.logits]
