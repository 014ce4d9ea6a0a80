"""Connects the ranks of one model on several GPUs.

NCCL moves bytes; on one host small blocks go through memory that the ranks can write at each other.
"""

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from foredraft.parallel.peer_memory import PeerMemory, num_bytes
from foredraft.transport import cuda
from verify_service.executor.ranks.group import COLLECTIVE_SECONDS, CollectiveLog, ProcessGroup

HANDLES = "foredraft/memory"  # keys of the store: each rank's handle to its memory

logger = logging.getLogger(__name__)


class CudaGroup(ProcessGroup):
    """A `ProcessGroup` on GPUs. Its work goes into the current stream and may be captured.

    Args:
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
        memory: PeerMemory | None,
        mappings: Sequence[cuda.Mapping] = (),
    ) -> None:
        super().__init__(rank, size, group, log)
        self._memory, self._mappings = memory, mappings

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
            return cls(rank, size, dist.group.WORLD, log, None)
        return cls(rank, size, dist.group.WORLD, log, *_peer_memory(rank, size, store))

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
        self._memory, self._mappings = None, ()
        dist.destroy_process_group()


def _peer_memory(
    rank: int, size: int, store: Any
) -> tuple[PeerMemory | None, Sequence[cuda.Mapping]]:
    """Returns memory that all ranks can write, and its mappings; None where one of them cannot
    reach another's.
    """
    device = torch.device("cuda", rank)
    others = [other for other in range(size) if other != rank]
    reaches = all(torch.cuda.can_device_access_peer(rank, other) for other in others)
    memory: PeerMemory | None = None
    mappings: list[cuda.Mapping] = []
    if _all(reaches, device):
        memory, mappings = _shared_memory(rank, size, store)
    if _all(memory is not None, device):  # nobody writes before all have cleared theirs
        return memory, mappings
    for mapping in mappings:
        mapping.close()
    logger.warning("the ranks cannot reach each other's memory: sums go through NCCL")
    return None, []


def _shared_memory(
    rank: int, size: int, store: Any
) -> tuple[PeerMemory | None, list[cuda.Mapping]]:
    device, length = torch.device("cuda", rank), num_bytes(size)
    mappings: list[cuda.Mapping] = []
    memories: list[torch.Tensor] = []
    try:
        own = cuda.Block(length, device)
        store.set(f"{HANDLES}/{rank}", own.handle)
        for other in range(size):
            if other == rank:
                memories.append(own.bytes)
                continue
            handle = store.get(f"{HANDLES}/{other}")
            if len(handle) != cuda.HANDLE_BYTES:
                raise cuda.CudaError(f"rank {other} has none")
            mappings.append(cuda.Mapping(handle, length, device))
            memories.append(mappings[-1].bytes)
    except cuda.CudaError as error:
        logger.warning("no memory is shared with other cards: %s", error)
        store.set(f"{HANDLES}/{rank}", b"")  # others wait for it
        return None, mappings
    return PeerMemory(rank, memories), mappings


def _all(value: bool, device: torch.device) -> bool:
    """Returns whether a value is true on all ranks."""
    found = torch.tensor([value], dtype=torch.int32, device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return bool(found.item())
