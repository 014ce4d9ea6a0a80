"""What a draft has been told of each sequence, and what it has to be told next."""

from collections.abc import Iterable
from dataclasses import dataclass

from foredraft.api.draft.v1 import draft_pb2
from verify_service.drafts.hidden_states import HiddenStates
from verify_service.drafts.page_marks import DraftMarks
from verify_service.drafts.run import Run
from verify_service.scheduler.request import Sequence as RequestSequence

PATIENCE = 32  # tokens that are kept back while nothing is asked of a sequence's draft


@dataclass(slots=True)
class Told:
    """What the draft of attach `epoch` knows of a sequence in `slot`.

    Attributes:
        num_tokens: Leading tokens that it has.
        num_pages: Leading entries of the page table that it has.
        run: The hidden states of which it was told, where it reads any.
        followed: What it was told last by place; it can be told so again where nothing has changed.
    """

    epoch: int = 0
    slot: int | None = None
    num_tokens: int = 0
    num_pages: int = 0
    run: Run | None = None
    followed: draft_pb2.SequenceStep | None = None


class DraftNews:
    """Puts into messages what the draft of the current attach does not know yet.

    Args:
        marks: Which pages hold complete draft KV, by epoch.
        page_size: Tokens per page.
        scope: "request", "key" or "server": whose text feeds whose drafts.
        hidden: Hidden states for a draft that reads them.
    """

    def __init__(self, marks: DraftMarks, page_size: int, scope: str, hidden: HiddenStates) -> None:
        self._marks = marks
        self._page_size = page_size
        self._scope = scope
        self._hidden = hidden
        self._told: dict[int, Told] = {}
        self._epoch = 0
        self._uses_pages = False

    def attach(self, epoch: int, uses_pages: bool) -> None:
        """Another draft is attached, which knows nothing."""
        self._epoch, self._uses_pages = epoch, uses_pages

    def of(self, sequence: RequestSequence) -> Told:
        """What is known of a sequence."""
        told = self._told.get(sequence.request_id)
        if told is None:  # asked for several times in every step
            told = self._told[sequence.request_id] = Told()
        return told

    def forget(self, sequence: RequestSequence) -> None:
        """The sequence has ended."""
        self._told.pop(sequence.request_id, None)

    def preempted(self, sequence: RequestSequence) -> None:
        """The sequence has lost its pages."""
        self.of(sequence).run = None

    def released(self, slots: Iterable[int]) -> None:
        """A preempted sequence begins anew even where it gets its old slot back: the draft was told of its release."""
        gone = set(slots)
        for told in self._told.values():
            if told.slot in gone:
                told.slot = None

    def has_caught_up(self, sequence: RequestSequence) -> bool:
        """Whether the draft has been told of all tokens."""
        return self.of(sequence).num_tokens == len(sequence.tokens)

    def behind(self, sequence: RequestSequence) -> int:
        """Tokens that the draft would have to read before it could propose."""
        told = self.of(sequence)
        is_known = told.epoch == self._epoch and told.slot == sequence.slot
        if self._hidden.layers is not None:
            start = self._hidden.untold_from(sequence, told.run)
            if start is not None:  # there may be a hole before it
                return sequence.num_computed - start
        return len(sequence.tokens) - (told.num_tokens if is_known else 0)

    def stands_alone(self, sequence: RequestSequence) -> bool:
        """Whether a draft that reads this sequence's news needs nobody else's before.

        A new sequence may stand on pages whose hidden states another one has not passed on yet.
        """
        told = self.of(sequence)
        is_new = told.run is None or told.run is not self._hidden.run(sequence)
        has_found = sequence.num_cached > 0 or sequence.num_preemptions > 0
        return self._hidden.layers is None or not is_new or not has_found

    def may_wait(self, sequence: RequestSequence) -> bool:
        """Whether news are few enough to be told later."""
        told, run = self.of(sequence), self._hidden.run(sequence)
        if self._hidden.layers is not None:
            return run is not None and told.run is run and run.end - told.num_tokens < PATIENCE
        is_known = told.epoch == self._epoch and told.slot == sequence.slot
        is_new = len(sequence.tokens) - told.num_tokens
        return is_known and is_new < PATIENCE

    def can_follow(self, sequence: RequestSequence) -> bool:
        """Whether the draft stands where the sequence stands, so that it can take the next tokens from the device."""
        told = self.of(sequence)
        if (
            told.epoch != self._epoch
            or told.slot != sequence.slot
            or told.num_tokens != len(sequence.tokens)
        ):
            return False
        if self._hidden.layers is not None:
            return told.run is not None and told.run is self._hidden.run(sequence)
        return sequence.pages_changed_for(self._hidden.reader) >= told.num_pages

    def on_device(
        self, sequence: RequestSequence, row: int, propose: draft_pb2.TreeLimits | None
    ) -> draft_pb2.SequenceStep:
        """News whose tokens the draft finds on the device; not to be changed. `propose` is the wish for a tree."""
        told = self.of(sequence)
        told.num_pages = min(told.num_pages, self._changed_from(sequence))
        has_pages = told.num_pages < len(sequence.pages)
        news = None if has_pages else told.followed
        has_wish = propose is not None
        if news is not None and news.device_row == row and news.HasField("propose") == has_wish:
            return news
        news = draft_pb2.SequenceStep(slot=told.slot, device_row=row, propose=propose)
        if has_pages:
            _tell_pages(sequence, told, news)
        told.followed = None if has_pages else news
        return news

    def followed(self, sequence: RequestSequence, start: int) -> None:
        """The tokens that the draft took from the device are known now, and committed from key `start` on."""
        told = self.of(sequence)
        if told.epoch != self._epoch:
            return
        told.num_tokens = len(sequence.tokens)
        if self._hidden.layers is not None:
            self._hidden.passed(sequence, start, sequence.num_computed - start)
        else:
            self._mark(sequence, start, told.num_tokens)

    def news(self, sequence: RequestSequence, budget: int) -> tuple[draft_pb2.SequenceStep, int]:
        """What the draft does not know yet of a running sequence, and how many tokens that is."""
        if self._hidden.layers is not None:
            return self._hidden_news(sequence)
        told = self.of(sequence)
        assert sequence.slot is not None
        news = draft_pb2.SequenceStep(slot=sequence.slot)
        if told.epoch != self._epoch or told.slot != sequence.slot:
            self._begin(sequence, told, news)
        if not self._uses_pages:
            end = len(sequence.tokens)
        else:
            self._replace_pages(sequence, told)
            # A prompt's tokens are told once the target has them; the newest token has a page already.
            end = len(sequence.tokens) if sequence.is_decoding else sequence.num_computed
            end = min(end, told.num_tokens + max(budget, 0))
        news.position = told.num_tokens
        if end <= told.num_tokens:
            return news, 0
        start, told.num_tokens = told.num_tokens, end
        news.tokens.extend(sequence.tokens[start:end])
        if self._uses_pages:
            _tell_pages(sequence, told, news)
            self._mark(sequence, start, end)
        return news, end - start

    def _hidden_news(self, sequence: RequestSequence) -> tuple[draft_pb2.SequenceStep, int]:
        """The same for a draft that reads hidden states: as far as they are there, and one token further."""
        told, run = self.of(sequence), self._hidden.run(sequence)
        news = draft_pb2.SequenceStep(slot=sequence.slot or 0)
        if run is None:
            return news, 0
        if told.run is not run or told.epoch != self._epoch or told.slot != sequence.slot:
            self._begin(sequence, told, news)
            told.run = run
            # A hidden state belongs to the token after it: whoever lacks those from `start` on has start + 1 tokens.
            told.num_tokens = run.start + 1 if run.start else 0
            news.begin.valid_from = self._hidden.valid_from(sequence, run)
        elif run.resend_from is not None:
            told.num_tokens = min(told.num_tokens, run.resend_from + 1)
        told.num_pages = min(told.num_pages, self._changed_from(sequence))
        start, end = told.num_tokens, run.end + 1
        if end == start:
            return news, 0
        told.num_tokens, news.position = end, start
        news.tokens.extend(sequence.tokens[start:end])
        _tell_pages(sequence, told, news)
        return news, end - start

    def _begin(self, sequence: RequestSequence, told: Told, news: draft_pb2.SequenceStep) -> None:
        told.epoch, told.slot, told.num_tokens, told.num_pages = self._epoch, sequence.slot, 0, 0
        told.followed = None
        if self._uses_pages and self._hidden.layers is None:
            limit = sequence.num_computed // self._page_size
            num_valid = self._marks.valid_prefix(sequence.pages[:limit], self._epoch)
            told.num_tokens = num_valid * self._page_size
        sampling = sequence.sampling
        news.begin.valid_from = 0
        news.begin.scope = self._scope_of(sequence)
        news.begin.traceparent = sequence.traceparent
        news.begin.sampling.temperature = sampling.temperature
        news.begin.sampling.top_k = sampling.top_k
        news.begin.sampling.top_p = sampling.top_p
        news.begin.sampling.min_p = sampling.min_p
        news.begin.sampling.seed = sampling.seed

    def _scope_of(self, sequence: RequestSequence) -> str:
        if self._scope == "request":
            return ""
        return "server" if self._scope == "server" else f"key:{sequence.key_label}"

    def _changed_from(self, sequence: RequestSequence) -> int:
        """First entry of the page table that changed since the last call."""
        changed = sequence.pages_changed_for(self._hidden.reader)
        sequence.pages_seen_by(self._hidden.reader)
        return changed

    def _replace_pages(self, sequence: RequestSequence, told: Told) -> None:
        """Notices entries of the page table that changed since the draft was told."""
        changed = self._changed_from(sequence)
        if changed >= told.num_pages:
            return
        told.num_pages = changed
        # A page that another sequence filled the same way holds draft KV only where its mark says so.
        end = min(told.num_tokens // self._page_size, len(sequence.pages))
        for i in range(changed, end):
            if not self._marks.is_valid(sequence.pages[i], self._epoch):
                told.num_tokens = i * self._page_size
                return

    def _mark(self, sequence: RequestSequence, start: int, end: int) -> None:
        """Marks the pages that tokens [start, end) fill; the stream's order makes it true in time."""
        for i in range(start // self._page_size, end // self._page_size):
            self._marks.mark(sequence.pages[i], self._epoch)


def _tell_pages(sequence: RequestSequence, told: Told, news: draft_pb2.SequenceStep) -> None:
    if told.num_pages < len(sequence.pages):
        news.first_page = told.num_pages
        news.new_pages.extend(sequence.pages[told.num_pages :])
    told.num_pages = len(sequence.pages)


def split_news(news: draft_pb2.SequenceStep, num_rows: int) -> draft_pb2.SequenceStep:
    """Takes from the news of a sequence the part whose hidden states are the first `num_rows` (at least 1).

    `news` keeps the rest: later tokens, and the wish for a tree.
    """
    num_tokens = num_rows if news.position else num_rows + 1
    part = draft_pb2.SequenceStep()
    part.CopyFrom(news)
    part.ClearField("propose")
    del part.tokens[num_tokens:]
    for name in ("begin", "new_pages", "first_page"):
        news.ClearField(name)
    del news.tokens[:num_tokens]
    news.position += num_tokens
    return part
