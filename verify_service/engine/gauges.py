"""Publishes the state of the engine: its load, its pages, its drafts."""

import logging
import time

from verify_service import metrics
from verify_service.drafts.drafts import Drafts
from verify_service.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Gauges:
    """Publishes the engine's gauges at intervals. Belongs to the engine's thread.

    Args:
        scheduler: The scheduler.
        drafts: The drafts.
        speculation: Metrics of speculation.

    Attributes:
        drafting_since: Time, in seconds since 1970, since which all drafts are attached; 0 while
            one is missing.
    """

    def __init__(
        self, scheduler: Scheduler, drafts: Drafts, speculation: metrics.AnyMetrics
    ) -> None:
        self._scheduler = scheduler
        self._drafts = drafts
        self._speculation = speculation
        self._published_at = 0.0
        self.drafting_since = 0.0

    def publish(self, has_work: bool) -> None:
        """Publishes at intervals; without work always, so before the last request's end is emitted.

        Args:
            has_work: Whether the engine has a step to run.
        """
        now = time.perf_counter()
        if has_work and now - self._published_at < metrics.PUBLISH_SECONDS:
            return
        self._published_at = now
        self._note_drafts()
        pool = self._scheduler.pool
        metrics.RUNNING.set(self._scheduler.num_running)
        metrics.WAITING.set(self._scheduler.num_waiting)
        metrics.PAGES_CACHED.set(pool.num_idle)
        metrics.PAGES_USED.set(pool.num_pages - pool.num_free - pool.num_idle)
        self._speculation.flush()
        self._publish_drafts()

    def _publish_drafts(self) -> None:
        """Publishes which drafts are attached, and how many sequences each drafts for."""
        drafts = self._drafts
        given, changes = list(drafts.assigned.values()), drafts.take_changes()
        for number, one in enumerate(drafts.each):
            figures = self._speculation.of(one.name)
            figures.available.set(one.epoch > 0)
            if drafts.are_several:
                figures.sequences.set(given.count(number))
                figures.changes.inc(changes[number])

    def _note_drafts(self) -> None:
        """Records the time since which all drafts are attached."""
        is_drafting = self._drafts.are_available
        if is_drafting and not self.drafting_since:
            self.drafting_since = time.time()
            logger.info("drafting from %s on", time.strftime("%H:%M:%S"))
        elif not is_drafting:
            self.drafting_since = 0.0
