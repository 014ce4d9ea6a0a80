"""Memory through which the ranks of a host exchange the results of products of many rows: the
product's kernel writes each tile to the others' memory too, and the norm that adds the ranks' rows
up waits for theirs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from foredraft.parallel.peer_memory import Exchange, patience

ROOM_BYTES = 80 << 20  # maximum size of a rank's rows
LEAST_ROWS = 129  # fewer are faster exchanged by the norm
# A rank that sends the next rows but one has the others' next ones, so they have read these.
_SLOTS = 2
_HEAD_BYTES = 4096  # before the rooms; it holds the flags
_FLAG_BYTES = 4


def num_bytes(size: int) -> int:
    """Returns the bytes that each of `size` ranks needs."""
    return _HEAD_BYTES + _SLOTS * size * ROOM_BYTES


class Sending(NamedTuple):
    """What the kernels of an exchange of rows need: a product that sends each tile of its result,
    and the norm that awaits the others'; see `exchange_kernels.send_tile`.

    Attributes:
        exchange: Its places are, for each rank, the memory there for this rank's rows.
        received: [ranks, numbers of a room], this rank's memory for the rows of each.
    """

    exchange: Exchange
    received: torch.Tensor


class SentRows(NamedTuple):
    """Rows [num_rows, size] that this rank has sent to the others, who send it theirs."""

    own: torch.Tensor
    sending: Sending


class PeerRows:
    """This rank's memory for rows of the others, and theirs for its own.

    All ranks make the same exchanges in the same order, in one stream each.

    Args:
        rank: Number of this rank.
        memories: For each rank, its uint8 [num_bytes(size)], all zero, which this rank's kernels
            can write.
        lost: See `PeerMemory`.
    """

    def __init__(self, rank: int, memories: Sequence[torch.Tensor], lost: torch.Tensor) -> None:
        self._rank, self._size, self._lost = rank, len(memories), lost
        heads = [one[: self._size * _FLAG_BYTES] for one in memories]
        self._flags = tuple(head.view(torch.int32) for head in heads)
        self._rooms = [one[_HEAD_BYTES:].view(_SLOTS, self._size, -1) for one in memories]
        self._counts = torch.zeros(1, dtype=torch.int32, device=memories[rank].device)
        self._turn = 0

    def takes(self, num_rows: int, size: int, dtype: torch.dtype) -> bool:
        """Returns whether rows [num_rows, size] are to be exchanged so."""
        return num_rows >= LEAST_ROWS and num_rows * size * dtype.itemsize <= ROOM_BYTES

    def next(self, dtype: torch.dtype) -> Sending:
        """Returns what the kernels of the next exchange need."""
        slot, self._turn = self._turn % _SLOTS, self._turn + 1
        rooms = tuple(one[slot, self._rank].view(dtype) for one in self._rooms)
        polls = patience(self._counts.device)
        settings = self._flags, self._counts, self._lost, polls, 0, 1, False, self._rank, self._size
        return Sending(Exchange(rooms, *settings), self._rooms[self._rank][slot].view(dtype))
