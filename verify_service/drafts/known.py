"""What a draft knows of each sequence: one record for each, and one owner that changes it.

Beside these records, `page_marks` has the pages that hold the draft's KV, whoever uses them;
`hidden_states` has the rows that wait to be sent; `open_requests` has the trees that are awaited.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from verify_service.drafts.hidden_states import HiddenStates
from verify_service.drafts.page_marks import DraftMarks
from verify_service.drafts.run import Run
from verify_service.drafts.sync import PATIENCE, SequenceFacts
from verify_service.scheduler.request import Sequence as RequestSequence


@dataclass(slots=True)
class Known:
    """A sequence as the draft knows it.

    Attributes:
        slot: Slot of the sequence; None before the first sync, and after the draft was told that
            the slot is free.
        num_tokens: Number of leading tokens that the draft has.
        num_pages: Number of leading entries of the page table that the draft has.
        run: Run of hidden states that the draft reads, where it reads any. `HiddenStates` may have
            begun another one since.
    """

    slot: int | None = None
    num_tokens: int = 0
    num_pages: int = 0
    run: Run | None = None


class News(NamedTuple):
    """Parts of a sequence that the draft lacks.

    Attributes:
        start: Position of the first token.
        end: Position after the last one; `start` where there are none.
        first_page: First entry of the page table; all after it are news too.
        valid_from: First slot that the draft can attend to, where the sequence is new to it; None
            for a sequence that it knows.
    """

    start: int
    end: int
    first_page: int
    valid_from: int | None


class KnownSequences:
    """Holds and changes the records of one attach. Belongs to the engine's thread.

    Args:
        marks: Marks of the pages that hold complete draft KV.
        number: Number of the draft.
        hidden: Hidden states for a draft that reads them, else None.
        uses_pages: Whether the draft keeps KV on the verifier's pages.
    """

    def __init__(
        self, marks: DraftMarks, number: int, hidden: HiddenStates | None, uses_pages: bool
    ) -> None:
        self._marks, self._page_size = marks, marks.page_size
        self._number, self._hidden, self._uses_pages = number, hidden, uses_pages
        self._each: dict[int, Known] = {}  # by request id

    def of(self, sequence: RequestSequence) -> Known:
        """Returns the record of a sequence; only this class changes it."""
        known = self._each.get(sequence.request_id)
        if known is None:  # not by setdefault, since every step calls this several times
            known = self._each[sequence.request_id] = Known()
        return known

    def forget(self, sequence: RequestSequence) -> None:
        """Drops the record of a sequence that has ended."""
        self._each.pop(sequence.request_id, None)

    def released(self, slots: Iterable[int]) -> None:
        """Records that the draft was told of released slots.

        A preempted sequence then begins again, even if it gets its old slot back.
        """
        gone = set(slots)
        for known in self._each.values():
            if known.slot in gone:
                known.slot = None

    # Questions.

    def has_caught_up(self, sequence: RequestSequence) -> bool:
        """Returns whether the draft has all tokens of a sequence."""
        return self.of(sequence).num_tokens == len(sequence.tokens)

    def lag(self, sequence: RequestSequence) -> int:
        """Returns the number of tokens that the draft must read before it can propose."""
        known = self.of(sequence)
        if self._hidden is not None:
            start = self._hidden.untold_from(sequence, known.run)
            if start is not None:  # there may be a hole before it
                return sequence.num_computed - start
        is_known = known.slot == sequence.slot
        return len(sequence.tokens) - (known.num_tokens if is_known else 0)

    def facts(
        self, sequence: RequestSequence, is_requested: bool, is_prompt: bool = False
    ) -> SequenceFacts:
        """Returns the facts that decide whether a sequence is synced."""
        known, hidden = self.of(sequence), self._hidden
        if hidden is None:
            is_known = known.slot == sequence.slot
            lag = len(sequence.tokens) - (known.num_tokens if is_known else 0)
            return SequenceFacts(lag, is_requested, is_prompt, is_known and lag < PATIENCE)
        lag, run = self.lag(sequence), hidden.run_of(sequence)
        is_known = run is not None and known.run is run
        is_close = is_known and run is not None and run.end - known.num_tokens < PATIENCE
        stands_alone = self.stands_alone(sequence)
        return SequenceFacts(lag, is_requested, is_prompt, is_close, stands_alone)

    def stands_alone(self, sequence: RequestSequence) -> bool:
        """Returns whether this sequence can be synced without syncing another one first.

        A new sequence may use pages whose hidden states another sequence must sync first.
        """
        if self._hidden is None:
            return True
        run = self.of(sequence).run
        is_new = run is None or run is not self._hidden.run_of(sequence)
        return not is_new or (sequence.num_cached == 0 and sequence.num_preemptions == 0)

    def can_follow(self, sequence: RequestSequence) -> bool:
        """Returns whether the draft has the whole sequence, so that it can take the next tokens
        from the device.
        """
        known = self.of(sequence)
        if known.slot != sequence.slot or known.num_tokens != len(sequence.tokens):
            return False
        if self._hidden is not None:
            return known.run is not None and known.run is self._hidden.run_of(sequence)
        return sequence.pages_changed_for(self._number) >= known.num_pages

    # Changes.

    def tell(self, sequence: RequestSequence, budget: int) -> News:
        """Returns all that the draft lacks of a running sequence, which it knows from now on.

        Args:
            sequence: The sequence.
            budget: Maximum number of tokens, for a draft that reads no hidden states.
        """
        if self._hidden is not None:
            return self._tell_states(self._hidden, sequence)
        known, num_pages = self.of(sequence), len(sequence.pages)
        is_new = known.slot != sequence.slot
        if is_new:
            self._begin(sequence, known)
        if not self._uses_pages:
            end = len(sequence.tokens)
        else:
            self._replace_pages(sequence, known)
            # A prompt's tokens are sent once the target has computed them; the newest token already
            # has a page.
            end = len(sequence.tokens) if sequence.is_decoding else sequence.num_computed
            end = min(end, known.num_tokens + max(budget, 0))
        start, first_page, valid_from = known.num_tokens, num_pages, 0 if is_new else None
        if end <= start:
            return News(start, start, first_page, valid_from)
        known.num_tokens = end
        if self._uses_pages:
            first_page, known.num_pages = known.num_pages, num_pages
            self._mark(sequence, start, end)
        return News(start, end, first_page, valid_from)

    def _tell_states(self, hidden: HiddenStates, sequence: RequestSequence) -> News:
        """Returns the result of `tell` for a draft that reads hidden states.

        The tokens reach one further than the hidden states.
        """
        known, run, num_pages = self.of(sequence), hidden.run_of(sequence), len(sequence.pages)
        valid_from = None
        if run is None:
            return News(0, 0, num_pages, valid_from)
        if known.run is not run or known.slot != sequence.slot:
            self._begin(sequence, known)
            known.run = run
            # A hidden state belongs to the token after it: a draft that lacks the states from
            # `start` on has start + 1 tokens.
            known.num_tokens = run.start + 1 if run.start else 0
            valid_from = hidden.valid_from(sequence, run)
        elif run.resend_from is not None:
            known.num_tokens = min(known.num_tokens, run.resend_from + 1)
        known.num_pages = min(known.num_pages, sequence.take_pages_changed(self._number))
        start, end = known.num_tokens, run.end + 1
        if end == start:
            return News(start, start, num_pages, valid_from)
        first_page = known.num_pages
        known.num_tokens, known.num_pages = end, num_pages
        return News(start, end, first_page, valid_from)

    def tell_pages(self, sequence: RequestSequence) -> int:
        """Returns the first entry of a sequence's page table that the draft lacks; it knows them
        all from now on.
        """
        known = self.of(sequence)
        first = min(known.num_pages, sequence.take_pages_changed(self._number))
        known.num_pages = len(sequence.pages)
        return first

    def followed(self, sequence: RequestSequence, start: int) -> None:
        """Records that the host knows the tokens from key `start` on, which the draft has taken on
        the device.
        """
        known = self.of(sequence)
        known.num_tokens = len(sequence.tokens)
        if self._hidden is not None:
            self._hidden.passed(sequence, start, sequence.num_computed - start)
        else:
            self._mark(sequence, start, known.num_tokens)

    def _begin(self, sequence: RequestSequence, known: Known) -> None:
        """Begins a sequence in its slot, with the tokens of the pages that the draft has filled."""
        known.slot, known.num_tokens, known.num_pages = sequence.slot, 0, 0
        if self._uses_pages and self._hidden is None:
            limit = sequence.num_computed // self._page_size
            num_valid = self._marks.valid_prefix(sequence.pages[:limit])
            known.num_tokens = num_valid * self._page_size

    def _replace_pages(self, sequence: RequestSequence, known: Known) -> None:
        """Records the entries of the page table that have changed since the last sync."""
        changed = sequence.take_pages_changed(self._number)
        if changed >= known.num_pages:
            return
        known.num_pages = changed
        # A page that another sequence has filled with the same tokens holds draft KV only if it is
        # marked.
        end = min(known.num_tokens // self._page_size, len(sequence.pages))
        for i in range(changed, end):
            if not self._marks.is_valid(sequence.pages[i]):
                known.num_tokens = i * self._page_size
                return

    def _mark(self, sequence: RequestSequence, start: int, end: int) -> None:
        """Marks the pages that tokens [start, end) fill.

        The draft fills them before it reads any later message.
        """
        for i in range(start // self._page_size, end // self._page_size):
            self._marks.mark(sequence.pages[i])
