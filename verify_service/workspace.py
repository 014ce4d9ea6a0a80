"""Adds up the GPU memory that the target's steps take beside weights and KV.

Counts what is there at a time, at the largest step that the flags allow. Steps outside of
graphs use the same memory one after the other; captured steps have their own.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.attention.base import AttentionBackend, ForwardSizes
from foredraft.attention.segments import TILE
from foredraft.layers.exact_gemm import is_hopper
from foredraft.layers.linear import Linear, ProductBytes
from foredraft.layers.padded_rows import room, timed_size
from foredraft.models.decoder import DecoderModel
from foredraft.types import MAX_LOGPROBS
from verify_service.drafts.hidden_state_buffer import MOST_BYTES as MOST_BUFFERED
from verify_service.executor.captured.mixed import mixed_sizes
from verify_service.executor.captured.shapes import batch_sizes, row_sizes
from verify_service.executor.captured.step import FILTERED_AT_ONCE
from verify_service.executor.captured.step_buffers import PAGE_UPDATES
from verify_service.executor.captured.two_phase_tables import MASK_BITS
from verify_service.executor.choice.sampler import CHOSEN_AT_ONCE, MASKED_AT_ONCE
from verify_service.executor.choice.scoring import SCORED_AT_ONCE
from verify_service.executor.records import STEP

_FLOAT, _INT, _LONG = 4, 4, 8  # bytes of a number
# Bytes of a logit while the sampler chooses: in float32, and as it was before penalties; then
# without NaN, or as a probability by parts and in one.
_KEPT_BYTES, _SCRUBBED_BYTES, _PROBABILITY_BYTES = 8, 4, 8
# Bytes of a logit in a block of rows that is masked, or, with lossy acceptance, sorted.
_MASK_BYTES, _LOSSY_BYTES = 20, 80
# Bytes of a logit that captured steps adjust, and whose token filters rank.
_RANKED_BYTES = 12
# Bytes of a logit whose log-probability is computed, beside the logit as the LM head gives it.
_SCORE_BYTES = 13
# Bytes of a logit that is capped, in float32: before it is divided, and after.
_CAPPED_BYTES = 8
# Sets of graphs that each keep their hidden states: without filters and with them, both with shared
# keys and without; two-phase ones without log-probabilities and with them.
_GRAPH_SETS = 6
# Streams that work on a GPU, and the bytes that cuBLAS takes for each.
_STREAMS, _CUBLAS_HOPPER, _CUBLAS = 3, 32 << 20, 9 << 20


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of the target's steps.

    Attributes:
        chunk: Number of prompt tokens of a step.
        num_sequences: Number of sequences that run together.
        max_rows: Number of rows of a sequence that decodes, the root included.
        num_keys: Number of tokens of a sequence.
        page_size: Number of tokens of a page.
        graph_batch: Number of sequences of a captured step; 0 without graphs.
        num_captured: Number of layers whose streams drafts read.
        widths: For each draft that reads hidden states, the number of layers that it reads.
        projected: Those numbers for drafts whose rows are projected here.
        is_lossy: Whether tokens that the rule did not choose may be accepted.
    """

    chunk: int
    num_sequences: int
    max_rows: int
    num_keys: int
    page_size: int
    graph_batch: int
    num_captured: int = 0
    widths: tuple[int, ...] = ()
    projected: tuple[int, ...] = ()
    is_lossy: bool = False

    @property
    def decode_rows(self) -> int:
        """Number of rows of the largest step without prompts."""
        return self.num_sequences * self.max_rows


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory of steps in bytes, by what takes it.

    Attributes:
        mlp, attention: The two halves of a layer, at the most rows of a step with prompts: their
            activations, and what their products take beside them (dequantised weights, rounded or
            padded rows); partial sums of attention; what ranks gather.
        logits: Logits of a step with prompts, and what choosing its tokens takes.
        scores: Logits of prompts whose log-probabilities are asked for.
        trials: The largest of these where products are tried before their first use.
        hidden: Captured hidden states, and what is kept of them for drafts.
        graphs: Memory that captured steps share.
        outputs: Hidden states that each captured step keeps.
        tables: Inputs and outcomes of captured steps, penalties and masks.
        libraries: Workspaces of cuBLAS.
    """

    mlp: int
    attention: int
    logits: int
    scores: int
    trials: int
    hidden: int
    graphs: int
    outputs: int
    tables: int
    libraries: int

    @property
    def total(self) -> int:
        """Bytes of all of them. A step needs the first five one after the other.

        Blocks that are free need not fit what comes next. Outside of graphs torch gives them back
        when memory ends, and what steps of many sizes leave in pieces is counted by half.
        """
        step = max(self.mlp, self.attention, self.logits, self.scores)
        held = self.hidden + self.outputs + self.tables + self.libraries
        return held + max(step + step // 2, self.trials) + self.graphs + self.graphs // 4

    def __str__(self) -> str:
        parts = dataclasses.asdict(self) | {"total": self.total}
        return ", ".join(f"{name} {size / 2**20:.0f}" for name, size in parts.items())


def workspace_of(model: DecoderModel, attention: AttentionBackend, limits: StepLimits) -> Workspace:
    """Returns an upper bound of the memory of steps.

    Args:
        model: The target, or a rank's share of it, loaded.
        attention: Attention backend of the target.
        limits: Limits of the steps.
    """
    sizes = _Sizes(model, attention, limits, with_trials=False)
    return Workspace(
        mlp=sizes.mlp(),
        attention=sizes.attention(),
        logits=sizes.logits(),
        scores=sizes.scores(),
        trials=_Sizes(model, attention, limits, with_trials=True).step(),
        hidden=sizes.hidden(),
        graphs=sizes.graphs(),
        outputs=sizes.outputs(),
        tables=sizes.tables(),
        libraries=_STREAMS * (_CUBLAS_HOPPER if is_hopper(model.device) else _CUBLAS),
    )


class _Sizes:
    """Computes the items of a `Workspace`, with or without trials of products."""

    def __init__(
        self,
        model: DecoderModel,
        attention: AttentionBackend,
        limits: StepLimits,
        with_trials: bool,
    ) -> None:
        self._with_trials = with_trials
        self._model, self._attention, self._limits = model, attention, limits
        self._config, self._itemsize = model.config, model.dtype.itemsize
        self._row = self._config.hidden_size * self._itemsize
        self._rows = limits.chunk + limits.decode_rows
        self._num_ranks = model.embedding.share.group.size
        # Layers may keep their weights in different forms.
        layers = model.decoder_layers
        self._qkv: list[Linear] = [one.attention.qkv for one in layers]
        self._output: list[Linear] = [one.attention.output for one in layers]
        self._gate_up: list[Linear] = [one.mlp.gate_up for one in layers]
        self._down: list[Linear] = [one.mlp.down for one in layers]

    def step(self) -> int:
        """The largest part of a step outside of graphs."""
        return max(self.mlp(), self.attention(), self.logits(), self.scores())

    def attention(self) -> int:
        """The first half of a layer, with the partial sums of attention."""
        return self._attention_of(self._rows, cuts_keys=True)

    def mlp(self) -> int:
        """The second half of a layer. The first half's result is still there."""
        return self._mlp_of(self._rows)

    def _attention_of(self, num_rows: int, cuts_keys: bool) -> int:
        num_kv_heads, config = self._model.num_kv_heads, self._config
        sizes = ForwardSizes(
            num_rows,
            self._limits.num_keys,
            cuts_keys,
            num_kv_heads * self._model.group_size,
            num_kv_heads,
            config.head_dim,
        )
        partial = self._attention.partial_bytes(sizes, self._model.device)
        qkv, output = self._product(self._qkv, num_rows), self._product(self._output, num_rows)
        inner = room(num_rows) * self._output[0].num_inputs * self._itemsize
        then = max(partial, output.result + output.scratch)
        product = qkv.result + max(qkv.scratch, inner + then)
        return self._held(num_rows) + max(product, output.result + self._sums(num_rows))

    def _mlp_of(self, num_rows: int) -> int:
        gate_up, down = (self._product(each, num_rows) for each in (self._gate_up, self._down))
        inner = room(num_rows) * self._down[0].num_inputs * self._itemsize
        product = gate_up.result + max(gate_up.scratch, inner + down.result + down.scratch)
        kept = room(num_rows) * self._row + self._product(self._output, num_rows).result
        most = max(product, down.result + self._sums(num_rows))
        return self._held(num_rows) + kept + most

    def _held(self, num_rows: int) -> int:
        """Bytes that stay during a whole layer: the stream, its norm, angles, indices, masks."""
        angles = 2 * len(set(self._config.ropes)) * self._config.head_dim * _FLOAT
        # Tokens, positions, slots and rows with logits; a tree's mask and its upload, and the slots
        # of the tiles of keys that it begins and ends in.
        tree = self._limits.max_rows
        indices = 4 * _LONG + 2 * tree + (2 * TILE + tree) * _INT * (tree > 1)
        norm = room(num_rows) * self._row
        # Page tables of this forward, of one that may still run, and of the last layer's rows.
        tables = 3 * self._page_tables()
        return norm + num_rows * (self._row + angles + indices) + tables

    def _sums(self, num_rows: int) -> int:
        """The ranks' parts of a sum where they are gathered, and its norm."""
        return num_rows * self._row * (self._num_ranks + 1) if self._num_ranks > 1 else 0

    def hidden(self) -> int:
        """Captured streams; for each draft copies, rows that wait, and a page of each sequence."""
        limits, num_rows = self._limits, self._rows
        waiting = limits.num_sequences * limits.page_size
        found = num_rows * self._row * limits.num_captured
        for width in limits.widths:
            found += (2 * num_rows + waiting) * self._row * width + MOST_BUFFERED
        # A projection normalises each stream, and then all of them.
        return found + sum(2 * num_rows * self._row * width for width in limits.projected)

    def logits(self) -> int:
        """Logits of all rows that decode, and what choosing takes of some rows at a time."""
        num_rows = self._limits.decode_rows
        computed = timed_size(num_rows, self._model.device)
        product = self._product([self._model.lm_head], computed)
        at_once = min(num_rows, max(CHOSEN_AT_ONCE, self._limits.max_rows))
        block = min(num_rows, MASKED_AT_ONCE)
        then = max(at_once * _SCRUBBED_BYTES, block * _MASK_BYTES)
        if self._limits.is_lossy:
            then = max(then, at_once * _PROBABILITY_BYTES + block * _LOSSY_BYTES)
        choice = at_once * _KEPT_BYTES + then
        after = max(product.scratch, self._vocabularies(choice))
        # The rows are picked, and may be padded.
        return computed * 3 * self._row + product.result + self._widened(computed) + after

    def scores(self) -> int:
        """Log-probabilities of prompts, some rows at a time."""
        rows = min(self._limits.chunk, SCORED_AT_ONCE)
        product = self._product([self._model.lm_head], rows)
        scored = max(product.scratch, self._vocabularies(rows * _SCORE_BYTES))
        return product.result + self._widened(rows) + scored

    def graphs(self) -> int:
        """The largest captured step; others fit its memory."""
        limits, tree = self._limits, self._limits.max_rows
        if not limits.graph_batch:
            return 0
        decode_rows = limits.graph_batch * tree
        mixed_rows = self._mixed_rows()
        rows = max(decode_rows, mixed_rows)
        product = self._product([self._model.lm_head], decode_rows)
        at_once = min(decode_rows, max(FILTERED_AT_ONCE, tree))
        choice = self._vocabularies(at_once * _RANKED_BYTES)
        logits = product.result + self._widened(decode_rows) + max(product.scratch, choice)
        alone = self._attention_of(decode_rows, cuts_keys=True)
        mixed = self._attention_of(mixed_rows, cuts_keys=False)
        step = max(self._mlp_of(rows), alone, mixed, logits)
        return step + rows * self._row * (1 + limits.num_captured)

    def outputs(self) -> int:
        """Hidden states that each captured step keeps, and its logits with lossy acceptance."""
        limits = self._limits
        batches = batch_sizes(limits.graph_batch) if limits.graph_batch else []
        rows = sum(batch * sum(row_sizes(batch, limits.max_rows)) for batch in batches)
        found = _GRAPH_SETS * rows * self._row * (1 + limits.num_captured)
        return found + (self._vocabularies(rows * self._itemsize) if limits.is_lossy else 0)

    def tables(self) -> int:
        """Memory that captured steps and the sampler read and write."""
        limits = self._limits
        biases = self._vocabularies((limits.num_sequences + 1) * _FLOAT)
        if not limits.graph_batch:
            return biases
        rows, mixed_rows = limits.graph_batch * limits.max_rows, self._mixed_rows()
        masks = rows * -(-self._config.vocab_size // MASK_BITS) * _INT
        records = rows * (STEP.size + 8 + 3 * (1 + MAX_LOGPROBS)) * _INT
        mixed = mixed_rows * (self._row * (1 + limits.num_captured) + limits.max_rows + 16 * _INT)
        updates = 3 * PAGE_UPDATES * _LONG
        return 2 * biases + masks + records + mixed + updates + self._page_tables()

    def _product(self, linears: Sequence[Linear], num_rows: int) -> ProductBytes:
        """The most that one of these layers takes."""
        found = [one.method.product_bytes(one, num_rows, self._itemsize) for one in linears]
        result, scratch, trial = (max(sizes) for sizes in zip(*found, strict=True))
        return ProductBytes(result, max(scratch, trial) if self._with_trials else scratch)

    def _vocabularies(self, num_bytes: int) -> int:
        return num_bytes * self._config.vocab_size

    def _widened(self, num_rows: int) -> int:
        """Bytes that capping logits, or gathering them from ranks, takes beside the logits."""
        capped = 0 if self._config.logit_softcap is None else _CAPPED_BYTES
        gathered = 3 * self._itemsize if self._num_ranks > 1 else 0
        return self._vocabularies(num_rows * (capped + gathered))

    def _mixed_rows(self) -> int:
        return mixed_sizes(self._model, self._rows)[-1]

    def _page_tables(self) -> int:
        limits = self._limits
        pages = -(-(limits.num_keys + 2 * limits.max_rows) // limits.page_size)
        # Beside the pages: six numbers, and the positions of a tree's keys.
        return (limits.num_sequences + 1) * (pages + 12 + limits.max_rows) * _INT
