"""The engine's side of a draft in another process: syncs it, receives trees, survives its death.

A message has the committed tokens, and the answer has trees. On one GPU a message may instead name
the rows on the device that take the running step's tokens, where the draft writes its trees too.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from foredraft.errors import DraftError
from foredraft.transport.device_exchange import DeviceExchange
from foredraft.transport.rows import ArenaError
from foredraft.trees.draft_tree import NO_PARENT
from verify_service.drafts.arena import Arena
from verify_service.drafts.capabilities import DraftCapabilities
from verify_service.drafts.client import DraftClient
from verify_service.drafts.hidden_states import HiddenStates
from verify_service.drafts.proposals import (
    DeviceRequest,
    DeviceTrees,
    Drafted,
    DraftRequest,
    Trial,
)
from verify_service.drafts.session import DraftSettings, Session
from verify_service.drafts.wire import tree_limits
from verify_service.executor.base import DeviceOutcome
from verify_service.executor.kernels.hand_over import hand_over
from verify_service.metrics import DRAFTS_AHEAD, SpeculationMetrics
from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.request import Sequence as RequestSequence

logger = logging.getLogger(__name__)


class RemoteDraft:
    """A `DraftProxy` over a connection.

    Args:
        name: Algorithm of the draft where there are several drafts, else empty.
        client: The connection; it reconnects by itself.
        arena: Memory for hidden states.
        pool: The verifier's pages.
        settings: Settings of the draft.
        metrics: Metrics of the draft.
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
        self._client = client
        self._page_size = pool.page_size
        self._settings = settings
        self._metrics = metrics
        self._is_suspended, self._keeps_states = False, True
        self._open = functools.partial(
            Session, client=client, arena=arena, pool=pool, settings=settings, metrics=metrics
        )
        self._session = self._open(0)

    # `DraftProxy` describes the methods.

    @property
    def capabilities(self) -> DraftCapabilities:
        """See `DraftProxy`."""
        return self._session.capabilities

    @property
    def epoch(self) -> int:
        """See `DraftProxy`."""
        return self._client.epoch

    @property
    def is_stale(self) -> bool:
        """See `DraftProxy`."""
        return self._client.epoch != self._session.epoch

    @property
    def depth(self) -> int:
        """See `DraftProxy`."""
        return self._settings.tree_shape[0]

    @property
    def usual_seconds(self) -> float:
        """See `DraftProxy`."""
        return self._session.wire.usual_seconds

    def refresh(self) -> None:
        """See `DraftProxy`."""
        epoch = self._client.epoch
        if epoch != self._session.epoch:
            self._session = self._open(epoch)

    def suspend(self, is_suspended: bool, keeps_states: bool = True) -> None:
        """See `DraftProxy`."""
        hidden = self._session.hidden
        if self._keeps_states and not keeps_states and hidden is not None:
            hidden.drop_all()
        self._is_suspended, self._keeps_states = is_suspended, keeps_states

    def close(self) -> None:
        """See `DraftProxy`."""
        self._client.close()

    # Sequences.

    def lag(self, sequence: RequestSequence) -> int:
        """See `DraftProxy`."""
        return self._session.messages.lag(sequence)

    def release(self, slots: Iterable[int]) -> None:
        """See `DraftProxy`."""
        self._session.released.update(slots)

    def forget(self, sequence: RequestSequence) -> None:
        """See `DraftProxy`."""
        session = self._session
        session.messages.forget(sequence)
        session.ahead.forget(sequence.request_id)
        if session.hidden is not None:
            session.hidden.drop(sequence)

    def preempted(self, sequence: RequestSequence) -> None:
        """See `DraftProxy`."""
        if self._session.hidden is not None:
            self._session.hidden.drop(sequence)
        self._session.messages.preempted(sequence)

    def usable_prefix(self, sequence: RequestSequence, pages: list[int]) -> int:
        """See `DraftProxy`. While drafting is suspended, no part of a prefix is computed again."""
        hidden = self._session.hidden
        if self._is_suspended or hidden is None:
            return len(pages) * self._page_size
        return hidden.usable_prefix(sequence, pages)

    # Hidden states.

    @property
    def states(self) -> HiddenStates | None:
        """See `DraftProxy`."""
        return self._session.hidden if self._keeps_states else None

    @property
    def must_sync(self) -> bool:
        """See `DraftProxy`."""
        return self._session.must_sync

    # Steps that the host begins.

    def ask(self, requests: Sequence[DraftRequest], extending: Sequence[RequestSequence]) -> None:
        """See `DraftProxy`.

        For requests that the step verifies, it may wait for room in the arena. For trials it does
        not wait, and requests none while an earlier trial is unanswered.
        """
        session, is_free = self._session, self.capabilities.is_free
        wire = session.wire
        wire.requests.begin()
        if session.epoch == 0:
            session.released.clear()
            return
        if session.facts(requests, extending, self._is_suspended).is_silent:
            return  # released slots are not sent either
        try:
            wanted = [one for one in requests if one.max_nodes]
            if wanted and all(one.is_trial for one in wanted):
                if not wire.try_drain():
                    requests = [DraftRequest(one.sequence, 0) for one in requests]
            elif wanted and is_free:
                wire.drain()  # answers to requests made ahead
            trees = session.ahead.take(requests) if is_free else None
            session.begin_request(is_awaited=trees is None)
            step = session.facts(requests, extending, self._is_suspended)
            session.sync(step, requests, extending)
            if wire.has_content:
                wire.send()
            if trees is not None:
                wire.requests.trees = trees
                DRAFTS_AHEAD.inc()
        except (DraftError, ArenaError) as error:
            self._lost(error)

    def collect(self) -> Mapping[int, Drafted]:
        """See `DraftProxy`."""
        try:
            return self._session.wire.collect()
        except (DraftError, ArenaError) as error:
            self._lost(error)
            return {}

    def has_tried(self) -> bool:
        """See `DraftProxy`."""
        try:
            return self._session.wire.try_drain()
        except (DraftError, ArenaError) as error:
            self._lost(error)
            return True

    def take_trials(self) -> list[Trial]:
        """See `DraftProxy`."""
        self.has_tried()
        return self._session.wire.requests.take_trials()

    # Steps that follow one another on the device.

    def can_follow(self, sequences: Iterable[RequestSequence]) -> bool:
        """See `DraftProxy`."""
        session = self._session
        return session.device is not None and all(map(session.messages.can_follow, sequences))

    def follow(
        self, requests: Sequence[DeviceRequest], outcome: DeviceOutcome
    ) -> DeviceTrees | None:
        """See `DraftProxy`."""
        session = self._session
        exchange, wire, messages = session.device, session.wire, session.messages
        assert exchange is not None
        session.begin_request()
        whole = tree_limits(*self._settings.tree_shape, exchange.trees.shape[2])
        wire.add(
            messages.on_device(one.sequence, one.row, whole if one.num_nodes else None)
            for one in requests
        )
        try:
            # Sent first, so that it travels while work is put on the device.
            wire.send(is_on_device=True)
        except (DraftError, ArenaError) as error:
            self._lost(error)
            return None
        rows, index = None, outcome.index
        if exchange.rows is not None:
            assert session.hidden is not None
            rows, index = session.hidden.handed(outcome.output, outcome.index)
        hand_over(outcome.accepted, index, rows, exchange.accepted, exchange.rows)
        exchange.publish(wire.step)
        return RemoteTrees(self._client, session, exchange, wire.step, self._lost)

    def _lost(self, error: DraftError | ArenaError) -> None:
        """Records that the draft of the current attach is lost and will not answer."""
        name = self._metrics.algorithm
        logger.warning("drafting by %s stopped: %s; decoding goes on without it", name, error)
        self._metrics.failures.inc()
        self._session.wire.requests.reset()


