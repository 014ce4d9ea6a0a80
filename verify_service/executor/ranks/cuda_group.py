"""Connects the ranks of one model on several GPUs of a host.

NCCL moves bytes; small sums of two ranks go through shared GPU memory.
"""

import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from verify_service.executor.ranks.group import COLLECTIVE_SECONDS, CollectiveLog, ProcessGroup

# Larger sums are gathered: a kernel that reads the other card's memory starts sooner, but moves
# bytes no faster.
SHARED_BYTES = 1 << 20
_ALIGNMENT = 16  # bytes that the kernel of small sums reads at once

logger = logging.getLogger(__name__)


class CudaGroup(ProcessGroup):
    """A `ProcessGroup` on GPUs. Its work goes into the current stream and may be captured.

    Two ranks may add by torch's kernel, since a sum of two numbers is the same in any order. More
    ranks gather, since that kernel adds in another order on each rank.
    """

    def __init__(self, rank: int, size: int, group: Any, log: CollectiveLog) -> None:
        super().__init__(rank, size, group, log)
        self._shared = self._shared_memory() if size == 2 else None

    @classmethod
    def join(
        cls, rank: int, size: int, store: Any, log: CollectiveLog, host: str = "127.0.0.1"
    ) -> "CudaGroup":
        """Joins as ProcessGroup does; the rank uses the card of its number, and ignores `host`."""
        torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
            device_id=torch.device("cuda", rank),
        )
        return cls(rank, size, dist.group.WORLD, log)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        num_bytes = x.numel() * x.element_size()
        fits = 0 < num_bytes <= SHARED_BYTES and num_bytes % _ALIGNMENT == 0
        if self._shared is None or not fits or not x.is_floating_point():
            return super().all_reduce(x)
        self._log.begin()
        buffer = self._shared.view(x.dtype)
        name = self._group.group_name
        return torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x.contiguous(), "sum", name)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        x = x.contiguous()
        self._log.begin()
        dist.broadcast(x, 0)
        return x

    def close(self) -> None:
        """Frees the shared memory and leaves the group."""
        self._shared = None
        dist.destroy_process_group()

    def _gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.contiguous()
        parts = x.new_empty(self.size, *x.shape)
        self._log.begin()
        dist.all_gather_into_tensor(parts, x)
        return list(parts)

    def _shared_memory(self) -> torch.Tensor | None:
        """Allocates memory that the other card can read; None where one of the two cannot."""
        device = torch.device("cuda", self.rank)
        try:
            memory = symmetric_memory.empty(SHARED_BYTES, dtype=torch.uint8, device=device)
            symmetric_memory.rendezvous(memory, self._group.group_name)
        except RuntimeError as error:
            logger.warning("the ranks' sums go through NCCL: %s", str(error).split("\n")[0])
            memory = None
        is_there = torch.tensor([memory is not None], dtype=torch.int32, device=device)
        dist.all_reduce(is_there, dist.ReduceOp.MIN)
        return memory if is_there.item() else None
