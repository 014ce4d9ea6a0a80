"""A step of a draft on a GPU: packs what was committed, runs the graphs, waits once, unpacks the trees. A step that stays on
the GPU is only put into the stream."""

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from draft_service.drafters.beam_drafting import Wish
from draft_service.drafters.hidden_source import HiddenSource
from draft_service.drafters.paged_sequences import Continuation, Extension, PagedSequence
from draft_service.steps.graphs import DraftGraphs
from draft_service.steps.records import HEADER, NUM_ROWS, ROW, SAMPLING, SLOT, START, VALID_FROM
from draft_service.steps.uploads import StepRecords
from foredraft.api.draft.v1 import draft_pb2
from foredraft.errors import Unavailable
from foredraft.transport.base import HiddenReader
from foredraft.transport.device_exchange import DraftExchange

BRIEF_BYTES = 96  # of a sequence that decodes
STEP_SECONDS = 10.0  # a step that takes longer waits for a verifier that has died
# Turns that an extension takes at most which is longer than a step of fixed shape; one forward of all its rows takes as long.
MOST_TURNS = 6


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """How steps run.

    Attributes:
        limit: Largest batch of a graph; None for the verifier's.
        captures: Whether they are graphs; else the same operations run one by one.
    """

    limit: int | None
    captures: bool

    def max_batch(self, attach: draft_pb2.AttachRequest) -> int:
        """Largest batch for one verifier."""
        return min(self.limit or attach.max_batch, attach.max_batch)


def wait(is_done: Callable[[], bool], source: HiddenReader | DraftExchange | None) -> None:
    """Until the device has done what was asked of it.

    Args:
        source: Of what it may wait for.

    Raises:
        Unavailable: It waits for what will not come.
    """
    deadline = time.monotonic() + STEP_SECONDS
    while not is_done():
        if time.monotonic() > deadline:
            if source is not None:
                source.abandon()
            raise Unavailable("what a step committed did not come")


@dataclass(frozen=True, slots=True)
class _Part:
    """Sequences of a step that stays on the GPU, as many as the graphs take.

    Attributes:
        header: int32 [n, HEADER], of their records.
        modes: See `DraftGraphs.draft`.
        is_wanted: Whether anybody wants a tree.
    """

    header: npt.NDArray[np.int32]
    modes: tuple[bool, bool]
    is_wanted: bool


