"""Between the engine and its draft: tells the draft what was committed, brings back trees, survives its death.

A step is told by values, and answered by trees; or, on one GPU, the draft is told where on the device it finds what the
target's step under way will commit, and puts its trees there. Nothing here can change a token: a lost draft means empty trees.
"""

import logging
from collections.abc import Callable, Iterable, Sequence

import torch

from foredraft.errors import DraftError
from foredraft.runner.model_runner import ForwardOutput
from foredraft.transport.device_exchange import DeviceExchange
from foredraft.transport.rows import ArenaError
from foredraft.trees.draft_tree import NO_PARENT
from verify_service.drafts.ask_ahead import AskAhead
from verify_service.drafts.client import DraftClient
from verify_service.drafts.hidden_states import CommittedRows, Gathered, HiddenStates
from verify_service.drafts.news import DraftNews
from verify_service.drafts.page_marks import DraftMarks
from verify_service.drafts.proposals import Drafted, Member, Tried, Wanted
from verify_service.drafts.telling import Telling
from verify_service.drafts.wire import DraftWire, wish
from verify_service.executor.hand_over import hand_over
from verify_service.executor.target_step import DeviceOutcome
from verify_service.metrics import DRAFTS_AHEAD, SpeculationMetrics
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.step_plan import PrefillChunk

logger = logging.getLogger(__name__)

