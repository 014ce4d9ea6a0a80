"""Hidden states of committed rows, kept until the draft was told of them; and which pages its KV is then complete on.

Slot q of such a draft's KV belongs to (hidden state of position q, token q + 1). Torch tensors are only sliced here; how
they reach the draft is the arena's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from foredraft.runner.model_runner import ForwardOutput
from foredraft.transport.base import HiddenWriter
from foredraft.transport.device_exchange import DeviceExchange
from verify_service.drafts.arena import Arena
from verify_service.drafts.kept_steps import KeptSteps, select_rows
from verify_service.drafts.page_marks import DraftMarks
from verify_service.drafts.run import MERGE_STEPS, Run
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.request import Status
from verify_service.scheduler.step_plan import PrefillChunk

LONG_PROMPT = 1024  # rows of a step that a sequence is given at once

# Hidden states of a step's first rows, by the number of the draft that reads them.
Gathered = Mapping[int, torch.Tensor]


@dataclass(slots=True)
class CommittedRows:
    """Rows of a forward whose tokens were committed to a sequence, from position `start` on."""

    sequence: RequestSequence
    start: int
    rows: Sequence[int]


class HiddenStates:
    """Captures for the draft that is attached, if it reads hidden states; else does nothing and costs nothing.

    Memory is bounded by what one step computes and a page for each running sequence; while drafting rests, by what
    `Drafting` lets it keep.

    Args:
        arena: Where rows go.
        marks: Which pages hold complete draft KV.
        page_size: Tokens per page.
        refill_tokens: Cached tokens that are computed again at most, to fill pages that the draft has lost.
        reader: Number of the draft, where there are several.

    Attributes:
        reader: As given.
        most_kept: Bytes; beyond them all is dropped.
    """

    most_kept: float = math.inf

    def __init__(
        self,
        arena: Arena,
        marks: DraftMarks,
        page_size: int,
        refill_tokens: int,
        reader: int = 0,
    ) -> None:
        self.reader = reader
        self._arena = arena
        self._marks = marks
        self._page_size = page_size
        self._refill_tokens = refill_tokens
        self._epoch = 0
        self._layers: tuple[int, ...] | None = None
        self._writer: HiddenWriter | None = None
        self._runs: dict[int, Run] = {}
        self._steps = KeptSteps()  # rows behind those of the runs
        self._row_bytes = 0

    @property
    def layers(self) -> tuple[int, ...] | None:
        """Layers to capture; empty for the state after the final norm, None when nothing is needed."""
        return self._layers

    @property
    def writer(self) -> HiddenWriter | None:
        """Where rows of the current attach go; None when it reads none."""
        return self._writer

    def attach(self, epoch: int) -> DeviceExchange | None:
        """Another draft is attached, or with epoch 0 none: what was kept for the last one is void.

        Returns:
            What it shares with the target on the device, if anything.
        """
        exchange = self._arena.exchange(epoch) if epoch else None
        self._epoch = epoch
        self._layers = exchange.layers if exchange is not None else None
        self._writer = exchange.writer if exchange is not None else None
        self.drop_all()
        return exchange.device if exchange is not None else None

    def keep(
        self,
        output: ForwardOutput,
        committed: Sequence[CommittedRows],
        gathered: torch.Tensor | None = None,
    ) -> None:
        """Takes the rows that a step committed, after the scheduler has.

        Args:
            gathered: What `gather` gave of all first rows, where the output is gone already.
        """
        if self._layers is None or not committed:
            return
        self._settle()  # what comes now comes after it
        source = self.source(output) if gathered is None else gathered
        rows = _rows(source, [row for one in committed for row in one.rows])
        for one, part in zip(
            committed, rows.split([len(one.rows) for one in committed]), strict=True
        ):
            self._give(one.sequence, one.start, part, len(one.rows))
        self._bound()

    def keep_step(
        self,
        sequences: list[RequestSequence],
        starts: list[int],
        gathered: torch.Tensor,
        chunks: Sequence[PrefillChunk] = (),
    ) -> None:
        """Takes a step that committed its only row to each sequence that goes on, and prompts; see `KeptSteps.add`.

        Args:
            gathered: [n, width], of the sequences, then of the prompts.
        """
        self._row_bytes = gathered.shape[1] * gathered.element_size()
        if sequences:
            self._steps.add(sequences, starts, gathered[: len(sequences)] if chunks else gathered)
        first = len(sequences)
        for chunk in chunks:
            end = first + chunk.num_tokens
            rows = gathered[first:end]
            if chunk.num_tokens < LONG_PROMPT:
                self._steps.add_prompt(chunk.seq, chunk.start, rows)
            elif chunk.seq.status is Status.RUNNING:
                self._settle()
                own = rows if len(rows) == len(gathered) else rows.clone()
                self._give(chunk.seq, chunk.start, own, chunk.num_tokens)
                self._bound()
            first = end
        if self._steps.is_full(self._row_bytes):
            if not self._steps.prune():
                self._settle()
            self._bound()

    def _bound(self) -> None:
        if self.kept_bytes > self.most_kept:
            self.drop_all()

    def _settle(self) -> None:
        """Gives the rows of steps to the runs of their sequences."""
        if self._steps.num_rows:
            for sequence, start, rows in self._steps.take():
                self._give(sequence, start, rows, len(rows))

    def _give(self, sequence: RequestSequence, start: int, rows: torch.Tensor, count: int) -> None:
        self._row_bytes = rows.shape[1] * rows.element_size()
        run = self._runs.get(sequence.request_id)
        if run is None or run.end != start:
            # The sequence took over pages that another one has filled meanwhile, or is new.
            run = self._begin(sequence, start)
        run.append(rows, count)
        if run.num_appended >= MERGE_STEPS:
            run.merge()
        if not self._mark(sequence, run, start):
            # Rows of a page that was exchanged are gone: the draft sees this sequence from here on.
            run = self._begin(sequence, start)
            run.append(rows, count)

    def gather(self, output: ForwardOutput, count: int) -> torch.Tensor:
        """The first rows of a step, in memory of their own."""
        return self.source(output)[:count].clone()

    def source(self, output: ForwardOutput) -> torch.Tensor:
        """[T, width]: what the draft reads of a forward."""
        source = output.streams if self._layers else output.hidden
        assert source is not None
        return source

    def passed(self, sequence: RequestSequence, start: int, count: int) -> None:
        """The draft has taken rows of positions [start, start + count) by itself, on the device."""
        self._settle()
        run = self._runs.get(sequence.request_id)
        if run is None:
            return
        run.skip(count)
        if not self._mark(sequence, run, start):
            self.drop(sequence)
            return
        run.unsent_pages.clear()

    def drop_all(self) -> None:
        """Rows that the draft was not sent will never be: it will see the sequences from here on."""
        for run in self._runs.values():
            self._lose(run)
        self._runs.clear()
        self._steps.clear()

    def drop(self, sequence: RequestSequence) -> None:
        """The sequence ended or lost its pages; rows that the draft was not sent will never be."""
        if sequence.status is Status.FINISHED:
            self._steps.forget(sequence)
        else:
            self._settle()  # it may run again, with other rows; what waits is nobody's
        self._drop_run(sequence)

    def _drop_run(self, sequence: RequestSequence) -> None:
        run = self._runs.pop(sequence.request_id, None)
        if run is not None:
            self._lose(run)

    def _lose(self, run: Run) -> None:
        """Frees rows: who was told of the run may still know it."""
        for page in run.unsent_pages:
            self._marks.clear(page)
        run.parts.clear()

    def run(self, sequence: RequestSequence) -> Run | None:
        """What is kept of a sequence."""
        if self._steps.num_rows:  # asked for several times in every step
            self._settle()
        return self._runs.get(sequence.request_id)

    def untold_from(self, sequence: RequestSequence, told: Run | None) -> int | None:
        """First position that is kept of a sequence, if its draft was told of another run or none."""
        run = self._runs.get(sequence.request_id)
        if run is None:
            return self._steps.begin_of(sequence)
        return None if run is told else run.start

    @property
    def kept_bytes(self) -> int:
        """Memory of all rows that are kept."""
        num_rows = sum(run.end - run.first for run in self._runs.values())
        return self._row_bytes * (num_rows + self._steps.num_rows)

    def valid_from(self, sequence: RequestSequence, run: Run) -> int:
        """First slot from which on the draft can attend, given that it is sent all rows of `run`."""
        if run.start % self._page_size:
            return run.start
        return self._whole_pages_from(sequence.pages, run.start // self._page_size)

    def sent(self, run: Run) -> None:
        """All rows of a run went to the draft. Those of the page being filled stay: it may be exchanged yet."""
        run.resend_from = None
        run.unsent_pages.clear()
        run.drop_before(run.end - run.end % self._page_size)

    def usable_prefix(self, sequence: RequestSequence, pages: list[int]) -> int:
        """How many tokens of a cached prefix need not be computed again for the draft's sake (`Scheduler`).

        Where the draft has lost more than may be computed again, it gets the last `refill_tokens`.
        """
        hit = len(pages) * self._page_size
        will_draft = sequence.speculation.enabled is not False and sequence.num_output_left > 1
        if self._layers is None or not will_draft:
            return hit
        self._settle()
        start = self._whole_pages_from(pages, len(pages))
        if start == 0 or hit - start >= self._refill_tokens:
            return hit
        num_valid = 0
        while self._marks.is_valid(pages[num_valid], self._epoch):
            num_valid += 1
        refilled = self._refill_tokens // self._page_size * self._page_size
        return max(num_valid * self._page_size, hit - refilled)

    def _whole_pages_from(self, pages: Sequence[int], end: int) -> int:
        """First position of the unbroken pages with draft KV that end before entry `end`."""
        while end and self._marks.is_valid(pages[end - 1], self._epoch):
            end -= 1
        return end * self._page_size

    def _begin(self, sequence: RequestSequence, start: int) -> Run:
        self._drop_run(sequence)
        run = self._runs[sequence.request_id] = Run(start, start, start)
        run.num_appended = sequence.request_id % MERGE_STEPS  # not all are put together at a time
        return run

    def _mark(self, sequence: RequestSequence, run: Run, start: int) -> bool:
        """Marks the pages that the new rows complete; they go to the draft before anything that relies on it.

        Returns:
            Whether the rows are kept that have to be sent again.
        """
        size = self._page_size
        for i in range(start // size, run.end // size):
            page = sequence.pages[i]
            if self._marks.is_valid(page, self._epoch):
                continue
            if i >= sequence.pages_changed_for(self.reader):
                resend = max(i * size, run.start)
                if resend < run.first:
                    return False
                if run.resend_from is None or resend < run.resend_from:
                    run.resend_from = resend
            if i * size >= run.start:
                self._marks.mark(page, self._epoch)
                run.unsent_pages.append(page)
        return True


def committed_rows(
    decoding: Sequence[RequestSequence],
    chunks: Sequence[PrefillChunk],
    first_rows: Sequence[int],
    starts: Sequence[int],
    paths: Sequence[Sequence[int]],
) -> list[CommittedRows]:
    """Which rows of a step's forward were committed to sequences that go on.

    Args:
        first_rows: Of each sequence of the step: of those that decode, then of the chunks.
        starts: Position of the root of each that decodes.
        paths: Accepted rows of each of these.
    """
    committed = []
    num_trees = len(decoding)
    for sequence, first, start, path in zip(
        decoding, first_rows[:num_trees], starts, paths, strict=True
    ):
        if sequence.status is Status.RUNNING:
            kept = path[: sequence.num_computed - start]
            committed.append(CommittedRows(sequence, start, [first + row for row in kept]))
    for chunk, first in zip(chunks, first_rows[num_trees:], strict=True):
        sequence = chunk.seq
        if sequence.status is Status.RUNNING:
            num_kept = min(chunk.num_tokens, sequence.num_computed - chunk.start)
            rows = range(first, first + num_kept)
            committed.append(CommittedRows(sequence, chunk.start, rows))
    return committed


def _rows(source: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Rows in memory that holds nothing else; without waiting for a GPU."""
    if rows and rows == list(range(rows[0], rows[0] + len(rows))):  # as of steps without trees
        return source[rows[0] : rows[0] + len(rows)].clone()
    return select_rows(source, rows)
