"""The computation of a decode step of fixed shape: forward over padded trees, sampling, walk,
commit.

Lengths, pages and trees are read from device memory and the host reads nothing, so the whole step
can be captured.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from foredraft.attention.base import AttentionBackend, Batch
from foredraft.attention.split_kv import Balance
from foredraft.attention.triton_plan import TritonPlan, splits_for
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.decoder import DecoderModel, ModelOutput
from foredraft.parallel.group import SINGLE, Group
from foredraft.sampling.triton_sampling import choose_tokens
from verify_service.executor.captured.shared_keys import BlockSizes, shared_keys
from verify_service.executor.captured.two_phase_tables import TwoPhaseTables
from verify_service.executor.kernels.steps import (
    Begun,
    Ended,
    begin_step,
    end_step,
    pretend_paths,
    sampling_rows,
)
from verify_service.executor.kernels.trees import commit_paths, prepare_trees, walk_trees
from verify_service.executor.records import STEP

FILTERED_AT_ONCE = 128  # number of rows that are filtered or adjusted at a time


@dataclass(frozen=True, slots=True)
class StepKind:
    """Identifies the captured graphs of a step.

    Attributes:
        batch, rows: Number of sequences, and of rows of each, padding included.
        layers: Layers whose input (the residual stream) the graph keeps for a draft.
        is_filtered: Whether the step applies top-k, top-p and min-p of the records. A two-phase
            step is filtered too, so that few rows at a time are adjusted.
        is_two_phase: Whether the step applies everything else that records can ask for; forward and
            choice are two graphs then.
        with_logprobs: Whether the step computes log-probabilities; for two-phase steps only.
        shares_keys: Whether the step reads shared keys only once; not for two-phase steps.
    """

    batch: int
    rows: int
    layers: tuple[int, ...]
    is_filtered: bool = False
    is_two_phase: bool = False
    with_logprobs: bool = False
    shares_keys: bool = False


@dataclass(slots=True)
class Forward:
    """Holds inputs and outputs of the forward of one shape, in memory that its graph keeps."""

    output: ModelOutput
    begun: Begun
    positions: torch.Tensor
    tables: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of captured steps.

    Attributes:
        max_batch: Maximum number of sequences.
        max_rows: Maximum number of rows of a sequence, the root included.
        max_path: Maximum number of tokens of one step that a draft is sent.
        max_tokens: Maximum number of tokens of a sequence.
        num_slots: Maximum number of running sequences; each has a page table on the device.
        simulate: Whether the column `forced` takes effect.
        has_branches: Whether drafts may propose more than chains. Else a node that does not follow
            the one before it is absent, and attention needs no masks.
    """

    max_batch: int
    max_rows: int
    max_path: int
    max_tokens: int
    num_slots: int
    simulate: bool = False
    has_branches: bool = True


