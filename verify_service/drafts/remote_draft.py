"""The engine's side of a draft in another process: opens a session for each attach, and survives
the draft's death.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence

from foredraft.errors import DraftError
from foredraft.transport.rows import ArenaError
from verify_service.drafts.arena import Arena
from verify_service.drafts.capabilities import DraftCapabilities
from verify_service.drafts.client import DraftClient
from verify_service.drafts.hidden_states import HiddenStates
from verify_service.drafts.proposals import DeviceRequest, Drafted, DraftRequest, Trial
from verify_service.drafts.session import DraftSettings, RemoteTrees, Session
from verify_service.executor.base import DeviceOutcome
from verify_service.metrics import SpeculationMetrics
from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.request import Sequence as RequestSequence


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
        self.depth = settings.tree_shape[0]
        self._client = client
        self._page_size = pool.page_size
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
    def usual_seconds(self) -> float:
        """See `DraftProxy`."""
        return self._session.usual_seconds

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
        return self._session.lag(sequence)

    def release(self, slots: Iterable[int]) -> None:
        """See `DraftProxy`."""
        self._session.release(slots)

    def forget(self, sequence: RequestSequence) -> None:
        """See `DraftProxy`."""
        self._session.forget(sequence)

    def preempted(self, sequence: RequestSequence) -> None:
        """See `DraftProxy`."""
        self._session.preempted(sequence)

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
        """See `DraftProxy`."""
        try:
            self._session.ask(requests, extending, self._is_suspended)
        except (DraftError, ArenaError) as error:
            self._session.lost(error)

    def collect(self) -> Mapping[int, Drafted]:
        """See `DraftProxy`."""
        try:
            return self._session.collect()
        except (DraftError, ArenaError) as error:
            self._session.lost(error)
            return {}

    def has_tried(self) -> bool:
        """See `DraftProxy`."""
        try:
            return self._session.has_tried()
        except (DraftError, ArenaError) as error:
            self._session.lost(error)
            return True

    def take_trials(self) -> list[Trial]:
        """See `DraftProxy`."""
        self.has_tried()
        return self._session.take_trials()

    # Steps that follow one another on the device.

    def can_follow(self, sequences: Iterable[RequestSequence]) -> bool:
        """See `DraftProxy`."""
        return self._session.can_follow(sequences)

    def follow(
        self, requests: Sequence[DeviceRequest], outcome: DeviceOutcome
    ) -> RemoteTrees | None:
        """See `DraftProxy`."""
        try:
            return self._session.follow(requests, outcome)
        except (DraftError, ArenaError) as error:
            self._session.lost(error)
            return None
