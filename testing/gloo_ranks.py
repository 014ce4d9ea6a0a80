"""Several real ranks of one model on this machine's CPU, over gloo."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


@dataclass(frozen=True, slots=True)
class GlooGroup:
    """A `foredraft.parallel.group.Group` over torch.distributed's default process group."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)


def _run(
    rank: int, size: int, meeting: str, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=size)
    try:
        work(GlooGroup(rank, size), *args)
    finally:
        dist.destroy_process_group()


def run_ranks(size: int, directory: Path, work: Callable[..., Any], *args: Any) -> None:
    """Calls `work(group, *args)` in as many processes; raises what one of them raised.

    Args:
        directory: Empty, for the file by which they meet.
        work: A function of a module, so that a process can import it.
    """
    mp.spawn(_run, (size, str(directory / "meeting"), work, args), nprocs=size)