@dataclass(frozen=True, slots=True)
class RemoteTrees:
    """`DeviceTrees` of a step that was sent to a draft in another process.

    Attributes:
        client: Connection to the draft.
        session: Session of the attach that the step belongs to.
        exchange: Memory that the draft writes its trees to.
        step: Number of the step.
        on_lost: Called with the reason if the draft is dropped.
    """

    client: DraftClient
    session: Session
    exchange: DeviceExchange
    step: int
    on_lost: Callable[[DraftError], None]

    def fetch(self, trees: torch.Tensor) -> None:
        """See `DeviceTrees`. Entries beyond this draft's largest tree are set to no node."""
        self.exchange.wait_trees(self.step)
        own = self.exchange.trees[: len(trees)]
        num_nodes = own.shape[2]
        if num_nodes < trees.shape[2]:
            trees[:, 1, num_nodes:].fill_(NO_PARENT)
            trees = trees[:, :, :num_nodes]
        trees.copy_(own)

    def followed(self, sequence: RequestSequence, start: int) -> None:
        """See `DeviceTrees`."""
        self.session.messages.followed(sequence, start)

    def is_late(self, waiting: float) -> bool:
        """See `DeviceTrees`."""
        return self.client.epoch != self.session.epoch or waiting > self.client.step_timeout

    def abandon(self) -> None:
        """See `DeviceTrees`."""
        self.exchange.release(self.step)
        if self.client.epoch == self.session.epoch:
            self.on_lost(self.client.drop("its trees did not come in time"))
