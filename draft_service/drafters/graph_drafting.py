"""Runs a draft's steps on a GPU by CUDA graphs.

A step packs the committed tokens, runs the graphs, waits once, and unpacks the trees. A step that
stays on the GPU is only put into the stream.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from draft_service.drafters.ahead_policy import AheadPolicy
from draft_service.drafters.beam_drafting import TreeRequest
from draft_service.drafters.hidden_source import HiddenSource
from draft_service.drafters.paged_sequences import Continuation, Extension, PagedSequence
from draft_service.drafters.record_headers import RecordHeaders
from draft_service.drafters.tree_answers import add_trees
from draft_service.drafters.tree_limits import TreeLimits
from draft_service.metrics import AHEAD_STEPS
from draft_service.steps.graphs import DraftGraphs
from draft_service.steps.records import record
from foredraft.api.draft.v1 import draft_pb2
from foredraft.errors import Unavailable
from foredraft.transport.base import HiddenReader
from foredraft.transport.device_exchange import DraftExchange

BRIEF_BYTES = 96  # maximum message size of a sequence that decodes
STEP_SECONDS = 10.0  # a step that takes longer waits for a verifier that has died
# Longest wait for whether a step's trees are there already, and the time from look to look: the
# device computes the step's first forward meanwhile, which takes longer.
MOST_REPORT_SECONDS = 0.1
POLL_SECONDS = 5e-5
# Maximum number of fixed-shape steps for one extension; more take as long as one forward of all its
# rows.
MOST_TURNS = 6


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """Settings of fixed-shape steps.

    Attributes:
        limit: Largest batch of a graph; None for the verifier's largest batch.
        captures: Whether steps are captured as graphs; else the same operations run one by one.
        drafts_ahead: See --speculative-draft-ahead.
    """

    limit: int | None
    captures: bool
    drafts_ahead: bool = False

    def max_batch(self, attach: draft_pb2.AttachRequest) -> int:
        """Returns the largest batch of a graph for one verifier."""
        return min(self.limit or attach.max_batch, attach.max_batch)


def wait(is_done: Callable[[], bool], source: HiddenReader | DraftExchange | None) -> None:
    """Waits until the device has finished.

    Args:
        is_done: Returns whether the device has finished.
        source: Source of the data that the device may be waiting for; abandoned after a timeout.

    Raises:
        Unavailable: The device did not finish within STEP_SECONDS.
    """
    deadline = time.monotonic() + STEP_SECONDS
    while not is_done():
        if time.monotonic() > deadline:
            if source is not None:
                source.abandon()
            raise Unavailable("what a step committed did not come")


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of a step that stays on the GPU: as many sequences as fit a graph.

    Attributes:
        records: [n], one for each sequence, complete but for tokens and hidden-state rows.
        modes: See `DraftGraphs.draft`.
        is_wanted: Whether any of the sequences wants a tree.
        can_look_ahead: Whether the step may prepare for its outcomes; only one that is a single
            part.
    """

    records: npt.NDArray[np.void]
    modes: tuple[bool, bool]
    is_wanted: bool
    can_look_ahead: bool


