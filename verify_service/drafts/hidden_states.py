"""Keeps the hidden states of committed rows until they are sent to the draft, and marks the pages
that hold complete draft KV then.

Slot q of such a draft's KV belongs to (hidden state of position q, token q + 1). This module only
slices tensors; the arena takes them to the draft.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from foredraft.runner.model_runner import ForwardOutput
from verify_service.connection.arena import Exchange
from verify_service.drafts.features import DraftFeatures
from verify_service.drafts.hidden_state_buffer import HiddenStateBuffer, select_rows
from verify_service.drafts.page_marks import DraftMarks
from verify_service.drafts.run import MERGE_STEPS, Run
from verify_service.drafts.settings import DraftSettings
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.request import Status
from verify_service.scheduler.step_plan import PrefillChunk

LONG_PROMPT = 1024  # prompts of at least this many rows skip the buffer

# Hidden states of a step's first rows, by the number of the draft that reads them.
Gathered = Mapping[int, torch.Tensor]


@dataclass(slots=True)
class CommittedRows:
    """Rows of a forward that were committed to a sequence, from position `start` on."""

    sequence: RequestSequence
    start: int
    rows: Sequence[int]


class HiddenStates:
    """Keeps the target's hidden states for the draft of one attach until they have been sent.

    The memory is at most the rows of one step and a page for each running sequence; while drafting
    is suspended, it is at most `most_kept`.

    Args:
        exchange: The exchange region, and the hidden states that the draft reads.
        marks: Marks of the pages that hold complete draft KV.
        settings: Settings of the draft.
        most_kept: Maximum bytes of rows; all rows are dropped beyond it.

    Attributes:
        features: Takes the draft's rows from a forward's output.
        writer: Writer of the rows that are sent.
    """

    def __init__(
        self,
        exchange: Exchange,
        marks: DraftMarks,
        settings: DraftSettings,
        most_kept: float = math.inf,
    ) -> None:
        self.features = DraftFeatures(exchange.layers or (), exchange.fusion)
        self.writer = exchange.writer
        self._marks = marks
        self._page_size = marks.page_size
        self._number, self._refill_tokens = settings.number, settings.refill_tokens
        self._most_kept = most_kept
        self._runs: dict[int, Run] = {}
        self._steps = HiddenStateBuffer()  # rows that follow the runs' own
        self._row_bytes = self._step_row_bytes = 0

    def keep(
        self,
        output: ForwardOutput,
        committed: Sequence[CommittedRows],
        gathered: torch.Tensor | None = None,
    ) -> None:
        """Stores the rows that a step committed; called after the scheduler has committed them.

        Args:
            output: Output of the step's forward.
            committed: The committed rows.
            gathered: Result of `gather` for all first rows, where the output is gone already.
        """
        if not committed:
            return
        self._settle()  # buffered rows come before the new ones
        source = self.features.of(output) if gathered is None else gathered
        rows = self.features.projected(
            _rows(source, [row for one in committed for row in one.rows])
        )
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
        """Stores the rows of a step with one row for each sequence, followed by prompts.

        Args:
            sequences: Sequences of the single rows, see `HiddenStateBuffer.add`.
            starts: Position of each single row.
            gathered: [n, width], rows of the sequences, then of the prompts.
            chunks: The prompts.
        """
        self._step_row_bytes = gathered.shape[1] * gathered.element_size()
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
                self._give(chunk.seq, chunk.start, self.features.projected(own), chunk.num_tokens)
                self._bound()
            first = end
        if self._steps.is_full(self._step_row_bytes):
            if not self._steps.prune():
                self._settle()
            self._bound()

    def _bound(self) -> None:
        if self.kept_bytes > self._most_kept:
            self.drop_all()

    def _settle(self) -> None:
        """Moves the rows of the buffer to the runs of their sequences."""
        if self._steps.num_rows:
            for sequence, start, rows in self._steps.take(self.features.projected):
                self._give(sequence, start, rows, len(rows))

    def _give(self, sequence: RequestSequence, start: int, rows: torch.Tensor, count: int) -> None:
        self._row_bytes = rows.shape[1] * rows.element_size()
        run = self._runs.get(sequence.request_id)
        if run is None or run.end != start:
            # The sequence is new, or has adopted pages that another one has filled.
            run = self._begin(sequence, start)
        run.append(rows, count)
        if run.num_appended >= MERGE_STEPS:
            run.merge()
        if not self._mark(sequence, run, start):
            # Rows of a replaced page are gone, so the draft reads this sequence from here on.
            run = self._begin(sequence, start)
            run.append(rows, count)

    def gather(self, output: ForwardOutput, count: int) -> torch.Tensor:
        """Copies the first rows of a step."""
        return self.features.of(output)[:count].clone()

    def passed(self, sequence: RequestSequence, start: int, count: int) -> None:
        """Records that the draft has taken `count` rows from position `start` on, on the device."""
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
        """Drops all rows. The draft never gets unsent rows, and reads sequences from here on."""
        for run in self._runs.values():
            self._lose(run)
        self._runs.clear()
        self._steps.clear()

    def drop(self, sequence: RequestSequence) -> None:
        """Drops the rows of a sequence that has ended or lost its pages."""
        if sequence.status is Status.FINISHED:
            self._steps.forget(sequence)
        else:
            self._settle()  # it may run again with other rows, so its buffered rows must go too
        self._drop_run(sequence)

    def _drop_run(self, sequence: RequestSequence) -> None:
        run = self._runs.pop(sequence.request_id, None)
        if run is not None:
            self._lose(run)

    def _lose(self, run: Run) -> None:
        """Frees the rows of a run; other objects may still refer to the run."""
        for page in run.unsent_pages:
            self._marks.clear(page)
        run.parts.clear()

    def run_of(self, sequence: RequestSequence) -> Run | None:
        """Returns the run of a sequence; None where no rows are kept."""
        if self._steps.num_rows:  # checked first, since every step calls this several times
            self._settle()
        return self._runs.get(sequence.request_id)

    def untold_from(self, sequence: RequestSequence, told: Run | None) -> int | None:
        """Returns the first position of a sequence's rows if the draft does not know their run.

        Args:
            sequence: The sequence.
            told: Run that the draft knows; None for none.
        """
        run = self._runs.get(sequence.request_id)
        if run is None:
            return self._steps.begin_of(sequence)
        return None if run is told else run.start

    @property
    def kept_bytes(self) -> int:
        """Returns the bytes of all rows."""
        num_rows = sum(run.end - run.first for run in self._runs.values())
        return self._row_bytes * num_rows + self._step_row_bytes * self._steps.num_rows

    def valid_from(self, sequence: RequestSequence, run: Run) -> int:
        """Returns the first slot that the draft can attend to, once it has all rows of `run`."""
        if run.start % self._page_size:
            return run.start
        return self._marks.valid_from(sequence.pages, run.start // self._page_size)

    def sent(self, run: Run) -> None:
        """Drops the rows of a run after all of them have been sent to the draft.

        Rows of the page that is being filled stay, since the page may still be replaced.
        """
        run.resend_from = None
        run.unsent_pages.clear()
        run.drop_before(run.end - run.end % self._page_size)

    def usable_prefix(self, sequence: RequestSequence, pages: list[int]) -> int:
        """Returns how many tokens of a cached prefix the `Scheduler` need not compute again.

        Where the draft has lost more than may be computed again, it gets the last `refill_tokens`.
        """
        hit = len(pages) * self._page_size
        will_draft = sequence.speculation.enabled is not False and sequence.num_output_left > 1
        if not will_draft:
            return hit
        self._settle()
        start = self._marks.valid_from(pages, len(pages))
        if start == 0 or hit - start >= self._refill_tokens:
            return hit
        num_valid = self._marks.valid_prefix(pages)
        refilled = self._refill_tokens // self._page_size * self._page_size
        return max(num_valid * self._page_size, hit - refilled)

    def _begin(self, sequence: RequestSequence, start: int) -> Run:
        self._drop_run(sequence)
        run = self._runs[sequence.request_id] = Run(start, start, start)
        run.num_appended = sequence.request_id % MERGE_STEPS  # runs merge in different steps
        return run

    def _mark(self, sequence: RequestSequence, run: Run, start: int) -> bool:
        """Marks the pages that the new rows complete.

        The rows are sent to the draft before any message that relies on the marks.

        Returns:
            Whether all rows that must be sent again are still kept.
        """
        size = self._page_size
        for i in range(start // size, run.end // size):
            page = sequence.pages[i]
            if self._marks.is_valid(page):
                continue
            if i >= sequence.pages_changed_for(self._number):
                resend = max(i * size, run.start)
                if resend < run.first:
                    return False
                if run.resend_from is None or resend < run.resend_from:
                    run.resend_from = resend
            if i * size >= run.start:
                self._marks.mark(page)
                run.unsent_pages.append(page)
        return True


def committed_rows(
    decoding: Sequence[RequestSequence],
    chunks: Sequence[PrefillChunk],
    first_rows: Sequence[int],
    starts: Sequence[int],
    paths: Sequence[Sequence[int]],
) -> list[CommittedRows]:
    """Returns the rows of a step's forward that were committed to sequences that still run.

    Args:
        decoding: Sequences that decode.
        chunks: Parts of prompts.
        first_rows: First row of each sequence that decodes, then of each chunk.
        starts: Position of the root of each sequence that decodes.
        paths: Accepted rows of each sequence that decodes, relative to its first row.
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
    """Copies rows, without waiting for a GPU."""
    if rows and rows == list(range(rows[0], rows[0] + len(rows))):  # steps without trees
        return source[rows[0] : rows[0] + len(rows)].clone()
    return select_rows(source, rows)