class DecodeStep:
    """Computes steps of one model over one cache, and owns the memory that they read and write.

    Where ranks share the model, rank 0 decides what is verified and which tokens are chosen; the
    others follow.

    Args:
        group: The ranks that share the model.

    Attributes:
        max_batch, max_rows, num_slots: See `StepSizes`; slot `num_slots` belongs to no sequence.
        page_size: Number of tokens of a page.
        inputs: int32 [max_batch, STEP.size + 2 * max_rows]: records.
        tables: int32 [num_slots + 1, pages]: page tables; the last row belongs to no sequence.
        state: int32 [num_slots + 1, 2]: committed keys and newest token of each slot.
        results: int32 [max_batch, 1 + 4 * max_rows], see `steps.Ended`; so are `accepted` and
            `accepted_index`.
        trees: int32 [max_batch, 2, max_rows - 1]: proposals of a draft on the device.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv: PagedKV,
        attention: AttentionBackend,
        sizes: StepSizes,
        group: Group = SINGLE,
    ) -> None:
        if not kv.num_scratch_pages:
            raise ValueError("padding rows need a scratch page")
        max_batch, max_rows, num_slots = sizes.max_batch, sizes.max_rows, sizes.num_slots
        max_tokens, max_path = sizes.max_tokens, sizes.max_path
        self.max_batch, self.max_rows, self.num_slots = max_batch, max_rows, num_slots
        self._max_path, self.page_size = max_path, kv.page_size
        self._model, self._kv, self._attention = model, kv, attention
        self._max_tokens = max_tokens
        self._simulate, self._has_branches = sizes.simulate, sizes.has_branches
        self._group = group
        device = self._device = kv.data.device

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self.inputs = ints(max_batch, STEP.size + 2 * max_rows)
        # A step may begin before the one before it is over, which has a tree of its own.
        max_pages = -(-(max_tokens + 2 * max_rows) // kv.page_size)
        self.tables = ints(num_slots + 1, max_pages)
        self.state = ints(num_slots + 1, 2)
        self.results = ints(max_batch, 1 + 4 * max_rows)
        self.trees = ints(max_batch, 2, max(1, max_rows - 1))
        self.accepted = ints(max_batch, 1 + max_path)
        self.accepted_index = torch.zeros(max_batch * max_path, dtype=torch.int64, device=device)
        self.two_phase = TwoPhaseTables(
            max_batch=max_batch,
            max_step_rows=max_batch * max_rows,
            max_nodes=self.trees.shape[2],
            num_slots=num_slots + 1,
            vocab_size=model.config.vocab_size,
            device=device,
        )

    def without_repeats(self) -> AbstractContextManager[None]:
        """See DecoderModel."""
        return self._model.without_repeats()

    def block_sizes(self, batch: int, rows: int) -> BlockSizes:
        """Returns the sizes of blocks that read shared keys together, in steps of one shape."""
        model = self._model
        return BlockSizes.of(
            self._attention, self._kv, model.group_size, model.dtype, (batch, rows)
        )

    def forward(self, kind: StepKind) -> Forward:
        """Computes the first half of a step, up to the logits."""
        inputs = self.inputs[: kind.batch]
        begun = begin_step(
            inputs,
            self.max_rows,
            kind.rows,
            self.state,
            self.trees,
            self.tables,
            self._has_branches,
        )
        if self._group.size > 1:
            self._begin_as_rank_0(begun)
        batch, tables = self._batch(kind, inputs, begun)
        output = self._model.forward(batch, self._kv, self._attention, kind.layers)
        return Forward(output, begun, batch.positions, tables)

    def _begin_as_rank_0(self, begun: Begun) -> None:
        """Copies trees and roots from rank 0, the only rank that has a draft's trees."""
        parts = (begun.tokens, begun.parents, begun.committed)
        flat = self._group.broadcast(torch.cat([part.flatten() for part in parts]))
        if self._group.rank:  # into memory of their own, which is aligned
            found = flat.split([part.numel() for part in parts])
            for part, one in zip(parts, found, strict=True):
                part.copy_(one.view_as(part))

    def _batch(
        self, kind: StepKind, inputs: torch.Tensor, begun: Begun
    ) -> tuple[Batch, torch.Tensor]:
        """Builds the model's batch from the uploaded records."""
        kv, device = self._kv, self._device
        slots, num_rows = inputs[:, STEP["slot"]], inputs[:, STEP["num_rows"]].contiguous()
        tables = self.tables[slots.long()]  # for few rows several times as fast as index_select
        rows = prepare_trees(
            begun.tokens,
            begun.parents,
            begun.committed,
            num_rows,
            tables,
            kv.page_size,
            self._model.config.vocab_size,
            kv.num_pages * kv.page_size,
        )
        plan = TritonPlan(
            kv=kv,
            page_tables=tables,
            first_row=torch.arange(
                0, kind.batch * kind.rows, kind.rows, dtype=torch.int32, device=device
            ),
            num_rows=num_rows,
            prefix_start=torch.zeros(kind.batch, dtype=torch.int32, device=device),
            prefix_len=begun.committed,
            write_index=begun.committed,
            positions=rows.positions,
            tail_mask=rows.mask if kind.rows > 1 and self._has_branches else None,
            tail_positions=rows.positions.view(kind.batch, kind.rows).to(torch.int32),
            max_rows=kind.rows,
            num_splits=splits_for(
                kind.batch,
                kind.rows,
                kv,
                self._max_tokens,
                self._model.group_size,
            ),
            # One sequence's parts are equal anyway.
            balance=Balance(self._model.dtype) if kind.batch > 1 else None,
        )
        if kind.shares_keys:
            num_blocks = self.block_sizes(kind.batch, kind.rows).count
            plan.shared = shared_keys(inputs, kind.rows, tables, num_blocks)
        batch = Batch(rows.tokens, rows.positions, rows.slots, (), plan=plan)
        return batch, tables

    def choose(self, kind: StepKind, forward: Forward) -> None:
        """Computes the second half of a step: everything that host, draft and next step read."""
        inputs, begun = self.inputs[: kind.batch], forward.begun
        if self._group.rank == 0:
            chosen = self._chosen(kind, forward)
        else:
            chosen = torch.empty_like(begun.tokens, dtype=torch.int64).flatten()
        if self._group.size > 1:
            chosen = self._group.broadcast(chosen)
        chosen = chosen.view(kind.batch, kind.rows)
        path, length, emitted = walk_trees(chosen, begun.tokens, begun.parents)
        if kind.is_two_phase:
            self.two_phase.count(inputs, length, emitted)
        if self._simulate:
            pretend_paths(inputs, path, length, emitted)
        if kind.rows > 1:
            commit_paths(self._kv, forward.tables, begun.committed, path, length)
        ended = Ended(
            self.results[: kind.batch],
            self.state,
            self.accepted[: kind.batch],
            self.accepted_index[: kind.batch * self._max_path],
        )
        end_step(inputs, begun, path, length, emitted, ended)

    def _chosen(self, kind: StepKind, forward: Forward) -> torch.Tensor:
        """Applies the sampling rule at every row; returns tokens int64 [rows]."""
        inputs, begun = self.inputs[: kind.batch], forward.begun
        asked = sampling_rows(inputs, forward.positions, kind.is_filtered)
        logits = forward.output.logits
        # Filters and adjusted logits take much memory for each row; the plain rule takes none.
        size = max(1, FILTERED_AT_ONCE // kind.rows) if kind.is_filtered else kind.batch
        parts = []
        for first in range(0, kind.batch, size):
            last = min(first + size, kind.batch)
            rows = slice(first * kind.rows, last * kind.rows)
            part = logits[rows]
            if kind.is_two_phase:
                trees = Begun(
                    *(of[first:last] for of in (begun.tokens, begun.parents, begun.committed))
                )
                part = self.two_phase.adjust(
                    part, inputs[first:last], trees, forward.positions[rows]
                )
            parts.append(choose_tokens(part, asked.take(rows)))
        chosen = torch.cat(parts) if len(parts) > 1 else parts[0]
        if kind.with_logprobs:
            self.two_phase.keep_logprobs(logits, chosen)
        return chosen
