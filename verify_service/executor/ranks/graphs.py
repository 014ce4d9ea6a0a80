"""Captured steps on several ranks.

Rank 0 sends each step to the others before it starts or captures its own; they do the same.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foredraft.attention.base import AttentionBackend
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.decoder import DecoderModel
from foredraft.parallel.group import Group
from foredraft.record_layout import Layout
from foredraft.runner.batch import StepRows
from verify_service.executor.captured.graphs import DecodeGraphs
from verify_service.executor.captured.mixed import MixedGraphs
from verify_service.executor.captured.step import DecodeStep, StepKind, StepSizes
from verify_service.executor.captured.step_buffers import StepBuffers
from verify_service.executor.ranks import messages
from verify_service.executor.ranks.board import Board
from verify_service.executor.ranks.messages import Kind
from verify_service.executor.records import PageUpdate

# Follows a message's header. The layers come next, then the records of all sequences, padding
# included.
FLAGS = ("is_filtered", "is_two_phase", "with_logprobs", "shares_keys")  # of a `StepKind`, in order
STEP = Layout(("num_rows", np.int32), *((flag, np.int32) for flag in FLAGS))


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Sizes of all captured forwards of a model.

    Attributes:
        steps: Sizes of steps that only decode.
        max_mixed_rows: Maximum number of rows of a step with prompts.
    """

    steps: StepSizes
    max_mixed_rows: int

    @property
    def numbers(self) -> list[int]:
        """The sizes as integers, for a message."""
        return [self.max_mixed_rows, *map(int, dataclasses.astuple(self.steps))]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "GraphSizes":
        """Reads sizes from the integers that `numbers` gave."""
        max_mixed_rows, batch, rows, path, tokens, slots, simulate, has_branches = numbers
        steps = StepSizes(batch, rows, path, tokens, slots, bool(simulate), bool(has_branches))
        return cls(steps, max_mixed_rows)


class StepSender:
    """Sends rank 0's captured steps to the other ranks; a `StepListener`."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def pages(self, updates: Sequence[PageUpdate]) -> None:
        """See StepListener."""
        self._board.write(messages.pages(updates))

    def step(self, kind: StepKind, num_sequences: int, buffers: StepBuffers) -> None:
        """See StepListener."""
        self._send(Kind.STEP, kind, num_sequences, buffers)

    def forward(self, kind: StepKind, num_sequences: int, buffers: StepBuffers) -> None:
        """See StepListener."""
        self._send(Kind.GRAPH_FORWARD, kind, num_sequences, buffers)

    def prepare(self, kind: StepKind, num_sequences: int, buffers: StepBuffers) -> None:
        """See StepListener."""
        self._send(Kind.PREPARE, kind, num_sequences, buffers)

    def two_phase_step(self, kind: StepKind, num_sequences: int, buffers: StepBuffers) -> None:
        """See StepListener.

        The other ranks start the choice too, which waits for rank 0's choice on their cards.
        """
        self._send(Kind.TWO_PHASE_STEP, kind, num_sequences, buffers)

    def mixed(self, rows: Sequence[StepRows], layers: Sequence[int]) -> None:
        """See StepListener."""
        self._board.write(messages.mixed(rows, layers))

    def mixed_warm_up(self, layers: Sequence[int], has_branches: bool) -> None:
        """See StepListener."""
        self._board.write(messages.mixed_warm_up(layers, has_branches))

    def _send(
        self, message: Kind, kind: StepKind, num_sequences: int, buffers: StepBuffers
    ) -> None:
        header = messages.header(message, num_sequences, len(kind.layers))
        step = messages.packed(STEP, [(kind.rows, *(getattr(kind, flag) for flag in FLAGS))])
        layers = np.asarray(kind.layers, np.int32).tobytes()
        self._board.write(header + step + layers + buffers.all_records(num_sequences).tobytes())


def captured(
    model: DecoderModel,
    kv: PagedKV,
    attention: AttentionBackend,
    sizes: GraphSizes,
    group: Group,
    board: Board | None = None,
) -> tuple[DecodeGraphs, MixedGraphs]:
    """Creates the graphs of one model over one cache; captures nothing yet.

    Args:
        model: The model, or this rank's share of it.
        kv: KV cache of the model.
        attention: Attention backend of the model's device.
        sizes: Sizes of the captured forwards.
        group: Ranks that share the model.
        board: Rank 0's board, for messages to other ranks; None on other ranks, and for a single
            one.
    """
    step = DecodeStep(model, kv, attention, sizes.steps, group)
    listener = None if board is None else StepSender(board)
    graphs = DecodeGraphs(step, listener)
    mixed = MixedGraphs(
        model,
        kv,
        attention,
        tables=step.tables,
        max_tree=step.max_rows,
        max_rows=sizes.max_mixed_rows,
        pool=graphs.pool,
        shortage=graphs.shortage,
        listener=listener,
    )
    return graphs, mixed


class GraphFollower:
    """Runs a worker's captured steps as rank 0's messages say."""

    def __init__(self, graphs: DecodeGraphs, mixed: MixedGraphs) -> None:
        self._graphs, self._mixed = graphs, mixed
        self._pages: list[PageUpdate] = []  # parts of page tables for the next step

    def follow(self, kind: Kind, message: bytes) -> None:
        """Carries out a message."""
        if kind is Kind.PAGES:
            self._pages += messages.read_pages(message)
        elif kind is Kind.MIXED:
            if self._pages:
                # The device must have read the previous updates before more are filled in.
                torch.cuda.current_stream().synchronize()
                self._set_pages()
            self._mixed.await_upload()
            self._mixed.forward(*messages.read_mixed(message))
        elif kind is Kind.MIXED_WARM_UP:
            self._mixed.warm_up(*messages.read_mixed_warm_up(message))
        else:
            self._step(kind, message)

    def close(self) -> None:
        """Frees the graphs."""
        self._graphs.close()
        self._mixed.close()

    def _step(self, kind: Kind, message: bytes) -> None:
        graphs, buffers = self._graphs, self._graphs.buffers
        rest = messages.Reader(message)
        count, [step] = rest.count, rest.records(STEP, 1)
        own = StepKind(
            graphs.shapes.batch_size(count),
            int(step["num_rows"]),
            tuple(rest.ints(rest.num_layers)),
            *(bool(step[flag]) for flag in FLAGS),
        )
        buffers.await_free_buffers()
        buffers.next_records(count)
        self._set_pages()
        records = buffers.all_records(count)
        records[:] = rest.words(records.size).reshape(records.shape)
        buffers.upload(count)
        if kind is Kind.STEP:
            graphs.start(own, count)
        elif kind is Kind.GRAPH_FORWARD:
            graphs.forward(own, count)
            torch.cuda.current_stream().synchronize()
        elif kind is Kind.PREPARE:
            graphs.graphs_of(own).prepare(own, count)
        else:
            graphs.two_phase.choose(graphs.two_phase.start(own, count), 0)

    def _set_pages(self) -> None:
        self._graphs.buffers.set_pages(self._pages)
        self._pages = []
