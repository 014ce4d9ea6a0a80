"""Memory through which the ranks of a host exchange small blocks inside kernels.

Triton is imported on first use.
"""

from collections.abc import Sequence

import torch

from foredraft.kernel_launch import overlapped

PROGRAMS = 512  # maximum number of blocks of an exchange; each is a program's
ROOM_BYTES = 16 << 10  # maximum size of a block
_BLOCK = 1024  # elements of a block, where the caller does not choose and few programs will do
_FLAG_BYTES = 4


def num_bytes(size: int, num_programs: int = PROGRAMS) -> int:
    """Returns the bytes that each of `size` ranks needs."""
    return size * num_programs * (_FLAG_BYTES + 2 * ROOM_BYTES)


class PeerMemory:
    """This rank's memory for blocks of the others, and theirs for its own.

    All ranks make the same exchanges in the same order, in one stream each.

    Args:
        rank: Number of this rank.
        memories: For each rank, its uint8 [num_bytes(size, num_programs)], all zero, which this
            rank's kernels can write.
        num_programs: Maximum number of blocks of an exchange.

    Attributes:
        flags, counts: See `exchange_kernels.send_and_wait`.
    """

    def __init__(
        self, rank: int, memories: Sequence[torch.Tensor], num_programs: int = PROGRAMS
    ) -> None:
        self.rank, self.size, self.num_programs = rank, len(memories), num_programs
        split = self.size * num_programs * _FLAG_BYTES
        self.flags = tuple(memory[:split].view(torch.int32) for memory in memories)
        self._rooms = [memory[split:] for memory in memories]
        self._places: dict[torch.dtype, tuple[torch.Tensor, ...]] = {}
        self.counts = torch.zeros(num_programs, dtype=torch.int32, device=memories[rank].device)

    def takes_rows(self, num_rows: int, size: int, dtype: torch.dtype) -> bool:
        """Returns whether blocks are to be rows [num_rows, size], `num_programs` of them at a
        time.
        """
        return num_rows > 0 and size * dtype.itemsize <= ROOM_BYTES

    def takes(self, x: torch.Tensor) -> bool:
        """Returns whether `sum`, `first` and `all` take x."""
        return 0 < x.numel() <= self.num_programs * ROOM_BYTES // x.element_size()

    def places(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Returns each rank's memory for blocks of a type, see `exchange_kernels`."""
        if dtype not in self._places:
            self._places[dtype] = tuple(room.view(dtype) for room in self._rooms)
        return self._places[dtype]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the ranks' x, see `Group.all_reduce`."""
        return self._exchange(x, torch.empty_like(x), "SUM")

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """Returns rank 0's x."""
        return self._exchange(x, torch.empty_like(x), "FIRST")

    def all(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the ranks' x [..., n], joined as [..., size * n]."""
        return self._exchange(x, x.new_empty(*x.shape[:-1], self.size * x.shape[-1]), "ALL")

    def _exchange(self, x: torch.Tensor, out: torch.Tensor, kind: str) -> torch.Tensor:
        from foredraft.parallel import exchange_kernels

        room = ROOM_BYTES // x.element_size()
        block = _BLOCK if x.numel() <= self.num_programs * _BLOCK else room
        exchange_kernels.exchange[(-(-x.numel() // block),)](
            x, out, self.places(x.dtype), self.flags, self.counts, x.numel(), x.shape[-1],
            BLOCK=block, KIND=getattr(exchange_kernels, kind), ROOM=room,
            PROGRAMS=self.num_programs, RANK=self.rank, RANKS=self.size,
            num_warps=max(4, block // 512), **overlapped(x.device),
        )  # fmt: skip
        return out
