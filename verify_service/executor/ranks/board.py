"""Memory that all ranks of one host share: a ring of messages from rank 0, the progress of each
rank, and room for what they exchange on CPUs.

It is an unnamed file, which goes with the last process that has it open.
"""

import contextlib
import mmap
import os
import select
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from verify_service.executor.ranks import host_memory

RING_BYTES = 8 << 20
_WORD = 8
_PAGE = mmap.PAGESIZE
_WRAP = -1  # instead of a message's length: the next message begins at the ring's start
# A sleeping reader looks again after this long, in case it missed a wake-up.
_NAP_SECONDS = 0.05
_WRITTEN, _FIRST_RANK = 0, 1


class Progress(NamedTuple):
    """Counters of a rank's progress, which only grow.

    Attributes:
        read: Number of message bytes that the rank has taken from the ring.
        collectives: Number of collectives that the rank has begun.
        beats: Number of heartbeats.
        busy: Nanoseconds of work on messages, collectives included; of GPUs that measure it, in
            forwards.
        waiting: Nanoseconds in collectives until the last rank of the host had begun them.
        moving: Nanoseconds in collectives after that.
    """

    read: int
    collectives: int
    beats: int
    busy: int = 0
    waiting: int = 0
    moving: int = 0


PROGRESS_COLUMNS = len(Progress._fields)
_READ, _COLLECTIVES, _BEATS, _BUSY, _WAITING, _MOVING = range(PROGRESS_COLUMNS)
# Two columns: start times of the newest collectives with an even and with an odd number.
_BEGUN = PROGRESS_COLUMNS
_SLEEPS, _COLUMNS = _BEGUN + 2, _BEGUN + 3


class Stream(Protocol):
    """Sends messages to a rank of another host; see `stream`."""

    rank: int
    name: str
    lost: str
    lost_at: float

    def send(self, message: bytes) -> None:
        """Sends a message."""

    def wait(self, seconds: float) -> None:
        """Waits until the rank has ended, but no longer than `seconds`."""

    def close(self) -> None:
        """Closes the connection, which ends the rank."""


class Measured(Protocol):
    """A group of ranks; see `group.ProcessGroup`."""

    @property
    def nanoseconds(self) -> tuple[int, int] | None:
        """Nanoseconds in exchanges and between them; None where the device does not count them."""


class Inbox(Protocol):
    """Gives a worker its messages, and takes reports of its progress."""

    def read(self) -> bytes:
        """Waits for the next message and returns it."""

    def begin(self) -> None:
        """Reports that this rank begins a collective."""

    def end(self) -> None:
        """Reports that the collective is over."""

    def worked(self, nanoseconds: int) -> None:
        """Reports how long the work on a message took."""

    def beat(self) -> None:
        """Reports that this rank's process is alive."""


@contextlib.contextmanager
def timed(inbox: "Inbox | Board") -> Iterator[None]:
    """Counts the time of the `with` block as work of this rank."""
    started = time.monotonic_ns()
    yield
    inbox.worked(time.monotonic_ns() - started)


