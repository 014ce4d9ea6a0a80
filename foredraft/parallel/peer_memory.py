"""Memory through which the ranks of a host exchange small blocks inside kernels.

Triton is imported on first use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foredraft.kernel_launch import overlapped

PROGRAMS = 512  # maximum number of programs of an exchange; each has a block at a time
ROOM_BYTES = 16 << 10  # maximum size of a block
# Bytes that each rank must save for sums to go two ways: about what links carry in the time of one.
TWO_SHOT_BYTES = 640 << 10
_LAMPORT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = 1024  # elements of a block, where the caller does not choose and few programs will do
_FLAG_BYTES = 4
# Polls after which a rank is taken for lost, about 0.6 us each: in captured steps, which all ranks
# replay at the same time, and outside of them, where a rank may compile first.
PATIENCE = 1 << 24
EAGER_PATIENCE = 1 << 27


def num_bytes(size: int, num_programs: int = PROGRAMS) -> int:
    """Returns the bytes that each of `size` ranks needs."""
    return size * num_programs * (_FLAG_BYTES + 2 * 2 * ROOM_BYTES)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Arguments and constants of a kernel that exchanges blocks; see `exchange_kernels`.

    Attributes:
        room: Maximum number of elements of a block, or of its words.
        num_programs: Maximum number of programs.
        is_lamport: Whether blocks need no flags: floats, multiples of 8 of them.
        is_two_shot: Whether each rank adds up a share of the blocks and sends the sums on.
    """

    places: tuple[torch.Tensor, ...]
    flags: tuple[torch.Tensor, ...]
    counts: torch.Tensor
    times: torch.Tensor
    told: torch.Tensor
    patience: int
    room: int
    num_programs: int
    is_lamport: bool
    is_two_shot: bool
    rank: int
    size: int

    @property
    def exchange_arguments(self) -> tuple[Any, ...]:
        """The arguments in the kernels' order."""
        return self.places, self.flags, self.counts, self.times, self.told, self.patience


def constants_of(exchange: Exchange) -> dict[str, Any]:
    """Returns a kernel's constants."""
    return {
        "ROOM": exchange.room,
        "PROGRAMS": exchange.num_programs,
        "LAMPORT": exchange.is_lamport,
        "TWO_SHOT": exchange.is_two_shot,
        "RANK": exchange.rank,
        "RANKS": exchange.size,
    }


class PeerMemory:
    """This rank's memory for blocks of the others, and theirs for its own.

    All ranks make the same exchanges in the same order, in one stream each.

    Args:
        rank: Number of this rank.
        memories: For each rank, its uint8 [num_bytes(size, num_programs)], all zero, which this
            rank's kernels can write. No rank may exchange anything before all have one of these.
        num_programs: Maximum number of programs of an exchange.
    """

    def __init__(
        self, rank: int, memories: Sequence[torch.Tensor], num_programs: int = PROGRAMS
    ) -> None:
        self.rank, self.size, self.num_programs = rank, len(memories), num_programs
        flags = self.size * num_programs * _FLAG_BYTES
        marked = flags + self.size * num_programs * 2 * ROOM_BYTES
        self._flags = tuple(memory[:flags].view(torch.int32) for memory in memories)
        self._flagged = [memory[flags:marked] for memory in memories]
        self._marked = tuple(memory[marked:].view(torch.int32) for memory in memories)
        self._marked[rank].fill_(-1)
        self._places: dict[torch.dtype, tuple[torch.Tensor, ...]] = {}
        device = memories[rank].device
        self._counts = torch.zeros(num_programs, dtype=torch.int32, device=device)
        self._times = torch.zeros(4, dtype=torch.int64, device=device)
        # In the host's memory: 1 + the rank whose block did not come, or 0, and the times.
        self._told = torch.zeros(3, dtype=torch.int64, pin_memory=device.type == "cuda")

    @property
    def lost_rank(self) -> int | None:
        """The rank whose block did not come; None while all came."""
        lost = int(self._told[0])
        return lost - 1 if lost else None

    @property
    def nanoseconds(self) -> tuple[int, int]:
        """Time of this rank's device in exchanges, from when its block was sent until the ranks'
        had come, and between those of a forward; up to the newest forward's beginning.
        """
        exchanged, computed = self._told[1:].tolist()
        return exchanged, computed

    def takes_rows(self, num_rows: int, size: int, dtype: torch.dtype) -> bool:
        """Returns whether blocks are to be rows [num_rows, size], `num_programs` of them at a
        time.
        """
        return num_rows > 0 and size * dtype.itemsize <= ROOM_BYTES

    def takes(self, x: torch.Tensor) -> bool:
        """Returns whether `sum`, `first` and `all` take x."""
        return 0 < x.numel() <= self.num_programs * ROOM_BYTES // x.element_size()

    def exchange(self, length: int, num_bytes: int, dtype: torch.dtype) -> Exchange:
        """Returns what a kernel needs for an exchange of blocks.

        Args:
            length: Number of elements of each block, or of all blocks.
            num_bytes: Size of all blocks.
        """
        is_lamport = length % 8 == 0 and dtype in _LAMPORT_TYPES
        # Each rank sends its blocks to all others, or one share to each of them and its own sums
        # to all.
        saved = num_bytes * (self.size - 1) * (self.size - 2) // self.size
        places = self._marked if is_lamport else self._typed(dtype)
        is_captured = self._counts.is_cuda and torch.cuda.is_current_stream_capturing()
        return Exchange(
            places,
            self._flags,
            self._counts,
            self._times,
            self._told,
            PATIENCE if is_captured else EAGER_PATIENCE,
            ROOM_BYTES // places[self.rank].itemsize,
            self.num_programs,
            is_lamport,
            saved > TWO_SHOT_BYTES,
            self.rank,
            self.size,
        )

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the ranks' x, see `Group.all_reduce`."""
        return self._exchange(x, torch.empty_like(x), "SUM")

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """Returns rank 0's x."""
        return self._exchange(x, torch.empty_like(x), "FIRST")

    def all(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the ranks' x [..., n], joined as [..., size * n]."""
        return self._exchange(x, x.new_empty(*x.shape[:-1], self.size * x.shape[-1]), "ALL")

    def _typed(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        if dtype not in self._places:
            self._places[dtype] = tuple(memory.view(dtype) for memory in self._flagged)
        return self._places[dtype]

    def _exchange(self, x: torch.Tensor, out: torch.Tensor, kind: str) -> torch.Tensor:
        from foredraft.parallel import exchange_kernels

        room = ROOM_BYTES // x.element_size()
        block = _BLOCK if x.numel() <= self.num_programs * _BLOCK else room
        num_blocks = -(-x.numel() // block)
        exchange = self.exchange(x.numel(), x.nbytes, x.dtype)
        exchange_kernels.exchange[(num_blocks,)](
            x, out, *exchange.exchange_arguments, x.numel(), x.shape[-1], BLOCK=block,
            KIND=getattr(exchange_kernels, kind), num_warps=max(4, block // 512),
            **constants_of(exchange), **overlapped(x.device),
        )  # fmt: skip
        return out
