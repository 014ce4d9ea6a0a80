"""Memory through which ranks that compute on the CPUs of one host exchange tensors.

Each rank writes its block to a place of its own, then all of them meet, then each reads the others'
blocks. There are two places for each rank, which it uses in turn: who writes to one of them again
has met the others since, and so they have read what was there.
"""

import time

import torch

from foredraft.cpu import _kernels
from verify_service.executor.ranks.group import added_in_order

ROOM_BYTES = 1 << 20  # maximum size of a block; longer tensors go in several
# A wait returns to Python this often, so that a process can handle signals.
_NANOSECONDS = 1_000_000_000


def num_bytes(size: int) -> int:
    """Returns the bytes of memory that `size` ranks need."""
    return size * (_kernels.MEETING_PLACE + 2 * ROOM_BYTES)


class HostMemory:
    """One rank's access to the memory; all ranks call the same methods in the same order.

    Args:
        rank: Number of this rank.
        size: Number of ranks.
        memory: [num_bytes(size)], at first all zero, at a multiple of 64 bytes; the same memory in
            all ranks.
        patience: Seconds after which a rank that has not come is missing.
    """

    def __init__(self, rank: int, size: int, memory: memoryview, patience: float) -> None:
        self.rank, self.size = rank, size
        self._patience = patience
        self._number = 0
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._meeting = whole.data_ptr()
        begin = size * _kernels.MEETING_PLACE
        self._rooms = whole[begin : num_bytes(size)].view(2, size, ROOM_BYTES)
        self._places: dict[torch.dtype, list[torch.Tensor]] = {}

    def meet(self) -> None:
        """Waits until all ranks have come here.

        Raises:
            TimeoutError: One of them has not.
        """
        self._number += 1
        until = time.monotonic() + self._patience
        while True:
            missing = _kernels.meet(self._meeting, self.rank, self.size, self._number, _NANOSECONDS)
            if missing < 0:
                return
            if time.monotonic() > until:
                raise TimeoutError(f"rank {missing} has not come within {self._patience:g} s")

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the ranks' x, added in float32 in their order and rounded once."""
        if x.nbytes > ROOM_BYTES:
            return torch.cat([self.sum(block) for block in _blocks(x)]).view(x.shape)
        return added_in_order(self._exchanged(x)).view(x.shape)

    def all(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the ranks' x as [size, *x.shape]."""
        if x.nbytes > ROOM_BYTES:
            blocks = [self.all(block) for block in _blocks(x)]
            return torch.cat(blocks, -1).view(self.size, *x.shape)
        return torch.stack(self._exchanged(x)).view(self.size, *x.shape)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """Returns rank 0's x."""
        if x.nbytes > ROOM_BYTES:
            return torch.cat([self.first(block) for block in _blocks(x)]).view(x.shape)
        return self._exchanged(x)[0].clone().view(x.shape)

    def _exchanged(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the ranks' x, flat, in the memory; they are there until the next call."""
        turn = (self._number + 1) % 2
        if x.dtype not in self._places:
            self._places[x.dtype] = [room.view(x.dtype) for room in self._rooms]
        places = self._places[x.dtype][turn][:, : x.numel()]
        places[self.rank].copy_(x.reshape(-1))
        self.meet()
        return places.unbind()


def _blocks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.reshape(-1).split(ROOM_BYTES // x.element_size())
