"""Connects the ranks of one model over torch.distributed; sums are the same on all ranks."""

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import ProcessGroupGloo

from foredraft.parallel.group import SumGroup
from foredraft.parallel.peer_memory import PeerMemory

# Far longer than the watchdog takes to end a verifier; see `watchdog`.
COLLECTIVE_SECONDS = 1800.0
# A rank that lost a peer in a collective cannot tell which. It waits this long for rank 0's
# watchdog, which names the lost rank and ends all ranks.
LOST_SECONDS = 20.0


class CollectiveLog(Protocol):
    """Records the start and end of every collective, for the watchdog."""

    def begin(self) -> None:
        """Records that a collective begins."""

    def end(self) -> None:
        """Records that the collective is over."""


def added_in_order(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of two or more ranks' parts, added in float32 in their order and rounded
    once; the parts stay as they are.
    """
    first, second, *others = parts
    total = first.float() + second
    for other in others:
        total += other
    return total.to(first.dtype)


class ProcessGroup:
    """A `foredraft.parallel.group.Group` that moves bytes between processes, and adds by itself.

    Sums add float32 numbers in the order of the ranks and round once, so every rank has the same
    bits, in any batch.

    Args:
        rank: Number of this rank.
        size: Number of ranks.
        group: Group of torch.distributed, which no other model uses.
        log: Records each collective.
    """

    def __init__(self, rank: int, size: int, group: Any, log: CollectiveLog) -> None:
        self.rank, self.size = rank, size
        self._group, self._log = group, log

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        num_local: int,
        store: Any,
        log: CollectiveLog,
        host: str = "127.0.0.1",
    ) -> "ProcessGroup":
        """Joins the other ranks, and waits until all have joined.

        Args:
            rank: Number of this rank.
            size: Number of ranks.
            num_local: Number of ranks of each host.
            store: Store of torch.distributed that all ranks use to find each other.
            log: Records each collective.
            host: Address at which the others reach this host.
        """
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=COLLECTIVE_SECONDS)
        return cls(rank, size, ProcessGroupGloo(store, rank, size, options), log)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        return added_in_order(self.gathered(x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        return torch.cat(list(self.gathered(x)), -1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Returns rank 0's x on every rank; the others' x has its shape and type, and may be
        changed.
        """
        x = x.contiguous()
        self._log.begin()
        self._wait(self._group.broadcast([x]))
        return x

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        x = x.contiguous()
        parts = x.new_empty(self.size, *x.shape)
        self._log.begin()
        self._wait(self._group.allgather([list(parts)], [x]))
        return parts

    def memory_for(self, num_rows: int, size: int, dtype: torch.dtype) -> PeerMemory | None:
        """See Group."""
        return None

    def reserve(self, num_rows: int, size: int, dtype: torch.dtype) -> None:
        """See Group."""

    def halves(self, dtype: torch.dtype) -> tuple[SumGroup, SumGroup] | None:
        """See Group."""
        return None

    def begin_sum(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        return x

    @property
    def lost_rank(self) -> int | None:
        """Rank whose numbers this one's device has awaited for too long; None where all came."""
        return None

    @property
    def nanoseconds(self) -> tuple[int, int] | None:
        """What this rank's device has measured, see `PeerMemory.nanoseconds`; None where it
        measures nothing.
        """
        return None

    def close(self) -> None:
        """Frees what the ranks share. Nothing may be computed with them any more."""

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError:
            time.sleep(LOST_SECONDS)
            raise
        self._log.end()