class Board:
    """Gives one rank access to the shared memory.

    Only rank 0 writes messages; every other rank reads each of them.

    Attributes:
        streams: Connections to ranks of other hosts, which get the same messages.
        group: Group of this rank, whose device may measure times in place of this process.

    Args:
        file: Descriptor of the memory, see `create`.
        bells: Descriptors of eventfds, one for each rank; rank 0 wakes the others with them, and
            its own is not used.
        rank: Number of this rank.
        size: Number of ranks.
        num_local: Number of ranks of this host, which are the first ones; by default all.
        spin_seconds: Seconds that a reader polls for the next message before it sleeps.
    """

    def __init__(
        self,
        file: int,
        bells: list[int],
        rank: int,
        size: int,
        num_local: int | None = None,
        spin_seconds: float = 0.0,
    ) -> None:
        self.file, self.bells = file, bells
        self.rank, self.size, self.num_local = rank, size, num_local or size
        self.streams: list[Stream] = []
        self.group: Measured | None = None
        self._spin_seconds = spin_seconds
        self._map = mmap.mmap(file, 0)
        head = _FIRST_RANK + _COLUMNS * size
        self._head = np.frombuffer(self._map, np.int64, head)
        self._ranks = self._head[_FIRST_RANK:].reshape(size, _COLUMNS)
        self._begin = head * _WORD
        self._words = np.frombuffer(self._map, np.int64, RING_BYTES // _WORD, self._begin)

    @classmethod
    def create(cls, size: int, num_local: int | None = None) -> "Board":
        """Creates a board for rank 0."""
        file = os.memfd_create("foredraft-ranks")
        os.ftruncate(file, _exchange_begin(size) + host_memory.num_bytes(size))
        bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(size)]
        return cls(file, bells, 0, size, num_local)

    @property
    def exchange(self) -> memoryview:
        """Memory for `HostMemory`; no rank of another host has it."""
        return memoryview(self._map)[_exchange_begin(self.size) :]

    def write(self, message: bytes) -> None:
        """Sends a message to all other ranks; waits while the ring has no room.

        Raises:
            ValueError: The message, with its length, is longer than half of the ring.
        """
        length = -(-len(message) // _WORD) * _WORD
        # A longer one might never find room: what is left of the ring is not used for it.
        if _WORD + length > RING_BYTES // 2:
            raise ValueError(f"a message of {len(message)} bytes is too long for ranks' memory")
        for stream in self.streams:
            stream.send(message)
        position = int(self._head[_WRITTEN])
        at = position % RING_BYTES
        if at + _WORD + length > RING_BYTES:
            self._wait_for_room(position, RING_BYTES - at)
            self._words[at // _WORD] = _WRAP
            position += RING_BYTES - at
            at = 0
        self._wait_for_room(position, _WORD + length)
        self._words[at // _WORD] = len(message)
        begin = self._begin + at + _WORD
        self._map[begin : begin + len(message)] = message
        # Written last, since it tells readers that the message is complete.
        self._head[_WRITTEN] = position + _WORD + length
        for rank in range(1, self.num_local):
            if self._ranks[rank, _SLEEPS]:
                os.eventfd_write(self.bells[rank], 1)

    def read(self) -> bytes:
        """Waits for the next message and returns it."""
        own = self._ranks[self.rank]
        while True:
            position = int(own[_READ])
            self._wait_for_message(position)
            at = position % RING_BYTES
            length = int(self._words[at // _WORD])
            if length == _WRAP:
                own[_READ] = position + RING_BYTES - at
                continue
            begin = self._begin + at + _WORD
            message = self._map[begin : begin + length]
            own[_READ] = position + _WORD + -(-length // _WORD) * _WORD
            return message

    def begin(self) -> None:
        """See Inbox."""
        own = self._ranks[self.rank]
        number = int(own[_COLLECTIVES]) + 1
        own[_BEGUN + number % 2] = time.monotonic_ns()
        own[_COLLECTIVES] = number

    def end(self) -> None:
        """See Inbox.

        The start times of all ranks of this host are still there: no rank begins the collective
        after the next one before this rank has begun the next one.
        """
        now, own = time.monotonic_ns(), self._ranks[self.rank]
        column = _BEGUN + int(own[_COLLECTIVES]) % 2
        begun = int(own[column])
        newest = max(self._ranks[: self.num_local, column].tolist())
        waited = min(newest, now) - begun
        own[_WAITING] += waited
        own[_MOVING] += now - begun - waited

    def worked(self, nanoseconds: int) -> None:
        """See Inbox."""
        if self._measured is None:
            self._ranks[self.rank, _BUSY] += nanoseconds

    def beat(self) -> None:
        """See Inbox."""
        own = self._ranks[self.rank]
        own[_BEATS] += 1
        if (measured := self._measured) is not None:
            own[_MOVING], own[_BUSY] = measured[0], sum(measured)

    def rest(self) -> None:
        """Takes this rank's heartbeats back: nobody watches it any more."""
        self._ranks[self.rank, _BEATS] = 0

    def note(self, rank: int, progress: Sequence[int]) -> None:
        """Stores the progress that a rank of another host reports, in the order of `Progress`."""
        self._ranks[rank, :PROGRESS_COLUMNS] = progress

    def progress(self) -> list[Progress]:
        """Returns the progress of every rank."""
        return [Progress(*row[:PROGRESS_COLUMNS]) for row in self._ranks.tolist()]

    @property
    def _measured(self) -> tuple[int, int] | None:
        return None if self.group is None else self.group.nanoseconds

    def _wait_for_room(self, position: int, length: int) -> None:
        readers = self._ranks[1 : self.num_local, _READ]
        while position + length - int(readers.min(initial=position)) > RING_BYTES:
            time.sleep(1e-4)

    def _wait_for_message(self, position: int) -> None:
        until = time.perf_counter() + self._spin_seconds
        while int(self._head[_WRITTEN]) == position:
            if time.perf_counter() < until:
                time.sleep(0)
                continue
            own = self._ranks[self.rank]
            own[_SLEEPS] = 1
            if int(self._head[_WRITTEN]) == position:
                select.select([self.bells[self.rank]], [], [], _NAP_SECONDS)
            own[_SLEEPS] = 0
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.bells[self.rank])


def _exchange_begin(size: int) -> int:
    """Returns where the memory for exchanges begins, behind the ring of a board of `size` ranks."""
    return -(-((_FIRST_RANK + _COLUMNS * size) * _WORD + RING_BYTES) // _PAGE) * _PAGE
