"""Between the engine and its draft: tells the draft what was committed, brings back trees, survives its death.

Holds per sequence what the current draft has been told. Nothing here can change a token: a lost draft means
empty trees.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from foredraft.api.draft.v1 import draft_pb2
from foredraft.errors import DraftError
from foredraft.kvcache.draft_marks import DraftMarks
from foredraft.runner.model_runner import ForwardOutput
from foredraft.speculation.draft_tree import EMPTY, DraftTree, sanitize
from foredraft.transport.base import ArenaError
from verify_service.draft_client import DraftClient
from verify_service.draft_policy import DraftHistory
from verify_service.hidden_states import CommittedRows, HiddenStates, Run
from verify_service.metrics import DRAFT_SECONDS, SpeculationMetrics
from verify_service.request import Sequence as RequestSequence

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Told:
    """What the draft of attach `epoch` knows of a sequence in `slot`.

    Attributes:
        num_tokens: Leading tokens that it has.
        num_pages: Leading entries of the page table that it has.
        run: The hidden states of which it was told, where it reads any.
        histories: What drafting brought so far, by the confidence of proposals.
    """

    epoch: int = 0
    slot: int | None = None
    num_tokens: int = 0
    num_pages: int = 0
    run: Run | None = None
    histories: dict[int, DraftHistory] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Drafted:
    """A proposal that was checked."""

    tree: DraftTree
    confidence: int


NOTHING = Drafted(EMPTY, 0)
PATIENCE = 32  # hidden states that are kept back while nothing is asked of a sequence's draft


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sequence that decodes in the coming step, and the nodes that its pages have room for."""

    sequence: RequestSequence
    max_nodes: int