# Bytes of hidden states that a draft is not told of while it is not asked; of a GPU's memory, a share.
MOST_KEPT, KEPT_SHARE = 128 << 20, 0.01


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

    Attributes:
        is_resting: Drafting does not pay at present, so that the draft need be told nothing before it is asked.
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
        self._page_size = page_size
        self._tree_shape = tree_shape
        self._refill_tokens = refill_tokens
        self._metrics = metrics
        self._hidden = hidden
        self._news = DraftNews(marks, page_size, scope, hidden)
        self._released: set[int] = set()
        self._exchange: DeviceExchange | None = None
        self._ahead = AskAhead()
        self._wire = DraftWire(client, vocab_size, metrics, hidden, self._keep_tree)
        self._telling = Telling(
            self._news, self._wire, hidden, self._ahead, tree_shape, refill_tokens
        )
        self.is_resting = self._is_deaf = False

    @property
    def is_deaf(self) -> bool:
        """Whether nothing is kept for a draft that rests: once it is listened again, it sees sequences from there on."""
        return self._is_deaf

    @is_deaf.setter
    def is_deaf(self, is_deaf: bool) -> None:
        if is_deaf and not self._is_deaf:
            self._hidden.drop_all()
        self._is_deaf = is_deaf

    @property
    def epoch(self) -> int:
        """Number of the attach that is live now; 0 for none."""
        return self._client.epoch

    def epoch_of(self, name: str) -> int:
        """The same, as one of several; see `Drafts`."""
        return self._client.epoch

    @property
    def available(self) -> bool:
        """Whether a draft is attached now."""
        return self._client.epoch > 0

    def behind(self, sequence: RequestSequence) -> int:
        """Tokens that the draft would have to read before it could propose."""
        return self._news.behind(sequence)

    @property
    def is_cheap(self) -> bool:
        """Whether asking costs next to nothing, so that what is worth verifying may be decided by the proposal."""
        info = self._client.info
        return info is not None and info.weight_bytes == 0

    @property
    def usual_seconds(self) -> float:
        """What an answer takes the draft, as far as is known."""
        return self._wire.usual_seconds

    @property
    def depth(self) -> int:
        """Levels of the deepest tree."""
        return self._tree_shape[0]

    def refresh(self) -> None:
        """Before each step: looks whether another draft has been attached meanwhile."""
        epoch = self._client.epoch
        if epoch != self._wire.epoch:
            self._wire.attach(epoch)
            self._released.clear()
            self._ahead.clear()
            exchange = self._exchange = self._hidden.attach(epoch)
            self._telling.attach(self.is_cheap, exchange is not None)
            # To read more would take a GPU as long as a trial may cost; the newest will do.
            self._hidden.most_kept = float("inf") if exchange is None else MOST_KEPT
            if exchange is not None and exchange.trees.is_cuda:
                memory = torch.cuda.get_device_properties(exchange.trees.device).total_memory
                self._hidden.most_kept = max(MOST_KEPT, int(KEPT_SHARE * memory))
            info = self._client.info
            self._news.attach(epoch, info is not None and info.uses_pages)

    def release(self, slots: Iterable[int]) -> None:
        """Slots that sequences gave back; told with the next step."""
        self._released.update(slots)

    def forget(self, sequence: RequestSequence) -> None:
        """The sequence has ended."""
        self._news.forget(sequence)
        self._ahead.forget(sequence.request_id)
        self._hidden.drop(sequence)

    def preempted(self, sequence: RequestSequence) -> None:
        """The sequence has lost its pages."""
        self._hidden.drop(sequence)
        self._news.preempted(sequence)

    @property
    def capture(self) -> tuple[int, ...] | None:
        """Layers whose entering residual stream the draft reads; empty for the state after the final norm, None for none."""
        return self._hidden.layers

    def usable_prefix(self, sequence: RequestSequence, pages: list[int]) -> int:
        """See `HiddenStates.usable_prefix`; nothing is computed again while drafting rests, and what was would not be told."""
        if self.is_resting:
            return len(pages) * self._page_size
        return self._hidden.usable_prefix(sequence, pages)

    def keep(
        self,
        output: ForwardOutput,
        committed: Sequence[CommittedRows],
        gathered: Gathered | None = None,
    ) -> None:
        """Takes the hidden states that a step committed; see `HiddenStates.keep`. None where others' were gathered."""
        rows = None if gathered is None else gathered.get(self._hidden.reader)
        if not self.is_deaf and (gathered is None or rows is not None):
            self._hidden.keep(output, committed, rows)

    def keep_step(
        self,
        sequences: list[RequestSequence],
        starts: list[int],
        gathered: Gathered,
        chunks: Sequence[PrefillChunk] = (),
    ) -> None:
        """Takes those of a step with one row for each sequence, and prompts behind them; see `HiddenStates.keep_step`."""
        rows = gathered.get(self._hidden.reader)
        if rows is not None and not self.is_deaf:
            self._hidden.keep_step(sequences, starts, rows, chunks)

    @property
    def keeps_much(self) -> bool:
        """Whether the draft has to be told now, since what it has to be told takes so much memory."""
        return self._exchange is None and self._hidden.kept_bytes > MOST_KEPT

    def gather(self, output: ForwardOutput, count: int) -> Gathered:
        """The hidden states of the first rows of a step under way, where anything is kept."""
        if self.is_deaf:
            return {}
        return {self._hidden.reader: self._hidden.gather(output, count)}

    def gather_beside(self, output: ForwardOutput, count: int) -> None:
        """Nothing: no other draft has use for what this one follows; see `Drafts`."""

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
        try:
            self.ask(wanted, extending)
        finally:
            meanwhile()
        return self.collect()

    def ask(self, wanted: Sequence[Wanted], extending: Sequence[RequestSequence]) -> None:
        """The first half of `propose`: sends.

        Where the step needs what is asked for, it may wait for room in the arena. For the sake of a trial it does not wait, and
        asks for nothing while the one before is under way.
        """
        proposals = self._wire.proposals
        proposals.begin()
        if self._wire.epoch == 0:
            self._released.clear()
            return
        if self._telling.is_silent(wanted, self.is_resting, self.keeps_much):
            return  # not even of slots that were given back
        try:
            asking = [want for want in wanted if want.max_nodes]
            if asking and all(want.is_trial for want in asking):
                if not self._wire.try_drain():
                    wanted = [Wanted(want.sequence, 0) for want in wanted]
            elif asking and self.is_cheap:
                self._wire.drain()  # what was asked for ahead
            trees = self._ahead.take(wanted) if self.is_cheap else None
            self._begin_request(is_awaited=trees is None)
            self._telling.tell(wanted, extending, self.is_resting, self.keeps_much)
            if self._wire.has_news:
                self._wire.send()
            if trees is not None:
                proposals.trees = trees
                DRAFTS_AHEAD.inc()
        except (DraftError, ArenaError) as error:
            self._lost(error)

    def collect(self) -> dict[int, Drafted]:
        """The second half: waits for proposals that will be verified."""
        try:
            return self._wire.collect()
        except (DraftError, ArenaError) as error:
            self._lost(error)
            return {}

    def has_tried(self) -> bool:
        """Whether all has come that was asked for to find out, or never will. Waits for nothing."""
        try:
            return self._wire.try_drain()
        except (DraftError, ArenaError) as error:
            self._lost(error)
            return True

    def take_tried(self) -> list[Tried]:
        """What has come of trials since the last call."""
        self.has_tried()
        return self._wire.proposals.take_tried()

    @property
    def is_stale(self) -> bool:
        """Whether `refresh` has something to find out."""
        return self._client.epoch != self._wire.epoch

    def can_follow(self, sequences: Iterable[RequestSequence]) -> bool:
        """Whether the draft can take from the device what the step under way commits to these."""
        return self._exchange is not None and all(map(self._news.can_follow, sequences))

    def follow(self, members: Sequence[Member], outcome: DeviceOutcome) -> int | None:
        """Lets the draft go on behind the target's step under way.

        Args:
            members: Of the next step.
            outcome: Of the step under way.

        Returns:
            What `fetch` and `followed` ask for; None where the draft is gone.
        """
        exchange = self._exchange
        assert exchange is not None
        self._begin_request()
        whole = wish(*self._tree_shape, exchange.trees.shape[2])
        self._wire.add(
            self._news.on_device(one.sequence, one.row, whole if one.num_nodes else None)
            for one in members
        )
        try:
            # First of all: the message travels while the device is told what to do.
            self._wire.send(is_on_device=True)
        except (DraftError, ArenaError) as error:
            self._lost(error)
            return None
        hidden = None if exchange.rows is None else self._hidden.source(outcome.output)
        hand_over(outcome.accepted, outcome.index, hidden, exchange.accepted, exchange.rows)
        exchange.publish(self._wire.step)
        return self._wire.step

    def fetch(self, step: int, trees: torch.Tensor) -> None:
        """Lets the current stream wait for the trees of a step that was followed, and copies them, [n, 2, N].

        Those of other drafts may be larger; what is left over is no node.
        """
        exchange = self._exchange
        assert exchange is not None
        exchange.wait_trees(step)
        own = exchange.trees[: len(trees)]
        num_nodes = own.shape[2]
        if num_nodes < trees.shape[2]:
            trees[:, 1, num_nodes:].fill_(NO_PARENT)
            trees = trees[:, :, :num_nodes]
        trees.copy_(own)

    def followed(self, sequence: RequestSequence, start: int) -> None:
        """What the draft took from the device is known now: tokens committed from key `start` on."""
        self._news.followed(sequence, start)

    def is_late(self, waiting: float) -> bool:
        """Whether a target that may have waited so many seconds for trees should wait no longer."""
        return self.is_stale or waiting > self._client.step_timeout

    def abandon(self, step: int) -> None:
        """Ends the target's wait for trees; the draft may still write, so it is dropped."""
        if self._exchange is not None:
            self._exchange.release(step)
        if not self.is_stale:
            self._lost(self._client.drop("its trees did not come in time"))

    def _lost(self, error: DraftError | ArenaError) -> None:
        name = self._metrics.algorithm
        logger.warning("drafting by %s stopped: %s; decoding goes on without it", name, error)
        self._metrics.failures.inc()
        self._wire.proposals.reset()

    def _begin_request(self, is_awaited: bool = True) -> None:
        self._wire.begin(self._released, is_awaited)
        if self._released:
            self._news.released(self._released)
            self._released.clear()

    def _keep_tree(self, sequence: RequestSequence, position: int, drafted: Drafted) -> None:
        if self.is_cheap:
            self._ahead.keep(sequence, position, drafted)