class GraphDrafting:
    """Steps of one attach.

    Args:
        graphs: Of the draft model.
        source: Of hidden states, for a model that reads them.
        reader: Of hidden states, which may have to be told that none will come.
        exchange: For steps that stay on the GPU; None where none can.
    """

    def __init__(
        self,
        graphs: DraftGraphs,
        source: HiddenSource | None = None,
        reader: HiddenReader | None = None,
        exchange: DraftExchange | None = None,
    ) -> None:
        self.graphs = graphs
        self._source, self._exchange = source, exchange
        self._awaited = exchange or reader
        self._continued: Sequence[Continuation] = ()  # by the newest step that stayed on the GPU
        self._parts: list[_Part] = []  # of these
        slots = graphs.shape.max_slots
        # Of the sequences that have slots now; their sampling as the records hold it.
        self._owners: list[PagedSequence | None] = [None] * slots
        self._sampling = np.zeros((slots, SAMPLING.stop - SAMPLING.start), dtype=np.int32)
        self._is_sampled = np.zeros(slots, dtype=bool)
        self._is_ranked = np.zeros(slots, dtype=bool)

    @property
    def can_continue(self) -> bool:
        """Whether steps can stay on the GPU."""
        return self._exchange is not None

    def is_brief(self, request: draft_pb2.StepRequest) -> bool:
        """Whether a step is one for the graphs alone."""
        count = len(request.sequences)
        # Few tokens make a short message; to look at each sequence takes longer.
        return count <= self.graphs.max_batch and request.ByteSize() <= BRIEF_BYTES * count

    def fits(self, extensions: Sequence[Extension]) -> bool:
        """Whether the graphs can extend all of these."""
        sizes = [len(extension.tokens) for extension in extensions]
        num_turns = self._num_turns(sizes)
        if num_turns > MOST_TURNS:
            return False
        has_room = num_turns == 1 or self._source is None or self._source.has_room(sum(sizes))
        return len(extensions) <= self.graphs.max_batch and has_room

    def step(self, extensions: Sequence[Extension], response: draft_pb2.StepResponse) -> None:
        """Extends by what was committed, and drafts for those that want a tree."""
        if not extensions:
            return
        sizes = np.array([len(extension.tokens) for extension in extensions])
        num_turns, width = self._num_turns(sizes.tolist()), self.graphs.shape.num_rows
        places = None
        if self._source is not None:
            places = self._source.places(extensions, sizes, num_turns * width)
        # Whoever has less to do joins later: the trees continue what all have done in the last turn.
        waits = num_turns - np.maximum(-(-sizes // width), 1)
        for turn in range(num_turns):
            taking = np.flatnonzero(waits <= turn)
            firsts = (turn - waits[taking]) * width
            members = [extensions[i] for i in taking.tolist()]
            records, slots = self._fill([extension.sequence for extension in members])
            num_rows = np.minimum(sizes[taking] - firsts, width)
            records.header[:, START] = [e.start for e in members] + firsts
            records.header[:, NUM_ROWS] = num_rows
            is_row = np.arange(width) < num_rows[:, None]
            records.tokens[is_row] = [
                token
                for extension, first in zip(members, firsts.tolist(), strict=True)
                for token in extension.tokens[first : first + width]
            ]
            if places is not None:
                columns = firsts[:, None] + np.arange(width)
                records.places[:] = places[taking[:, None], columns]
            graphs, count = self.graphs, len(members)
            graphs.upload(count)
            graphs.extend(count)
            if turn + 1 < num_turns:
                graphs.finish()
                wait(lambda: self.graphs.is_free, self._awaited)
        wanted = [i for i, extension in enumerate(extensions) if extension.limits is not None]
        if wanted:
            graphs.draft(count, *self._modes(slots))
            graphs.download(count)
        self._finish()
        if wanted:
            limits = [extensions[i].limits for i in wanted]
            self._answer(wanted, slots, limits, count, response)

    def _num_turns(self, sizes: Sequence[int]) -> int:
        """Steps of fixed shape that extensions of so many tokens take."""
        return max(1, -(-max(sizes, default=1) // self.graphs.shape.num_rows))

    def draft(self, wishes: Sequence[Wish], response: draft_pb2.StepResponse) -> None:
        """Drafts for sequences that were extended otherwise."""
        largest = self.graphs.max_batch
        for first in range(0, len(wishes), largest):
            part = wishes[first : first + largest]
            records, slots = self._fill([wish.sequence for wish in part])
            # What is committed counts from key 0 on, as if there were one row at its end.
            records.header[:, START] = [wish.sequence.num_keys - 1 for wish in part]
            records.header[:, NUM_ROWS] = 1
            features = [wish.feature for wish in part if wish.feature is not None]
            graphs = self.graphs
            graphs.upload(len(part))
            graphs.take_roots(
                torch.stack([wish.logits for wish in part]),
                torch.stack(features) if features else None,
            )
            graphs.draft(len(part), *self._modes(slots))
            graphs.download(len(part))
            self._finish()
            limits = [wish.limits for wish in part]
            self._answer(range(len(part)), slots, limits, len(part), response)

    def proceed(self, step: int, continuations: Sequence[Continuation]) -> None:
        """A step that stays on the GPU: puts it into the stream, behind the verifier's.

        Waits only for the step before the last, which bounds what is under way.
        """
        exchange, graphs = self._exchange, self.graphs
        assert exchange is not None
        if continuations is not self._continued:  # nearly always they are
            self._continued, self._parts = continuations, self._divide(continuations)
        for part in self._parts:
            if not graphs.is_ready(len(part.header), *part.modes):
                self.settle()
                graphs.make_ready(len(part.header), *part.modes)
        for i, part in enumerate(self._parts):
            count = len(part.header)
            wait(lambda: graphs.is_free, exchange)
            graphs.records(count).header[:] = part.header
            graphs.upload(count)
            if i == 0:
                exchange.wait(step)
            graphs.extend(count)
            if part.is_wanted:
                graphs.draft(count, *part.modes)
            graphs.finish()
        exchange.publish(step)

    def _divide(self, continuations: Sequence[Continuation]) -> list[_Part]:
        parts = []
        for first in range(0, len(continuations), self.graphs.max_batch):
            members = continuations[first : first + self.graphs.max_batch]
            slots = self._slots([one.sequence for one in members])
            header = np.zeros((len(members), HEADER), dtype=np.int32)
            self._fill_header(header, [one.sequence for one in members], slots)
            header[:, START] = [one.start for one in members]
            header[:, NUM_ROWS] = -1
            header[:, ROW] = [one.row for one in members]
            is_wanted = any(one.is_wanted for one in members)
            parts.append(_Part(header, self._modes(slots), is_wanted))
        return parts

    def settle(self) -> None:
        """Until steps that stayed on the GPU are done: what comes next may wait for the device in other ways."""
        wait(lambda: self.graphs.is_done, self._awaited)

    def close(self) -> None:
        """Frees the graphs. The verifier is gone: what it has not committed yet is not waited for."""
        if self._exchange is not None and not self.graphs.is_done:
            self._exchange.abandon()
        self.graphs.close()

    def _finish(self) -> None:
        """Until the device has done all that was asked of it; see `wait`."""
        self.graphs.finish()
        wait(lambda: self.graphs.is_done, self._awaited)

    def _fill(self, sequences: Sequence[PagedSequence]) -> tuple[StepRecords, np.ndarray]:
        """Everything of the records but tokens and where they go."""
        slots = self._slots(sequences)
        records = self.graphs.records(len(sequences))
        self._fill_header(records.header, sequences, slots)
        return records, slots

    def _fill_header(
        self,
        header: npt.NDArray[np.int32],
        sequences: Sequence[PagedSequence],
        slots: npt.NDArray[np.int64],
    ) -> None:
        header[:, SLOT] = slots
        header[:, VALID_FROM] = [sequence.valid_from for sequence in sequences]
        header[:, SAMPLING] = self._sampling[slots]

    def _slots(self, sequences: Sequence[PagedSequence]) -> np.ndarray:
        """Their slots, with their own sampling."""
        for sequence in sequences:
            if self._owners[sequence.slot] is not sequence:
                self._begin(sequence)
        return np.array([sequence.slot for sequence in sequences])

    def _modes(self, slots: np.ndarray) -> tuple[bool, bool]:
        return bool(self._is_sampled[slots].any()), bool(self._is_ranked[slots].any())

    def _begin(self, sequence: PagedSequence) -> None:
        slot, sampling = sequence.slot, sequence.sampling
        self._owners[slot] = sequence
        words = struct.pack(
            "<fffiQ",
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.top_k,
            sampling.seed,
        )
        self._sampling[slot] = np.frombuffer(words, dtype=np.int32)
        is_sampled = sampling.temperature > 0
        self._is_sampled[slot] = is_sampled
        self._is_ranked[slot] = is_sampled and (sampling.top_k > 0 or sampling.top_p < 1)

    def _answer(
        self,
        wanted: Sequence[int],
        slots: np.ndarray,
        limits: Sequence[tuple[int, int, int] | None],
        count: int,
        response: draft_pb2.StepResponse,
    ) -> None:
        """Puts the trees of those that want one into the response."""
        shape = self.graphs.shape
        whole = (shape.num_steps, shape.topk, shape.num_nodes)
        tokens, parents = self.graphs.trees(count)
        all_tokens, all_parents = tokens.tolist(), parents.tolist()
        sizes = np.count_nonzero(tokens >= 0, axis=1).tolist()
        add, slot_of = response.proposals.add, slots.tolist()
        for i, limit in zip(wanted, limits, strict=True):
            size, own_tokens, own_parents = sizes[i], all_tokens[i], all_parents[i]
            if limit != whole and limit is not None:
                own_tokens, own_parents = cut(own_tokens[:size], own_parents, limit)
            elif size < len(own_tokens):
                own_tokens, own_parents = own_tokens[:size], own_parents[:size]
            if own_tokens:
                add(slot=slot_of[i], tokens=own_tokens, parents=own_parents)


def cut(
    tokens: Sequence[int], parents: Sequence[int], limits: tuple[int, int, int]
) -> tuple[list[int], list[int]]:
    """The part of a tree within (steps, topk, nodes): the first nodes, with children and levels no more than asked for.

    Args:
        tokens: By value.
    """
    steps, topk, nodes = limits
    depth, num_children, place = {-1: 0}, {-1: 0}, {-1: -1}
    taken: list[int] = []
    for node, parent in enumerate(parents[: len(tokens)]):
        level = depth.get(parent, steps) + 1
        if level <= steps and num_children[parent] < topk and len(taken) < nodes:
            num_children[parent] += 1
            depth[node], num_children[node], place[node] = level, 0, len(taken)
            taken.append(node)
    return [tokens[node] for node in taken], [place[parents[node]] for node in taken]