class Drafting:
    """The engine's side of one draft.

    Args:
        client: The connection; it reconnects by itself.
        marks: Which pages hold complete draft KV, by epoch.
        page_size: Tokens per page.
        vocab_size: Of the target.
        tree_shape: (steps, topk) of the server.
        scope: "request", "key" or "server": whose text feeds whose drafts.
        refill_tokens: Tokens per step that a draft with KV may catch up on.
        hidden: Hidden states for a draft that reads them.
    """

    def __init__(
        self,
        client: DraftClient,
        marks: DraftMarks,
        page_size: int,
        vocab_size: int,
        tree_shape: tuple[int, int],
        scope: str,
        refill_tokens: int,
        metrics: SpeculationMetrics,
        hidden: HiddenStates,
    ) -> None:
        self._client = client
        self._marks = marks
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._tree_shape = tree_shape
        self._scope = scope
        self._refill_tokens = refill_tokens
        self._metrics = metrics
        self._hidden = hidden
        self._told: dict[int, Told] = {}
        self._released: list[int] = []
        self._epoch = 0
        self._step = 0
        self._num_unread = 0
        self._request = draft_pb2.StepRequest()
        self._asked: dict[int, Wanted] = {}
        self._trees: dict[int, Drafted] = {}
        self._warned = False

    @property
    def epoch(self) -> int:
        """Number of the attach that is live now; 0 for none."""
        return self._client.epoch

    @property
    def available(self) -> bool:
        """Whether a draft is attached now."""
        return self._client.epoch > 0

    def history(self, sequence: RequestSequence, confidence: int = 0) -> DraftHistory:
        """The record of what proposals of one confidence brought to a sequence."""
        return self._of(sequence).histories.setdefault(confidence, DraftHistory())

    @property
    def is_cheap(self) -> bool:
        """Whether asking costs next to nothing, so that what is worth verifying may be decided by the proposal."""
        info = self._client.info
        return info is not None and info.weight_bytes == 0

    @property
    def depth(self) -> int:
        """Levels of the deepest tree."""
        return self._tree_shape[0]

    def refresh(self) -> None:
        """Before each step: looks whether another draft has been attached meanwhile."""
        epoch = self._client.epoch
        if epoch != self._epoch:
            self._epoch, self._step, self._num_unread = epoch, 0, 0
            self._released.clear()
            self._hidden.attach(epoch)

    def release(self, slots: Iterable[int]) -> None:
        """Slots that sequences gave back; told with the next step."""
        self._released.extend(slots)

    def forget(self, sequence: RequestSequence) -> None:
        """The sequence has ended."""
        self._told.pop(sequence.request_id, None)
        self._hidden.drop(sequence)

    def preempted(self, sequence: RequestSequence) -> None:
        """The sequence has lost its pages."""
        self._hidden.drop(sequence)
        self._of(sequence).run = None

    @property
    def capture(self) -> tuple[int, ...] | None:
        """Layers whose entering residual stream the draft reads; empty for the state after the final norm, None when
        it reads nothing."""
        return self._hidden.layers

    def keep(self, output: ForwardOutput, committed: Sequence[CommittedRows]) -> None:
        """Takes the hidden states that a step committed."""
        self._hidden.keep(output, committed)

    def close(self) -> None:
        """Ends the connection."""
        self._client.close()

    def propose(
        self,
        wanted: Sequence[Wanted],
        extending: Sequence[RequestSequence],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> dict[int, Drafted]:
        """Runs one draft step.

        Args:
            wanted: Sequences that decode now. Those whose draft has not caught up are not asked for.
            extending: Other running sequences, with tokens that the draft may not have seen.
            meanwhile: Called once, while the draft works.

        Returns:
            Proposals by request id; a sequence without one has no entry.
        """
        if self._epoch == 0:
            self._released.clear()
            meanwhile()
            return {}
        try:
            self._ask(wanted, extending)
        except (DraftError, ArenaError) as error:
            return self._lost(error)
        finally:
            meanwhile()
        try:
            # Where nothing was asked for, nothing is in the answer; it is read before the next one that matters.
            while self._asked and self._num_unread:
                self._receive()
        except (DraftError, ArenaError) as error:
            return self._lost(error)
        return self._trees

    def _lost(self, error: DraftError | ArenaError) -> dict[int, Drafted]:
        logger.warning("drafting stopped: %s; decoding goes on without a draft", error)
        self._metrics.failures.inc()
        return {}

    def _ask(self, wanted: Sequence[Wanted], extending: Sequence[RequestSequence]) -> None:
        self._request = draft_pb2.StepRequest(released_slots=self._released)
        self._forget_slots()
        self._asked, self._trees = {}, {}
        self._tell(wanted, extending)
        if self._request.sequences or self._request.released_slots:
            self._send()

    def _tell(self, wanted: Sequence[Wanted], extending: Sequence[RequestSequence]) -> None:
        """Puts all news into the request; sends it where the hidden states of one step do not fit the arena."""
        reads_hidden = self._hidden.layers is not None
        # While drafting does not pay, a head costs less now and then than every step. But whoever joins may stand on
        # pages that are marked as told.
        known = all(self._hidden.run(want.sequence) is not None for want in wanted)
        nobody_joins = known and not extending
        budget = self._refill_tokens
        for want in wanted:
            if nobody_joins and want.max_nodes == 0 and self._may_wait(want.sequence):
                continue
            news, num_tokens = self._news(want.sequence, budget)
            budget -= num_tokens
            # A draft that reads hidden states proposes after the last one that it is given.
            may_ask = num_tokens > 0 or not reads_hidden
            if want.max_nodes > 0 and may_ask and self._has_caught_up(want.sequence):
                steps, topk = self._shape(want.sequence)
                # Deeper than the output may grow would be drafted in vain.
                steps = min(steps, want.max_nodes, want.sequence.num_output_left - 1)
                news.propose.num_steps = steps
                news.propose.topk = topk
                news.propose.num_draft_tokens = want.max_nodes + 1
                self._asked[news.slot] = want
            if num_tokens or news.HasField("propose") or news.HasField("begin"):
                self._add(want.sequence, news)
        for sequence in extending:
            news, num_tokens = self._news(sequence, budget)
            budget -= num_tokens
            if num_tokens or news.HasField("begin"):
                self._add(sequence, news)

    def _may_wait(self, sequence: RequestSequence) -> bool:
        told, run = self._of(sequence), self._hidden.run(sequence)
        return run is not None and told.run is run and run.end - told.num_tokens < PATIENCE

    def _forget_slots(self) -> None:
        """A preempted sequence begins anew even where it gets its old slot back: the draft was told of its release."""
        if self._released:
            released = set(self._released)
            for told in self._told.values():
                if told.slot in released:
                    told.slot = None
            self._released.clear()

    def _add(self, sequence: RequestSequence, news: draft_pb2.SequenceStep) -> None:
        """Puts the news of one sequence into the request, with its hidden states where the draft reads them."""
        writer, run = self._hidden.writer, self._hidden.run(sequence)
        if writer is None or run is None:
            self._request.sequences.append(news)
            return
        first = max(news.position - 1, 0)
        rows = run.rows(first)
        while run.end - first > writer.num_free:
            if self._num_unread:
                self._receive()
                continue
            if num_rows := writer.num_free:
                part = split_news(news, num_rows)
                part.hidden.CopyFrom(writer.write(rows[:num_rows]))
                rows, first = rows[num_rows:], first + num_rows
                self._request.sequences.append(part)
            self._send()
        news.hidden.CopyFrom(writer.write(rows))
        self._request.sequences.append(news)
        self._hidden.sent(run)

    def _send(self) -> None:
        self._step += 1
        self._request.step = self._step
        if self._hidden.writer is not None:
            self._hidden.writer.sent(self._step)
        self._client.send(self._request, self._epoch)
        self._num_unread += 1
        self._request = draft_pb2.StepRequest()

    def _receive(self) -> None:
        """Reads the oldest answer that is due."""
        response = self._client.receive()
        self._num_unread -= 1
        if self._hidden.writer is not None:
            self._hidden.writer.answered(response.step)
        if self._num_unread == 0 and self._asked:
            seconds = (response.extend_microseconds + response.draft_microseconds) * 1e-6
            DRAFT_SECONDS.observe(seconds)
        self._read(response)

    def _read(self, response: draft_pb2.StepResponse) -> None:
        for proposal in response.proposals:
            want = self._asked.pop(proposal.slot, None)
            if want is None:
                self._complain(1, f"a proposal for slot {proposal.slot}, which asked for none")
                continue
            tree, num_bad = sanitize(
                proposal.tokens, proposal.parents, self._vocab_size, want.max_nodes
            )
            if num_bad:
                self._complain(num_bad, f"{num_bad} unusable nodes for slot {proposal.slot}")
            if tree.tokens:
                self._trees[want.sequence.request_id] = Drafted(tree, proposal.confidence)

    def _complain(self, count: int, what: str) -> None:
        self._metrics.invalid_nodes.inc(count)
        if not self._warned:
            self._warned = True
            logger.warning("the draft sent %s; more are counted, not logged", what)

    def _shape(self, sequence: RequestSequence) -> tuple[int, int]:
        steps, topk = self._tree_shape
        asked = sequence.speculation
        return min(asked.num_steps or steps, steps), min(asked.topk or topk, topk)

    def _of(self, sequence: RequestSequence) -> Told:
        return self._told.setdefault(sequence.request_id, Told())

    def _has_caught_up(self, sequence: RequestSequence) -> bool:
        return self._of(sequence).num_tokens == len(sequence.tokens)

    @property
    def _uses_pages(self) -> bool:
        info = self._client.info
        return info is not None and info.uses_pages

    def _news(self, sequence: RequestSequence, budget: int) -> tuple[draft_pb2.SequenceStep, int]:
        """What the draft does not know yet of a running sequence, and how many tokens that is."""
        if self._hidden.layers is not None:
            return self._hidden_news(sequence)
        told = self._of(sequence)
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
            self._tell_pages(sequence, told, news)
            self._mark(sequence, start, end)
        return news, end - start

    def _hidden_news(self, sequence: RequestSequence) -> tuple[draft_pb2.SequenceStep, int]:
        """The same for a draft that reads hidden states: as far as they are there, and one token further."""
        told, run = self._of(sequence), self._hidden.run(sequence)
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
        told.num_pages = min(told.num_pages, sequence.pages_changed_from)
        sequence.pages_changed_from = len(sequence.pages)
        start, end = told.num_tokens, run.end + 1
        if end == start:
            return news, 0
        told.num_tokens, news.position = end, start
        news.tokens.extend(sequence.tokens[start:end])
        self._tell_pages(sequence, told, news)
        return news, end - start

    @staticmethod
    def _tell_pages(sequence: RequestSequence, told: Told, news: draft_pb2.SequenceStep) -> None:
        news.first_page = told.num_pages
        news.new_pages.extend(sequence.pages[told.num_pages :])
        told.num_pages = len(sequence.pages)

    def _begin(self, sequence: RequestSequence, told: Told, news: draft_pb2.SequenceStep) -> None:
        told.epoch, told.slot, told.num_tokens, told.num_pages = self._epoch, sequence.slot, 0, 0
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

    def _replace_pages(self, sequence: RequestSequence, told: Told) -> None:
        """Notices entries of the page table that changed since the draft was told."""
        changed = sequence.pages_changed_from
        sequence.pages_changed_from = len(sequence.pages)
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
