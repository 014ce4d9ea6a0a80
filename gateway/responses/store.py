"""Keeps responses in memory for a while, found by their id and only by their owner."""

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway import metrics

# Estimated bytes of an entry's objects beside its texts.
OVERHEAD_BYTES = 1024


@dataclass(slots=True)
class Turn:
    """The items of one response's input and output.

    A conversation is a chain of turns, which those that continue it share.

    Attributes:
        items: JSON of the items.
        num_inputs: Number of leading items that are input.
        before: Turn that this one continues, or None.
        num_holders: Number of entries and later turns that need this one.
    """

    items: bytes
    num_inputs: int
    before: "Turn | None"
    num_holders: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    body: bytes
    turn: Turn
    expires: float


class ResponseStore:
    """Keeps responses for limited seconds, within a limit of bytes.

    Where there are too many bytes, the owner with the most loses the oldest response, so that no
    owner pushes out another's. The turns that a response continues stay with it, also when they
    were deleted under their own ids.

    Args:
        max_bytes: Bytes of all responses together; 0 keeps none.
        seconds: Seconds that a response is kept.
        clock: Returns monotonic seconds.

    Attributes:
        num_bytes: Bytes of all responses kept.
    """

    def __init__(
        self, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._clock = clock
        self._entries: OrderedDict[tuple[str, str], _Entry] = (
            OrderedDict()
        )  # by owner and id, oldest first
        self._owned: dict[str, OrderedDict[str, None]] = {}  # ids, likewise
        self._owned_bytes: dict[str, int] = {}
        self.num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_on(self) -> bool:
        """Whether responses are kept at all."""
        return self._max_bytes > 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(
        self,
        owner: str,
        name: str,
        body: Any,
        items: list[Any],
        before: Turn | None = None,
        num_inputs: int = 0,
    ) -> None:
        """Keeps a response.

        Args:
            owner: Name of the caller that may read it.
            name: Id of the response.
            body: The response as a JSON object.
            items: Input and output items.
            before: Turn that this one continues, or None.
            num_inputs: Number of leading items that are input.
        """
        if not self.is_on:
            return
        if (owner, name) in self._entries:
            self._remove(owner, name)
        turn = Turn(_encode(items), num_inputs, before)
        entry = _Entry(_encode(body), turn, self._clock() + self._seconds)
        self._entries[owner, name] = entry
        self._owned.setdefault(owner, OrderedDict())[name] = None
        self._count(owner, len(entry.body) + OVERHEAD_BYTES)
        self._hold(owner, turn)
        self._expire()
        while self.num_bytes > self._max_bytes:
            largest = max(self._owned_bytes, key=self._owned_bytes.__getitem__)
            self._remove(largest, next(iter(self._owned[largest])))
        self._tell()
        self._wake()

    def get(self, owner: str, name: str) -> bytes | None:
        """Returns the JSON of a response; None if the owner has none with this id."""
        entry = self._find(owner, name)
        return None if entry is None else entry.body

    def turn(self, owner: str, name: str) -> Turn | None:
        """Returns a response's turn; None if the owner has none with this id."""
        entry = self._find(owner, name)
        return None if entry is None else entry.turn

    def delete(self, owner: str, name: str) -> bool:
        """Deletes a response; returns whether there was one."""
        if self._find(owner, name) is None:
            return False
        self._remove(owner, name)
        self._tell()
        return True

    def _find(self, owner: str, name: str) -> _Entry | None:
        self._expire()
        return self._entries.get((owner, name))

    def _remove(self, owner: str, name: str) -> None:
        entry = self._entries.pop((owner, name))
        owned = self._owned[owner]
        del owned[name]
        self._count(owner, -len(entry.body) - OVERHEAD_BYTES)
        self._release(owner, entry.turn)
        if not owned:
            del self._owned[owner], self._owned_bytes[owner]

    def _hold(self, owner: str, turn: Turn) -> None:
        """Counts a holder of a turn; its first holder also holds the turn before."""
        held: Turn | None = turn
        while held is not None:
            held.num_holders += 1
            if held.num_holders > 1:
                return
            self._count(owner, len(held.items) + OVERHEAD_BYTES)
            held = held.before

    def _release(self, owner: str, turn: Turn) -> None:
        held: Turn | None = turn
        while held is not None:
            held.num_holders -= 1
            if held.num_holders:
                return
            self._count(owner, -len(held.items) - OVERHEAD_BYTES)
            held = held.before

    def _count(self, owner: str, size: int) -> None:
        self._owned_bytes[owner] = self._owned_bytes.get(owner, 0) + size
        self.num_bytes += size

    def _expire(self) -> None:
        now = self._clock()
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.expires > now:
                return
            self._remove(*key)

    def _tell(self) -> None:
        metrics.stored_responses.set(len(self._entries))
        metrics.stored_response_bytes.set(self.num_bytes)

    def _wake(self) -> None:
        """Schedules the removal of expired responses, so that they go even without requests."""
        if self._timer is None and self._entries:
            expires = next(iter(self._entries.values())).expires
            wait = max(expires - self._clock(), 0.0) + 1.0
            self._timer = asyncio.get_running_loop().call_later(wait, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        self._expire()
        self._tell()
        self._wake()


def conversation(turn: Turn | None) -> list[list[Any]]:
    """Returns the items of all turns up to a turn, the oldest turn first."""
    turns: list[list[Any]] = []
    while turn is not None:
        turns.append(json.loads(turn.items))
        turn = turn.before
    return turns[::-1]


def _encode(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
