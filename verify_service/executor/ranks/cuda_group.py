"""Connects the ranks of one model on several GPUs.

NCCL moves bytes. On one host blocks of rows go through memory that the ranks can write at each
other, and so do the sums of many rows, beside what is computed.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from foredraft.layers.padded_rows import proven_size
from foredraft.parallel import peer_memory
from foredraft.parallel.group import SumGroup
from foredraft.parallel.peer_memory import PeerMemory
from foredraft.transport import cuda
from verify_service.executor.ranks import peer_copies
from verify_service.executor.ranks.group import COLLECTIVE_SECONDS, CollectiveLog, ProcessGroup
from verify_service.executor.ranks.peer_copies import HalfGroup, PeerCopies

HANDLES = "foredraft/memory"  # keys of the store: each rank's handle to each of its blocks
# Up to which every rank sends its rows to all others in the time of a half's products.
MOST_HALVED_RANKS = 4
_T = TypeVar("_T")

logger = logging.getLogger(__name__)


class CudaGroup(ProcessGroup):
    """A `ProcessGroup` on GPUs. Its work goes into the current stream and may be captured.

    Args:
        store: Store of torch.distributed that all ranks share.
        memory: Memory that the ranks exchange small blocks through; None where they cannot reach
            each other's.
        mappings: Mappings of the other ranks' memory.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        group: Any,
        log: CollectiveLog,
        store: Any,
        memory: PeerMemory | None,
        mappings: Sequence[cuda.Mapping] = (),
    ) -> None:
        super().__init__(rank, size, group, log)
        self._store, self._memory, self._mappings = store, memory, list(mappings)
        self._copies: PeerCopies | None = None

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        num_local: int,
        store: Any,
        log: CollectiveLog,
        host: str = "127.0.0.1",
    ) -> "CudaGroup":
        """Joins as ProcessGroup does; the rank uses the card of its number on its host, and NCCL
        finds its own address.
        """
        card = rank % num_local
        torch.cuda.set_device(card)
        dist.init_process_group(
            "nccl",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
            device_id=torch.device("cuda", card),
        )
        if num_local < size:  # memory of other hosts' cards is out of reach
            return cls(rank, size, dist.group.WORLD, log, store, None)
        length = peer_memory.num_bytes(size)
        make = functools.partial(PeerMemory, rank)
        memory, mappings = _shared(rank, size, store, "blocks", length, make)
        if memory is None:
            logger.warning("the ranks cannot reach each other's memory: sums go through NCCL")
        return cls(rank, size, dist.group.WORLD, log, store, memory, mappings)

    def reserve(self, num_rows: int, size: int, dtype: torch.dtype) -> None:
        """See Group."""
        if self._memory is None or self.size > MOST_HALVED_RANKS:
            return
        room = -(-proven_size(-(-num_rows // 2)) * size * dtype.itemsize // 256) * 256
        length = peer_copies.num_bytes(self.size, room)
        make = functools.partial(PeerCopies, self.rank, room_bytes=room)
        shared = _shared(self.rank, self.size, self._store, "halves", length, make)
        self._copies, mappings = shared
        self._mappings += mappings
        if self._copies is not None and self.rank == 0:
            logger.info("%.0f MiB of each GPU for sums of long prompts", length / 2**20)

    def halves(self, dtype: torch.dtype) -> tuple[SumGroup, SumGroup] | None:
        """See Group."""
        copies = self._copies
        if copies is None:
            return None
        return HalfGroup(self, copies, self._log, dtype), HalfGroup(self, copies, self._log, dtype)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        if self._memory is None or not self._memory.takes(x):
            return super().all_reduce(x)
        self._log.begin()
        return self._memory.sum(x.contiguous())

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        if self._memory is None or not self._memory.takes(x):
            return super().all_gather(x)
        self._log.begin()
        return self._memory.all(x.contiguous())

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        x = x.contiguous()
        self._log.begin()
        if self._memory is not None and self._memory.takes(x):
            return self._memory.first(x)
        dist.broadcast(x, 0)
        return x

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        x = x.contiguous()
        parts = x.new_empty(self.size, *x.shape)
        self._log.begin()
        dist.all_gather_into_tensor(parts, x)
        return parts

    def memory_for(self, num_rows: int, size: int, dtype: torch.dtype) -> PeerMemory | None:
        """See Group."""
        if self._memory is None or not self._memory.takes_rows(num_rows, size, dtype):
            return None
        self._log.begin()
        return self._memory

    @property
    def lost_rank(self) -> int | None:
        """See ProcessGroup."""
        memory = self._memory
        return None if memory is None else memory.lost_rank

    @property
    def nanoseconds(self) -> tuple[int, int] | None:
        """See ProcessGroup."""
        memory = self._memory
        return None if memory is None else memory.nanoseconds

    def close(self) -> None:
        """Frees the memory and leaves the group."""
        torch.cuda.synchronize()
        for mapping in self._mappings:
            mapping.close()
        self._memory, self._copies, self._mappings = None, None, []
        dist.destroy_process_group()


def _shared(
    rank: int,
    size: int,
    store: Any,
    name: str,
    length: int,
    make: Callable[[Sequence[torch.Tensor]], _T],
) -> tuple[_T | None, Sequence[cuda.Mapping]]:
    """Makes something of memory that all ranks of the host can write.

    Args:
        name: Name of the memory, the same on all ranks and of no other.
        length: Size of each rank's memory in bytes.
        make: Takes each rank's memory, all zero. No rank writes before all have made theirs.

    Returns:
        What was made, and mappings of the others' memory; None where one of the ranks cannot reach
        another's.
    """
    device = torch.device("cuda", rank)
    others = [other for other in range(size) if other != rank]
    reaches = all(torch.cuda.can_device_access_peer(rank, other) for other in others)
    made: _T | None = None
    mappings: list[cuda.Mapping] = []
    if _all(reaches, device):
        try:
            made = make(_memories(rank, size, store, f"{HANDLES}/{name}", length, mappings))
        except cuda.CudaError as error:
            logger.warning("no memory is shared with other cards: %s", error)
            store.set(f"{HANDLES}/{name}/{rank}", b"")  # others wait for it
    if _all(made is not None, device):
        return made, mappings
    made = None
    for mapping in mappings:
        mapping.close()
    return None, []


def _memories(
    rank: int, size: int, store: Any, key: str, length: int, mappings: list[cuda.Mapping]
) -> list[torch.Tensor]:
    """Allocates this rank's memory, and maps that of the others, which `mappings` gets.

    Raises:
        CudaError: There is no such memory here, or another rank has none.
    """
    device = torch.device("cuda", rank)
    own = cuda.Block(length, device)
    store.set(f"{key}/{rank}", own.handle)
    memories: list[torch.Tensor] = []
    for other in range(size):
        if other == rank:
            memories.append(own.bytes)
            continue
        handle = store.get(f"{key}/{other}")
        if len(handle) != cuda.HANDLE_BYTES:
            raise cuda.CudaError(f"rank {other} has none")
        mappings.append(cuda.Mapping(handle, length, device))
        memories.append(mappings[-1].bytes)
    return memories


def _all(value: bool, device: torch.device) -> bool:
    """Returns whether a value is true on all ranks."""
    found = torch.tensor([value], dtype=torch.int32, device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return bool(found.item())