class GraphDrafting:
    """Runs the fixed-shape steps of one attach.

    Args:
        graphs: Graphs of the draft model.
        source: Rows of hidden states, for a model that reads them.
        reader: Reader of hidden states; abandoned when a verifier has died.
        exchange: Buffers for steps that stay on the GPU; None where there are no such steps.
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
        # Sequences of the newest step that stayed on the GPU, and that step in parts.
        self._continued: Sequence[Continuation] = ()
        self._parts: list[_Part] = []
        self._headers = RecordHeaders(graphs.shape.max_slots)
        self._policy = AheadPolicy()
        self._prepared_step = 0  # the step that the newest preparations are for
        self._counts = [0, 0]  # hits and misses that the metrics have

    @property
    def can_continue(self) -> bool:
        """Whether steps can stay on the GPU."""
        return self._exchange is not None

    def is_brief(self, request: draft_pb2.StepRequest) -> bool:
        """Returns whether the graphs alone can run a step."""
        count = len(request.sequences)
        # Few tokens make a short message; looking at each sequence would take longer.
        return count <= self.graphs.max_batch and request.ByteSize() <= BRIEF_BYTES * count

    def fits(self, extensions: Sequence[Extension]) -> bool:
        """Returns whether the graphs can compute all of the extensions."""
        sizes = [len(extension.tokens) for extension in extensions]
        num_turns = self._num_turns(sizes)
        if num_turns > MOST_TURNS:
            return False
        has_room = num_turns == 1 or self._source is None or self._source.has_room(sum(sizes))
        return len(extensions) <= self.graphs.max_batch and has_room

    def step(self, extensions: Sequence[Extension], response: draft_pb2.StepResponse) -> None:
        """Computes extensions, and adds trees to the response for those that want one."""
        if not extensions:
            return
        sizes = np.array([len(extension.tokens) for extension in extensions])
        num_turns, width = self._num_turns(sizes.tolist()), self.graphs.shape.num_rows
        hidden_rows = None
        if self._source is not None:
            hidden_rows = self._source.hidden_rows(extensions, sizes, num_turns * width)
        # Short extensions join in a later turn, so that all end in the last one, which the trees
        # continue.
        waits = num_turns - np.maximum(-(-sizes // width), 1)
        for turn in range(num_turns):
            taking = np.flatnonzero(waits <= turn)
            firsts = (turn - waits[taking]) * width
            members = [extensions[i] for i in taking.tolist()]
            records, slots = self._fill([extension.sequence for extension in members])
            num_rows = np.minimum(sizes[taking] - firsts, width)
            records["start"] = [e.start for e in members] + firsts
            records["num_rows"] = num_rows
            is_row = np.arange(width) < num_rows[:, None]
            records["tokens"][is_row] = [
                token
                for extension, first in zip(members, firsts.tolist(), strict=True)
                for token in extension.tokens[first : first + width]
            ]
            if hidden_rows is not None:
                columns = firsts[:, None] + np.arange(width)
                records["hidden_rows"] = hidden_rows[taking[:, None], columns]
            graphs, count = self.graphs, len(members)
            graphs.upload(count)
            graphs.extend(count)
            if turn + 1 < num_turns:
                graphs.finish()
                wait(lambda: self.graphs.is_free, self._awaited)
        wanted = [i for i, extension in enumerate(extensions) if extension.limits is not None]
        if wanted:
            graphs.draft(count, *self._headers.modes(slots))
            graphs.download(count)
        self._finish()
        if wanted:
            self._answer({i: extensions[i].limits for i in wanted}, slots, count, response)

    def _num_turns(self, sizes: Sequence[int]) -> int:
        """Returns the number of fixed-shape steps that extensions of these sizes take."""
        return max(1, -(-max(sizes, default=1) // self.graphs.shape.num_rows))

    def draft(self, requests: Sequence[TreeRequest], response: draft_pb2.StepResponse) -> None:
        """Drafts for sequences whose extensions were computed outside of the graphs."""
        largest = self.graphs.max_batch
        for first in range(0, len(requests), largest):
            part = requests[first : first + largest]
            records, slots = self._fill([request.sequence for request in part])
            # All keys are computed; the record has one row, at the newest key.
            records["start"] = [request.sequence.num_keys - 1 for request in part]
            records["num_rows"] = 1
            records["tokens"][:, 0] = [request.sequence.last_token or 0 for request in part]
            roots = [request.logits for request in part if request.logits is not None]
            features = [request.feature for request in part if request.feature is not None]
            graphs = self.graphs
            graphs.upload(len(part))
            graphs.take_roots(
                len(part),
                torch.stack(roots) if roots else None,
                torch.stack(features) if features else None,
            )
            graphs.draft(len(part), *self._headers.modes(slots))
            graphs.download(len(part))
            self._finish()
            limits = {i: request.limits for i, request in enumerate(part)}
            self._answer(limits, slots, len(part), response)

    def proceed(self, step: int, continuations: Sequence[Continuation]) -> None:
        """Puts a step that stays on the GPU into the stream, behind the verifier's step.

        Waits only for the step before the last one, which bounds the work in flight; and, where
        this step was prepared for, until the device has found its trees or not. Then it drafts
        only what is not there.
        """
        exchange, graphs = self._exchange, self.graphs
        assert exchange is not None
        if continuations is not self._continued:  # rare: most steps repeat the previous one
            self._continued, self._parts = continuations, self._divide(continuations)
        looks_ahead = self._parts[0].can_look_ahead and self._policy.is_ahead(
            step, len(continuations)
        )
        for part in self._parts:
            if not graphs.is_ready(len(part.records), *part.modes):
                self.settle()
                graphs.make_ready(len(part.records), *part.modes)
        for i, part in enumerate(self._parts):
            count = len(part.records)
            wait(lambda: graphs.is_free, exchange)
            records = graphs.records(count)
            _copy(part.records, records)
            if part.can_look_ahead:
                records["step"] = step
            graphs.upload(count)
            if i == 0:
                exchange.wait(step)
            graphs.extend(count)
            if part.is_wanted and not (part.can_look_ahead and self._has_trees(step)):
                graphs.draft(count, *part.modes)
            graphs.finish()
        exchange.publish(step)
        if looks_ahead:
            graphs.look_ahead(len(continuations), *self._parts[0].modes)
            graphs.finish()
            self._prepared_step = step + 1

    def _has_trees(self, step: int) -> bool:
        """Returns whether a step has found its trees prepared; False if that is not known in
        time, which costs a draft that nobody needs.
        """
        if self._prepared_step != step:
            return False
        deadline = time.monotonic() + MOST_REPORT_SECONDS
        while abs((report := self.graphs.outcome_report)[2]) != step:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        *counts, found = report
        for name, now, before in zip(("hit", "miss"), counts, self._counts, strict=True):
            AHEAD_STEPS.labels(name).inc(now - before)
        self._counts = counts
        return found == step

    def _divide(self, continuations: Sequence[Continuation]) -> list[_Part]:
        parts = []
        is_single = len(continuations) <= self.graphs.max_batch
        for first in range(0, len(continuations), self.graphs.max_batch):
            members = continuations[first : first + self.graphs.max_batch]
            records = np.zeros(len(members), record(self.graphs.shape.num_rows))
            slots = self._headers.fill(records, [one.sequence for one in members])
            records["start"] = [one.start for one in members]
            records["num_rows"] = -1
            records["row"] = [one.row for one in members]
            is_wanted = any(one.is_wanted for one in members)
            can_look_ahead = is_single and is_wanted and self.graphs.can_look_ahead(len(members))
            parts.append(_Part(records, self._headers.modes(slots), is_wanted, can_look_ahead))
        return parts

    def settle(self) -> None:
        """Waits until all steps that stayed on the GPU are done.

        What runs next may wait for the device without a timeout.
        """
        wait(lambda: self.graphs.is_done, self._awaited)

    def close(self) -> None:
        """Frees the graphs.

        The verifier is gone: its uncommitted steps are abandoned.
        """
        if self._exchange is not None and not self.graphs.is_done:
            self._exchange.abandon()
        self.graphs.close()

    def _finish(self) -> None:
        """Waits until the device has finished all work; see `wait`."""
        self.graphs.finish()
        wait(lambda: self.graphs.is_done, self._awaited)

    def _fill(
        self, sequences: Sequence[PagedSequence]
    ) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
        """Begins a step: fills in the records of its sequences, but for their rows and tokens.

        Returns the records and the sequences' slots.
        """
        records = self.graphs.records(len(sequences))
        return records, self._headers.fill(records, sequences)

    def _answer(
        self,
        wanted: Mapping[int, TreeLimits | None],
        slots: npt.NDArray[np.int64],
        count: int,
        response: draft_pb2.StepResponse,
    ) -> None:
        """Adds the trees of a finished step of `count` sequences; see `add_trees`."""
        shape = self.graphs.shape
        whole = TreeLimits(shape.num_steps, shape.topk, shape.num_nodes)
        add_trees(response, self.graphs.trees(count), slots, wanted, whole)


def _copy(source: npt.NDArray[np.void], target: npt.NDArray[np.void]) -> None:
    """Copies records as bytes, which numpy does many times faster than column by column."""
    block = np.dtype((np.void, source.dtype.itemsize))
    target.view(block)[:] = source.view(block)
