"""Connects the ranks of one model on the CPUs of one host, through memory that all of them map."""

import torch

from verify_service.executor.ranks.group import COLLECTIVE_SECONDS, CollectiveLog, ProcessGroup
from verify_service.executor.ranks.host_memory import HostMemory


class HostGroup(ProcessGroup):
    """A `ProcessGroup` of one host; waits until all its ranks have one.

    A rank that is lost raises nothing in the others: the watchdog names it, and ends all ranks.

    Args:
        rank: Number of this rank.
        size: Number of ranks.
        memory: Memory for `HostMemory`.
        log: Records each collective.
    """

    def __init__(self, rank: int, size: int, memory: memoryview, log: CollectiveLog) -> None:
        super().__init__(rank, size, None, log)
        self._memory = HostMemory(rank, size, memory, COLLECTIVE_SECONDS)
        self._memory.meet()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        self._log.begin()
        total = self._memory.sum(x)
        self._log.end()
        return total

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        self._log.begin()
        first = self._memory.first(x)
        self._log.end()
        return first

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        self._log.begin()
        parts = self._memory.all(x)
        self._log.end()
        return parts
