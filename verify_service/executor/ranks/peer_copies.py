"""Sends many rows to the other ranks of a host beside what the GPU computes.

Engines of the GPU copy them: products take whole multiprocessors, and a kernel that sends or waits
would have to wait for a free one. A rank writes rows to all others, and then a number that they
wait for.

Each rank sends to the next one first, then to the second next, and so on, each time when the others
have done so too: two ranks that send to the same one share its link.

A forward's two halves send in turns. Before a rank sends a half's next rows but one, it has
received that half's next rows from the others, who had read its last ones before they sent those.
So each half needs two places.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from foredraft.layers.fused import sum_of_parts
from foredraft.parallel.group import SumGroup
from foredraft.parallel.peer_memory import PeerMemory
from foredraft.transport import cuda
from verify_service.executor.ranks.group import CollectiveLog

NUM_PLACES = 4
_HEADER_BYTES = 256  # for each rank, the number of the newest rows that it has sent
_WORD_BYTES = 4


def num_bytes(size: int, room_bytes: int) -> int:
    """Returns the memory that each of `size` ranks needs for rows of up to `room_bytes`."""
    return _HEADER_BYTES + NUM_PLACES * size * room_bytes


class Sent(NamedTuple):
    """Rows on their way to the other ranks.

    Attributes:
        number: Number that follows them.
        rows: The rows, which must stay as they are until they have been sent.
    """

    number: int
    rows: torch.Tensor


class PeerCopies:
    """This rank's memory for rows of the others, and theirs for its own.

    All ranks send rows of the same shapes, in the same order, and receive in the order of sending.

    Args:
        rank: Number of this rank.
        memories: For each rank, its uint8 [num_bytes(size, room_bytes)], all zero, which this
            rank's GPU can write. No rank may send anything before all have one of these.
        room_bytes: Maximum size of the rows, a multiple of 256.
    """

    def __init__(self, rank: int, memories: Sequence[torch.Tensor], room_bytes: int) -> None:
        self._rank, self._size, self._room_bytes = rank, len(memories), room_bytes
        self._memory, self._device = memories[rank], memories[rank].device
        steps = range(1, self._size)
        # This rank's receiver and its sender in each step.
        self._others = [((rank + step) % self._size, (rank - step) % self._size) for step in steps]
        self._begins = [memory.data_ptr() for memory in memories]
        self._stream = cuda.new_stream(self._device).cuda_stream
        # For each place, that the rows are computed, and that they have been sent.
        self._events = [(cuda.new_event(), cuda.new_event()) for _ in range(NUM_PLACES)]
        self._count = 0

    def send(self, rows: torch.Tensor) -> Sent | None:
        """Sends contiguous rows [n, size] as soon as they are computed; None where they do not
        fit.
        """
        num_bytes = rows.nbytes
        if num_bytes > self._room_bytes:
            return None
        self._count += 1
        stream, (computed, sent) = self._stream, self._events[self._count % NUM_PLACES]
        cuda.record(cuda.current_stream(self._device), computed)
        cuda.wait(stream, computed)
        place = self._place(self._count) + self._rank * self._room_bytes
        own, word = self._begins[self._rank], self._word(self._rank)
        source, before = rows.data_ptr(), None
        for to, sender in self._others:
            if before is not None:
                cuda.wait_word(stream, own + self._word(before), self._count)
            cuda.copy_bytes(stream, self._begins[to] + place, source, num_bytes)
            cuda.write_word(stream, self._begins[to] + word, self._count)
            before = sender
        cuda.record(stream, sent)
        return Sent(self._count, rows)

    def received(self, sent: Sent) -> torch.Tensor:
        """Returns the ranks' rows [size, n, size of a row], for kernels of the current stream that
        are launched before the next rows but one are sent; what stands for this rank's own rows is
        not meant to be read.
        """
        number, rows = sent
        stream, begin = cuda.current_stream(self._device), self._begins[self._rank]
        cuda.wait(stream, self._events[number % NUM_PLACES][1])
        for _, sender in self._others:
            cuda.wait_word(stream, begin + self._word(sender), number)
        first = self._place(number) // rows.itemsize
        strides = self._room_bytes // rows.itemsize, rows.shape[1], 1
        return self._memory.view(rows.dtype).as_strided((self._size, *rows.shape), strides, first)

    def _place(self, number: int) -> int:
        """Returns where the rows of a number begin in each rank's memory."""
        return _HEADER_BYTES + number % NUM_PLACES * self._size * self._room_bytes

    def _word(self, sender: int) -> int:
        """Returns where a sender's newest number is in each rank's memory."""
        return sender * _WORD_BYTES


class HalfGroup:
    """A `SumGroup` for one half of a forward's rows, see `Group.halves`.

    Args:
        group: The ranks, for everything but these sums.
        copies: Memory that the other half's sums go through too.
        log: Records each collective.
        dtype: Type of the rows.
    """

    def __init__(
        self, group: SumGroup, copies: PeerCopies, log: CollectiveLog, dtype: torch.dtype
    ) -> None:
        self.rank, self.size = group.rank, group.size
        self._group, self._copies, self._log, self._dtype = group, copies, log, dtype
        self._sent: Sent | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        return self._group.all_reduce(x)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what `begin_sum` has begun to gather, or gathers x now where it was too large."""
        if self._sent is None:
            return self._group.gathered(x)
        sent, self._sent = self._sent, None
        return self._copies.received(sent)

    def memory_for(self, num_rows: int, size: int, dtype: torch.dtype) -> PeerMemory | None:
        """See Group."""
        return None

    def begin_sum(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        rows = sum_of_parts(x, self._dtype).contiguous()
        self._log.begin()
        self._sent = self._copies.send(rows)
        return rows
