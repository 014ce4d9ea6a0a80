"""The engine's side of a draft in another process: each step's exchange with it.

A message has the committed tokens, and the answer has trees. On one GPU a message may instead name
the rows on the device that take the running step's tokens, where the draft writes its trees too.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from foredraft.errors import DraftError
from foredraft.transport.device_exchange import DeviceExchange
from foredraft.transport.rows import ArenaError
from verify_service.connection.arena import Arena, Exchange
from verify_service.connection.client import DraftClient
from verify_service.drafts.capabilities import DraftCapabilities
from verify_service.drafts.draft_ahead import DraftAhead
from verify_service.drafts.hidden_states import HiddenStates
from verify_service.drafts.known import KnownSequences
from verify_service.drafts.page_marks import DraftMarks
from verify_service.drafts.proposals import DeviceRequest, Drafted, DraftRequest, Trial
from verify_service.drafts.remote_trees import RemoteTrees
from verify_service.drafts.settings import DraftSettings
from verify_service.drafts.step_sync import StepSync
from verify_service.drafts.sync import StepFacts
from verify_service.drafts.sync_messages import SyncMessages
from verify_service.drafts.wire import DraftWire, tree_limits
from verify_service.executor.base import DeviceOutcome
from verify_service.executor.kernels.hand_over import hand_over
from verify_service.metrics import DRAFTS_AHEAD, SpeculationMetrics
from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.request import Sequence as RequestSequence

# Maximum bytes of hidden states kept for a draft that is not asked, and share of a GPU's memory.
MOST_KEPT, KEPT_SHARE = 128 << 20, 0.01

logger = logging.getLogger(__name__)


class RemoteDraft:
    """A `DraftProxy` over a connection, which reconnects by itself.

    What it knows of sequences belongs to one attach: `refresh` begins anew for another.

    Args:
        name: Algorithm of the draft where there are several drafts, else empty.
        client: Connection to the draft.
        arena: Memory for hidden states.
        pool: The verifier's pages.
        settings: Settings of the draft.
        metrics: Metrics of the draft.

    Attributes:
        name: The argument of this name.
        depth: Number of levels of the deepest tree.
        capabilities: Capabilities of the draft of the current attach.
        lag: `KnownSequences.lag` itself, since every step calls it for each sequence.
    """

    def __init__(
        self,
        name: str,
        client: DraftClient,
        arena: Arena,
        pool: PagePool,
        settings: DraftSettings,
        metrics: SpeculationMetrics,
    ) -> None:
        self.name = name
        self.depth = settings.tree_shape[0]
        self._client, self._arena, self._pool = client, arena, pool
        self._settings, self._metrics = settings, metrics
        self._is_suspended, self._keeps_states = False, True
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        """Begins an attach: the draft knows nothing yet.

        Args:
            epoch: Number of the attach; 0 while there is none.
        """
        client, settings = self._client, self._settings
        info = client.info if epoch else None
        exchange = self._arena.exchange(epoch) if epoch else None
        marks = DraftMarks(self._pool)
        self._epoch, self._has_failed = epoch, False
        self.capabilities = DraftCapabilities() if info is None else DraftCapabilities.of(info)
        self._hidden = hidden = _hidden_states(exchange, marks, settings)
        self._device = exchange.device if exchange is not None else None
        uses_pages = self.capabilities.uses_pages
        self._known = known = KnownSequences(marks, settings.number, hidden, uses_pages)
        self.lag = known.lag
        self._messages = SyncMessages(known, settings.scope)
        self._ahead = DraftAhead()  # trees that a draft without cost makes while the target runs
        self._released: set[int] = set()  # slots that the draft does not know to be free yet
        on_tree = self._ahead.keep if self.capabilities.is_free else None
        wire = DraftWire(client, epoch, settings.vocab_size, self._metrics, hidden, on_tree)
        self._wire = wire
        self._sync = StepSync(known, self._messages, wire, hidden, self._ahead, settings)

    # `DraftProxy` describes the methods.

    @property
    def epoch(self) -> int:
        """See `DraftProxy`."""
        return self._client.epoch

    @property
    def is_stale(self) -> bool:
        """See `DraftProxy`."""
        return self._client.epoch != self._epoch

    @property
    def usual_seconds(self) -> float:
        """See `DraftProxy`."""
        return self._wire.usual_seconds

    def refresh(self) -> None:
        """See `DraftProxy`."""
        epoch = self._client.epoch
        if epoch != self._epoch:
            # No step waited for an answer, which never comes.
            if self._wire.requests.are_trying or 0 < self._epoch == self._client.late_epoch:
                self._failed()
            self._begin(epoch)

    def suspend(self, is_suspended: bool, keeps_states: bool = True) -> None:
        """See `DraftProxy`."""
        if self._keeps_states and not keeps_states and self._hidden is not None:
            self._hidden.drop_all()
        self._is_suspended, self._keeps_states = is_suspended, keeps_states

    def close(self) -> None:
        """See `DraftProxy`."""
        self._client.close()

    def _lost(self, error: DraftError | ArenaError) -> None:
        """Records that the draft is lost and will not answer."""
        if not self._has_failed:
            name = self._metrics.algorithm
            logger.warning("drafting by %s stopped: %s; decoding goes on without it", name, error)
        self._failed()
        self._wire.requests.reset()

    def _failed(self) -> None:
        """Counts a failed step: once for each attach, however many calls find that it is lost."""
        self._metrics.failures.inc(not self._has_failed)
        self._has_failed = True

    # Sequences.

    def release(self, slots: Iterable[int]) -> None:
        """See `DraftProxy`."""
        self._released.update(slots)

    def forget(self, sequence: RequestSequence) -> None:
        """See `DraftProxy`."""
        self._known.forget(sequence)
        self._ahead.forget(sequence.request_id)
        if self._hidden is not None:
            self._hidden.drop(sequence)

    def preempted(self, sequence: RequestSequence) -> None:
        """See `DraftProxy`."""
        if self._hidden is not None:
            self._hidden.drop(sequence)

    def usable_prefix(self, sequence: RequestSequence, pages: list[int]) -> int:
        """See `DraftProxy`. While drafting is suspended, no part of a prefix is computed again."""
        if self._is_suspended or self._hidden is None:
            return len(pages) * self._pool.page_size
        return self._hidden.usable_prefix(sequence, pages)

    # Hidden states.

    @property
    def states(self) -> HiddenStates | None:
        """See `DraftProxy`."""
        return self._hidden if self._keeps_states else None

    @property
    def must_sync(self) -> bool:
        """See `DraftProxy`."""
        if self._hidden is None or self._device is not None:
            return False
        return self._hidden.kept_bytes > MOST_KEPT

    # Steps that the host begins.

    def ask(self, requests: Sequence[DraftRequest], extending: Sequence[RequestSequence]) -> None:
        """See `DraftProxy`.

        For requests that the step verifies, it may wait for room in the arena. For trials it does
        not wait, and requests none while an earlier trial is unanswered.
        """
        self._wire.requests.begin_round()
        if self._epoch == 0:
            self._released.clear()
            return
        try:
            self._ask(requests, extending)
        except (DraftError, ArenaError) as error:
            self._lost(error)

    def _ask(self, requests: Sequence[DraftRequest], extending: Sequence[RequestSequence]) -> None:
        wire, is_free = self._wire, self.capabilities.is_free
        wanted = [one for one in requests if one.max_nodes]
        step = StepFacts(
            is_suspended=self._is_suspended,
            must_sync=self.must_sync,
            is_free=is_free,
            follows=self._device is not None,
            has_prompts=bool(extending),
            has_requests=bool(wanted),
        )
        if step.is_silent:
            return  # released slots are not sent either
        if wanted and all(one.is_trial for one in wanted):
            if not wire.try_drain():
                requests = [DraftRequest(one.sequence, 0) for one in requests]
                step = step._replace(has_requests=False)
        elif wanted and is_free:
            wire.drain()  # answers to requests made ahead
        trees = self._ahead.take(requests) if is_free else None
        self._begin_message(is_awaited=trees is None)
        self._sync.fill(step, requests, extending)
        if wire.has_content:
            wire.send()
        if trees is not None:
            wire.requests.use(trees)
            DRAFTS_AHEAD.inc()

    def collect(self) -> Mapping[int, Drafted]:
        """See `DraftProxy`."""
        try:
            return self._wire.collect()
        except (DraftError, ArenaError) as error:
            self._lost(error)
            return {}

    def take_trials(self) -> list[Trial] | None:
        """See `DraftProxy`."""
        try:
            if not self._wire.try_drain():
                return None
        except (DraftError, ArenaError) as error:
            self._lost(error)
        return self._wire.requests.take_trials()

    # Steps that follow one another on the device.

    def can_follow(self, sequences: Iterable[RequestSequence]) -> bool:
        """See `DraftProxy`."""
        return self._device is not None and all(map(self._known.can_follow, sequences))

    def follow(
        self, requests: Sequence[DeviceRequest], outcome: DeviceOutcome
    ) -> RemoteTrees | None:
        """See `DraftProxy`."""
        try:
            return self._follow(requests, outcome)
        except (DraftError, ArenaError) as error:
            self._lost(error)
            return None

    def _follow(self, requests: Sequence[DeviceRequest], outcome: DeviceOutcome) -> RemoteTrees:
        exchange, wire, messages = self._device, self._wire, self._messages
        assert exchange is not None
        self._begin_message()
        whole = tree_limits(*self._settings.tree_shape, exchange.trees.shape[2])
        wire.add(
            [
                messages.on_device(one.sequence, one.row, whole if one.num_nodes else None)
                for one in requests
            ]
        )
        wire.send(is_on_device=True)  # first, so that it travels while work is put on the device
        rows, index = None, outcome.index
        if exchange.rows is not None:
            assert self._hidden is not None
            rows, index = self._hidden.features.handed(outcome.output, outcome.index)
        hand_over(outcome.accepted, index, rows, exchange.accepted, exchange.rows)
        exchange.publish(wire.step)
        return RemoteTrees(self._client, self._epoch, self._known, exchange, wire.step, self._lost)

    def _begin_message(self, is_awaited: bool = True) -> None:
        """Begins an empty message, which releases slots.

        Args:
            is_awaited: Whether the step waits for its trees.
        """
        self._wire.begin(self._released, is_awaited)
        if self._released:
            self._known.released(self._released)
            self._released.clear()


def _hidden_states(
    exchange: Exchange | None, marks: DraftMarks, settings: DraftSettings
) -> HiddenStates | None:
    """Creates the hidden states of a draft that reads them; None for other drafts."""
    if exchange is None or exchange.layers is None:
        return None
    return HiddenStates(exchange, marks, settings, _most_kept(exchange.device))


def _most_kept(device: DeviceExchange | None) -> float:
    """Returns the maximum bytes of hidden states to keep.

    A draft on the GPU would take too long to read more for a trial.
    """
    if device is None:
        return math.inf
    if not device.trees.is_cuda:
        return MOST_KEPT
    memory = torch.cuda.get_device_properties(device.trees.device).total_memory
    return max(MOST_KEPT, int(KEPT_SHARE * memory))
