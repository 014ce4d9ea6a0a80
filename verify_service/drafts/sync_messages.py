"""Tracks what a draft knows of each sequence, and writes the messages that update it."""

from collections.abc import Iterable
from dataclasses import dataclass

from foredraft.api.draft.v1 import draft_pb2
from foredraft.rpc.sampling import fill_sampling
from verify_service.drafts.hidden_states import HiddenStates
from verify_service.drafts.page_marks import DraftMarks
from verify_service.drafts.run import Run
from verify_service.drafts.settings import DraftSettings
from verify_service.drafts.sync import PATIENCE, SequenceFacts
from verify_service.scheduler.request import Sequence as RequestSequence


@dataclass(slots=True)
class Synced:
    """State of a sequence as the draft knows it.

    Attributes:
        slot: Slot of the sequence; None before the first sync, and after the draft was told that
            the slot is free.
        num_tokens: Number of leading tokens that the draft has.
        num_pages: Number of leading entries of the page table that the draft has.
        run: Run of hidden states that the draft knows, where it reads any.
        on_device: Last message whose tokens were on the device; it is sent again where nothing has
            changed.
    """

    slot: int | None = None
    num_tokens: int = 0
    num_pages: int = 0
    run: Run | None = None
    on_device: draft_pb2.SequenceStep | None = None


