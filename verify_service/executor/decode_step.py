"""What a decode step of fixed shape computes: the target over trees of padded size, the rule, the walk, accepted KV in place.

Lengths, pages and trees are read from device memory and nothing is read on the host, so that all of it can be captured.
"""

from dataclasses import dataclass

import torch

from foredraft.attention.base import AttentionBackend, Batch
from foredraft.attention.paged_triton import TritonPlan, splits_for
from foredraft.attention.split_kv import Balance
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.decoder import DecoderModel, ModelOutput
from foredraft.sampling.triton_sampling import choose_tokens
from verify_service.executor.triton_steps import (
    HEADER,
    NUM_ROWS,
    SLOT,
    Begun,
    Ended,
    begin_step,
    end_step,
    pretend_paths,
    sampling_rows,
)
from verify_service.executor.triton_trees import commit_paths, prepare_trees, walk_trees
from verify_service.executor.two_phase_tables import LateChoice

ROWS_AT_ONCE = 128  # that are filtered or adjusted together


@dataclass(frozen=True, slots=True)
class StepKind:
    """What tells captured steps apart.

    Attributes:
        batch, rows: Sequences and rows of each, padded.
        capture: Layers whose entering residual stream is wanted.
        is_filtered: Whether top-k, top-p and min-p of the records are obeyed.
        is_late: Whether all else that the records ask for is; then the choice is apart from the forward.
        with_logprobs: Whether log-probabilities are worked out; of late steps only.
    """

    batch: int
    rows: int
    capture: tuple[int, ...]
    is_filtered: bool = False
    is_late: bool = False
    with_logprobs: bool = False


@dataclass(slots=True)
class Forward:
    """What the forward of one shape reads and gives, in memory that its graph keeps."""

    output: ModelOutput
    begun: Begun
    positions: torch.Tensor
    tables: torch.Tensor


class DecodeStep:
    """One model over one cache, and the memory that its steps read and write.

    Args:
        max_batch: Sequences at most.
        max_rows: Rows of a sequence at most, the root included.
        max_path: Tokens of one step that a draft is told of at most.
        max_tokens: Of a sequence.
        num_slots: Sequences that may be known at a time; each has a page table of its own on the device.
        simulate: Whether the column `FORCED` is obeyed.

    Attributes:
        max_batch, max_rows, num_slots: See above; slot `num_slots` belongs to no sequence.
        inputs: int32 [max_batch, HEADER + 2 * max_rows]: records.
        tables: int32 [num_slots + 1, pages]: page tables; the last row belongs to no sequence.
        state: int32 [num_slots + 1, 2]: committed keys and newest token of each slot.
        results: int32 [max_batch, 1 + 4 * max_rows], see `triton_steps.Ended`; so are `accepted` and `accepted_index`.
        trees: int32 [max_batch, 2, max_rows - 1]: what a draft on the device proposed.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv: PagedKV,
        attention: AttentionBackend,
        *,
        max_batch: int,
        max_rows: int,
        max_path: int,
        max_tokens: int,
        num_slots: int,
        simulate: bool = False,
    ) -> None:
        if not kv.num_scratch_pages:
            raise ValueError("padding rows need a scratch page")
        self.max_batch, self.max_rows, self.num_slots = max_batch, max_rows, num_slots
        self._max_path = max_path
        self._model, self._kv, self._attention = model, kv, attention
        self._max_tokens = max_tokens
        self._simulate = simulate
        device = self._device = kv.data.device

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self.inputs = ints(max_batch, HEADER + 2 * max_rows)
        # A step may begin before the one before it is over, which has a tree of its own.
        max_pages = -(-(max_tokens + 2 * max_rows) // kv.page_size)
        self.tables = ints(num_slots + 1, max_pages)
        self.state = ints(num_slots + 1, 2)
        self.results = ints(max_batch, 1 + 4 * max_rows)
        self.trees = ints(max_batch, 2, max(1, max_rows - 1))
        self.accepted = ints(max_batch, 1 + max_path)
        self.accepted_index = torch.zeros(max_batch * max_path, dtype=torch.int64, device=device)
        self.late = LateChoice(
            max_batch,
            max_batch * max_rows,
            self.trees.shape[2],
            num_slots + 1,
            model.config.vocab_size,
            device,
        )

    def forward(self, kind: StepKind) -> Forward:
        """The first half: up to the logits."""
        inputs = self.inputs[: kind.batch]
        begun = begin_step(inputs, self.max_rows, kind.rows, self.state, self.trees, self.tables)
        batch, tables = self._batch(kind, inputs, begun)
        output = self._model.forward(batch, self._kv, self._attention, kind.capture)
        return Forward(output, begun, batch.positions, tables)

    def _batch(
        self, kind: StepKind, inputs: torch.Tensor, begun: Begun
    ) -> tuple[Batch, torch.Tensor]:
        """The step as the model sees it, made of the uploaded records."""
        kv, device = self._kv, self._device
        slots, num_rows = inputs[:, SLOT], inputs[:, NUM_ROWS].contiguous()
        tables = self.tables[slots.long()]  # of few rows several times as fast as index_select
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
            tail_mask=rows.mask if kind.rows > 1 else None,
            is_causal=None,
            tail_positions=rows.positions.view(kind.batch, kind.rows).to(torch.int32),
            max_rows=kind.rows,
            num_splits=splits_for(
                kind.batch,
                kind.rows,
                kv,
                self._max_tokens,
                self._model.config.num_heads // kv.num_kv_heads,
            ),
            # One sequence's parts are equal anyway.
            balance=Balance(self._model.dtype) if kind.batch > 1 else None,
        )
        batch = Batch(rows.tokens, rows.positions, rows.slots, (), plan=plan)
        return batch, tables

    def choose(self, kind: StepKind, forward: Forward) -> None:
        """The second half: up to what the host, the draft and the next step read."""
        inputs, begun = self.inputs[: kind.batch], forward.begun
        asked = sampling_rows(inputs, forward.positions)
        rule = [asked.temperature, asked.seed, asked.position]
        if kind.is_filtered:
            rule += [asked.top_k, asked.top_p, asked.min_p]
        logits = forward.output.logits
        # Filters and adjusted logits take much memory for each row; the rule alone takes none.
        size = max(1, ROWS_AT_ONCE // kind.rows) if kind.is_filtered else kind.batch
        parts = []
        for first in range(0, kind.batch, size):
            last = min(first + size, kind.batch)
            rows = slice(first * kind.rows, last * kind.rows)
            part = logits[rows]
            if kind.is_late:
                trees = Begun(
                    *(of[first:last] for of in (begun.tokens, begun.parents, begun.committed))
                )
                part = self.late.adjust(part, inputs[first:last], trees, forward.positions[rows])
            parts.append(choose_tokens(part, *(values[rows] for values in rule)))
        chosen = torch.cat(parts) if len(parts) > 1 else parts[0]
        if kind.with_logprobs:
            self.late.keep_logprobs(logits, chosen)
        chosen = chosen.view(kind.batch, kind.rows)
        path, length, emitted = walk_trees(chosen, begun.tokens, begun.parents)
        if kind.is_late:
            self.late.count(inputs, length, emitted)
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
