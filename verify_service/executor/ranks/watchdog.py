"""Finds ranks that have died or hang, so that a verifier never waits for ever in a collective.

Rank 0 watches all ranks, and a worker of its host watches rank 0.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
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
LOOK_SECONDS = 0.2  # between looks at rank 0 from another process
# States of a thread, see proc_pid_stat(5), in which it cannot go on by itself: asleep, stopped,
# traced.
_STILL = ("S", "T", "t")

logger = logging.getLogger(__name__)


class LocalWorkers(Protocol):
    """Worker processes of this host; see `workers.Workers`."""

    def ended(self) -> tuple[int, str] | None:
        """Returns the rank of a process that has ended, and how it ended; None while all run."""

    def pid(self, rank: int) -> int | None:
        """Returns the process id of a rank; None for a rank of another host."""

    def kill(self) -> None:
        """Kills all of them."""


class Connected(Protocol):
    """A group of ranks; see `group.ProcessGroup`."""

    @property
    def lost_rank(self) -> int | None:
        """Rank whose numbers this one's device has awaited for too long; None where all came."""


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
        self._group: Connected | None = None
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

    def watch_group(self, group: Connected) -> None:
        """Watches from now on that the ranks' devices send each other what they should."""
        self._group = group

    def close(self) -> None:
        """Ends the thread, so that ranks may end."""
        self._is_closed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        self._board.rest()

    def _run(self) -> None:
        before, looked_at = self._board.progress(), time.monotonic()
        while not self._is_closed.wait(POLL_SECONDS):
            now = time.monotonic()
            # A pause of the whole machine is no rank's fault.
            seconds, looked_at = min(now - looked_at, MOST_SECONDS), now
            self._board.beat()
            progress = self._board.progress()
            self._times.publish(progress)
            failure = self._dead() or self._stuck(before, progress, seconds) or self._lost()
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
        # The other ranks of its host end after it.
        first = min(self._board.streams, key=lambda stream: stream.lost_at, default=None)
        return f"{self._name(first.rank)} {first.lost}" if first and first.lost else None

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

    def _lost(self) -> str | None:
        rank = None if self._group is None else self._group.lost_rank
        if rank is None:
            return None
        return f"{self._name(rank)} has not sent its part of a sum, for which others wait"

    def _name(self, rank: int) -> str:
        names = {stream.rank: stream.name for stream in self._board.streams}
        if pid := self._workers.pid(rank):
            names[rank] = f"pid {pid}"
        name = f" ({names[rank]})" if rank in names else ""
        return f"rank {rank} of {self._board.size}{name}"


class LeaderWatch:
    """Watches rank 0 from a worker of its host, and ends the verifier when rank 0 stands still.

    Rank 0's own watchdog is a thread of its process, and stands still with it. A process that
    computes, waits for a core or reads a disk is not taken for one that hangs, however long it
    lets nothing else run.

    Args:
        board: Board with the progress of all ranks.
        pid: Process id of rank 0, the parent of this process.
    """

    def __init__(self, board: Board, pid: int) -> None:
        self._board, self._pid = board, pid
        self._beats, self._ticks = 0, -1
        self._silent = 0.0
        self._thread = threading.Thread(target=self._run, name="leader-watch", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def look(self, seconds: float) -> str | None:
        """Returns a sentence once rank 0 has stood still for too long.

        Args:
            seconds: Seconds since the last look.
        """
        beats, ticks = self._board.progress()[0].beats, -1
        if beats == self._beats:
            ticks = _idle_ticks(self._pid)
        # A rank 0 that has not begun to beat still starts; one that has ended does not beat.
        is_still = beats > 0 and beats == self._beats and ticks == self._ticks >= 0
        self._silent = self._silent + min(seconds, MOST_SECONDS) if is_still else 0.0
        self._beats, self._ticks = beats, ticks
        if self._silent < SILENT_SECONDS:
            return None
        name = f"rank 0 of {self._board.size} (pid {self._pid})"
        return f"{name} has shown no sign of life for {SILENT_SECONDS:g} s"

    def _run(self) -> None:
        looked_at = time.monotonic()
        while True:
            time.sleep(LOOK_SECONDS)
            now = time.monotonic()
            failure, looked_at = self.look(now - looked_at), now
            if failure and os.getppid() == self._pid:
                logger.error("%s: ending this verifier", failure)
                os.kill(self._pid, signal.SIGKILL)
                lifetime.end_at_once(RANK_LOST)


def _idle_ticks(pid: int) -> int:
    """Returns the clock ticks of CPU time that a process has used, see proc_pid_stat(5); -1 where
    one of its threads can go on by itself, or the process has ended.
    """
    ticks = 0
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            state, *fields = (thread / "stat").read_text().rpartition(")")[2].split()
            if state not in _STILL:
                return -1
            ticks += int(fields[10]) + int(fields[11])
    except OSError:
        return -1
    return ticks