class SyncMessages:
    """Writes the sync messages of one attach.

    Args:
        marks: Marks of the pages that hold complete draft KV.
        settings: Settings of the draft.
        hidden: Hidden states for a draft that reads them, else None.
        uses_pages: Whether the draft keeps KV on the verifier's pages.
    """

    def __init__(
        self,
        marks: DraftMarks,
        settings: DraftSettings,
        hidden: HiddenStates | None,
        uses_pages: bool,
    ) -> None:
        self._marks = marks
        self._page_size = marks.page_size
        self._scope, self._number = settings.scope, settings.number
        self._hidden = hidden
        self._uses_pages = uses_pages
        self._synced: dict[int, Synced] = {}

    def synced(self, sequence: RequestSequence) -> Synced:
        """Returns the state of a sequence as the draft knows it."""
        synced = self._synced.get(sequence.request_id)
        if synced is None:  # not by setdefault, since every step calls this several times
            synced = self._synced[sequence.request_id] = Synced()
        return synced

    def forget(self, sequence: RequestSequence) -> None:
        """Drops the state of a sequence that has ended."""
        self._synced.pop(sequence.request_id, None)

    def preempted(self, sequence: RequestSequence) -> None:
        """Records that a sequence has lost its pages."""
        self.synced(sequence).run = None

    def released(self, slots: Iterable[int]) -> None:
        """Records that the draft was told of released slots.

        A preempted sequence then begins again, even if it gets its old slot back.
        """
        gone = set(slots)
        for synced in self._synced.values():
            if synced.slot in gone:
                synced.slot = None

    def has_caught_up(self, sequence: RequestSequence) -> bool:
        """Returns whether the draft has all tokens of a sequence."""
        return self.synced(sequence).num_tokens == len(sequence.tokens)

    def lag(self, sequence: RequestSequence) -> int:
        """Returns the number of tokens that the draft must read before it can propose."""
        synced = self.synced(sequence)
        if self._hidden is not None:
            start = self._hidden.untold_from(sequence, synced.run)
            if start is not None:  # there may be a hole before it
                return sequence.num_computed - start
        is_known = synced.slot == sequence.slot
        return len(sequence.tokens) - (synced.num_tokens if is_known else 0)

    def facts(
        self, sequence: RequestSequence, is_requested: bool, is_prompt: bool = False
    ) -> SequenceFacts:
        """Returns the facts that decide whether a sequence is synced."""
        lag, synced = self.lag(sequence), self.synced(sequence)
        if self._hidden is None:
            is_known = synced.slot == sequence.slot
            is_close = is_known and len(sequence.tokens) - synced.num_tokens < PATIENCE
        else:
            run = self._hidden.run_of(sequence)
            is_known = run is not None and synced.run is run
            is_close = is_known and run is not None and run.end - synced.num_tokens < PATIENCE
        stands_alone = self.stands_alone(sequence)
        return SequenceFacts(lag, is_requested, is_prompt, is_close, stands_alone)

    def stands_alone(self, sequence: RequestSequence) -> bool:
        """Returns whether this sequence can be synced without syncing another one first.

        A new sequence may use pages whose hidden states another sequence must sync first.
        """
        if self._hidden is None:
            return True
        synced = self.synced(sequence)
        is_new = synced.run is None or synced.run is not self._hidden.run_of(sequence)
        return not is_new or (sequence.num_cached == 0 and sequence.num_preemptions == 0)

    def can_follow(self, sequence: RequestSequence) -> bool:
        """Returns whether the draft has the whole sequence, so that it can take the next tokens
        from the device.
        """
        synced = self.synced(sequence)
        if synced.slot != sequence.slot or synced.num_tokens != len(sequence.tokens):
            return False
        if self._hidden is not None:
            return synced.run is not None and synced.run is self._hidden.run_of(sequence)
        return sequence.pages_changed_for(self._number) >= synced.num_pages

    def on_device(
        self, sequence: RequestSequence, row: int, propose: draft_pb2.TreeLimits | None
    ) -> draft_pb2.SequenceStep:
        """Returns a message whose tokens are on the device; the caller must not change it.

        Args:
            sequence: The sequence.
            row: Row of the sequence in the running step.
            propose: Limits of the requested tree; None for no tree.
        """
        synced = self.synced(sequence)
        synced.num_pages = min(synced.num_pages, self._changed_from(sequence))
        has_pages = synced.num_pages < len(sequence.pages)
        message = None if has_pages else synced.on_device
        is_requested = propose is not None
        if (
            message is not None
            and message.device_row == row
            and message.HasField("propose") == is_requested
        ):
            return message
        message = draft_pb2.SequenceStep(slot=synced.slot, device_row=row, propose=propose)
        if has_pages:
            _add_pages(sequence, synced, message)
        synced.on_device = None if has_pages else message
        return message

    def followed(self, sequence: RequestSequence, start: int) -> None:
        """Records that the host knows the tokens from key `start` on, which the draft has taken on
        the device.
        """
        synced = self.synced(sequence)
        synced.num_tokens = len(sequence.tokens)
        if self._hidden is not None:
            self._hidden.passed(sequence, start, sequence.num_computed - start)
        else:
            self._mark(sequence, start, synced.num_tokens)

    def message(self, sequence: RequestSequence, budget: int) -> tuple[draft_pb2.SequenceStep, int]:
        """Returns a message with all that the draft lacks of a running sequence, and its number of
        tokens.

        Args:
            sequence: The sequence.
            budget: Maximum number of tokens, for a draft that reads no hidden states.
        """
        if self._hidden is not None:
            return self._with_hidden_states(self._hidden, sequence)
        synced = self.synced(sequence)
        assert sequence.slot is not None
        message = draft_pb2.SequenceStep(slot=sequence.slot)
        if synced.slot != sequence.slot:
            self._begin(sequence, synced, message)
        if not self._uses_pages:
            end = len(sequence.tokens)
        else:
            self._replace_pages(sequence, synced)
            # A prompt's tokens are sent once the target has computed them; the newest token already
            # has a page.
            end = len(sequence.tokens) if sequence.is_decoding else sequence.num_computed
            end = min(end, synced.num_tokens + max(budget, 0))
        message.position = synced.num_tokens
        if end <= synced.num_tokens:
            return message, 0
        start, synced.num_tokens = synced.num_tokens, end
        message.tokens.extend(sequence.tokens[start:end])
        if self._uses_pages:
            _add_pages(sequence, synced, message)
            self._mark(sequence, start, end)
        return message, end - start

    def _with_hidden_states(
        self, hidden: HiddenStates, sequence: RequestSequence
    ) -> tuple[draft_pb2.SequenceStep, int]:
        """Returns the result of `message` for a draft that reads hidden states.

        The tokens reach one further than the hidden states.
        """
        synced, run = self.synced(sequence), hidden.run_of(sequence)
        message = draft_pb2.SequenceStep(slot=sequence.slot or 0)
        if run is None:
            return message, 0
        if synced.run is not run or synced.slot != sequence.slot:
            self._begin(sequence, synced, message)
            synced.run = run
            # A hidden state belongs to the token after it: a draft that lacks the states from
            # `start` on has start + 1 tokens.
            synced.num_tokens = run.start + 1 if run.start else 0
            message.begin.valid_from = hidden.valid_from(sequence, run)
        elif run.resend_from is not None:
            synced.num_tokens = min(synced.num_tokens, run.resend_from + 1)
        synced.num_pages = min(synced.num_pages, self._changed_from(sequence))
        start, end = synced.num_tokens, run.end + 1
        if end == start:
            return message, 0
        synced.num_tokens, message.position = end, start
        message.tokens.extend(sequence.tokens[start:end])
        _add_pages(sequence, synced, message)
        return message, end - start

    def _begin(
        self, sequence: RequestSequence, synced: Synced, message: draft_pb2.SequenceStep
    ) -> None:
        synced.slot, synced.num_tokens, synced.num_pages = sequence.slot, 0, 0
        synced.on_device = None
        if self._uses_pages and self._hidden is None:
            limit = sequence.num_computed // self._page_size
            num_valid = self._marks.valid_prefix(sequence.pages[:limit])
            synced.num_tokens = num_valid * self._page_size
        message.begin.valid_from = 0
        message.begin.scope = self._scope_of(sequence)
        message.begin.traceparent = sequence.traceparent
        fill_sampling(message.begin.sampling, sequence.sampling)

    def _scope_of(self, sequence: RequestSequence) -> str:
        if self._scope == "request":
            return ""
        return "server" if self._scope == "server" else f"key:{sequence.key_label}"

    def _changed_from(self, sequence: RequestSequence) -> int:
        """Returns the first entry of the page table that has changed since the last call."""
        changed = sequence.pages_changed_for(self._number)
        sequence.pages_seen_by(self._number)
        return changed

    def _replace_pages(self, sequence: RequestSequence, synced: Synced) -> None:
        """Records the entries of the page table that have changed since the last sync."""
        changed = self._changed_from(sequence)
        if changed >= synced.num_pages:
            return
        synced.num_pages = changed
        # A page that another sequence has filled with the same tokens holds draft KV only if it is
        # marked.
        end = min(synced.num_tokens // self._page_size, len(sequence.pages))
        for i in range(changed, end):
            if not self._marks.is_valid(sequence.pages[i]):
                synced.num_tokens = i * self._page_size
                return

    def _mark(self, sequence: RequestSequence, start: int, end: int) -> None:
        """Marks the pages that tokens [start, end) fill.

        The draft fills them before it reads any later message.
        """
        for i in range(start // self._page_size, end // self._page_size):
            self._marks.mark(sequence.pages[i])


def _add_pages(sequence: RequestSequence, synced: Synced, message: draft_pb2.SequenceStep) -> None:
    if synced.num_pages < len(sequence.pages):
        message.first_page = synced.num_pages
        message.new_pages.extend(sequence.pages[synced.num_pages :])
    synced.num_pages = len(sequence.pages)


def split_message(message: draft_pb2.SequenceStep, num_rows: int) -> draft_pb2.SequenceStep:
    """Splits the part with the first `num_rows` hidden states (at least 1) off a message.

    `message` keeps the rest: later tokens, and the request for a tree.
    """
    num_tokens = num_rows if message.position else num_rows + 1
    part = draft_pb2.SequenceStep()
    part.CopyFrom(message)
    part.ClearField("propose")
    del part.tokens[num_tokens:]
    for name in ("begin", "new_pages", "first_page"):
        message.ClearField(name)
    del message.tokens[:num_tokens]
    message.position += num_tokens
    return part
