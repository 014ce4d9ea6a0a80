"""Finds ranks that have died or hang, so that a verifier never waits for ever in a collective."""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from foredraft.rpc import lifetime
from verify_service.executor.ranks.board import Board, Progress
from verify_service.executor.ranks.times import RankTimes

# Exit status of rank 0 when another rank has failed; the supervisor starts all ranks again.
RANK_LOST = 76
POLL_SECONDS = 0.1
MOST_SECONDS = 1.0  # maximum that one poll counts for, on a busy machine
# A process without a heartbeat for this long is stopped, or something blocks all its threads.
SILENT_SECONDS = 8.0
# All ranks have the same work: a rank that begins a collective this much later than the others
# hangs.
BEHIND_SECONDS = 8.0


logger = logging.getLogger(__name__)


class LocalWorkers(Protocol):
    """Worker processes of this host; see `workers.Workers`."""

    def ended(self) -> tuple[int, str] | None:
        """Returns the rank of a process that has ended, and how it ended; None while all run."""

    def pid(self, rank: int) -> int | None:
        """Returns the process id of a rank; None for a rank of another host."""

    def kill(self) -> None:
        """Kills all of them."""


class RankWatchdog:
    """Watches all ranks from a thread of rank 0, and ends the verifier when one of them fails.

    Args:
        board: Board with the progress of all ranks, and the streams to other hosts.
        workers: Worker processes of this host.
    """

    def __init__(self, board: Board, workers: LocalWorkers) -> None:
        self._board, self._workers = board, workers
        self._is_closed = threading.Event()
        self._times = RankTimes(board.size)
        self._watches_steps = False
        self._silent = [0.0] * board.size
        self._behind = [0.0] * board.size
        self._thread = threading.Thread(target=self._run, name="rank-watchdog", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def watch_steps(self) -> None:
        """Watches from now on that ranks reach collectives at the same time.

        Ranks may take very different times to load.
        """
        self._watches_steps = True

    def close(self) -> None:
        """Ends the thread, so that ranks may end."""
        self._is_closed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        before, looked_at = self._board.progress(), time.monotonic()
        while not self._is_closed.wait(POLL_SECONDS):
            now = time.monotonic()
            # A pause of the whole machine is no rank's fault.
            seconds, looked_at = min(now - looked_at, MOST_SECONDS), now
            progress = self._board.progress()
            self._times.publish(progress)
            failure = self._dead() or self._stuck(before, progress, seconds)
            before = progress
            if failure and not self._is_closed.is_set():
                self._fail(failure)

    def _fail(self, why: str) -> None:
        """Ends this process, since a collective that lacks a rank cannot be cancelled."""
        logger.error("%s: ending this verifier", why)
        self._workers.kill()
        lifetime.end_at_once(RANK_LOST)

    def _dead(self) -> str | None:
        if ended := self._workers.ended():
            rank, how = ended
            return f"{self._name(rank)} {how}"
        for stream in self._board.streams:
            if stream.lost:
                return f"{self._name(stream.rank)} {stream.lost}"
        return None

    def _stuck(
        self, before: Sequence[Progress], now: Sequence[Progress], seconds: float
    ) -> str | None:
        furthest = max(one.collectives for one in now)
        for rank, (old, new) in enumerate(zip(before, now, strict=True)):
            is_silent = new.beats == old.beats and new.beats > 0
            self._silent[rank] = self._silent[rank] + seconds if is_silent else 0.0
            if self._silent[rank] > SILENT_SECONDS:
                return f"{self._name(rank)} has shown no sign of life for {SILENT_SECONDS:g} s"
            is_behind = new.collectives == old.collectives and new.collectives < furthest
            is_behind = is_behind and self._watches_steps
            self._behind[rank] = self._behind[rank] + seconds if is_behind else 0.0
            if self._behind[rank] > BEHIND_SECONDS:
                return (
                    f"{self._name(rank)} has not reached collective {new.collectives + 1}, in which"
                    f" others have waited for {BEHIND_SECONDS:g} s"
                )
        return None

    def _name(self, rank: int) -> str:
        names = {stream.rank: stream.name for stream in self._board.streams}
        if pid := self._workers.pid(rank):
            names[rank] = f"pid {pid}"
        name = f" ({names[rank]})" if rank in names else ""
        return f"rank {rank} of {self._board.size}{name}"
