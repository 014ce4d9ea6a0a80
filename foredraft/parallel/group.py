"""Defines how a model's layers use the ranks that compute the model together."""

from dataclasses import dataclass
from typing import Protocol

import torch

from foredraft.parallel.peer_memory import PeerMemory


class SumGroup(Protocol):
    """Ranks whose results are added up.

    Attributes:
        rank: Number of this rank, from 0.
        size: Number of ranks.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums x [any shape] over the ranks; each gets the same bits.

        May change x and return it.
        """

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the ranks' x, all of one shape, as [size, *x.shape]."""

    def memory_for(self, num_rows: int, size: int, dtype: torch.dtype) -> PeerMemory | None:
        """Returns memory through which a kernel is to exchange rows [num_rows, size], as the next
        collective; None where rows must be gathered.
        """

    def begin_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Begins the sum that will be asked for next.

        Args:
            x: [num_rows, size], or the parts that `Linear.deferred` gives.

        Returns:
            What the sum is to be asked for with: x, or the sum of its parts.
        """


class Group(SumGroup, Protocol):
    """Ranks that each hold a share of every split layer."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the ranks' x [..., n], all of one shape, joined as [..., size * n]."""

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Returns rank 0's x on every rank; the others' x has its shape and type, and may be
        changed.
        """

    def reserve(self, num_rows: int, size: int, dtype: torch.dtype) -> None:
        """Reserves memory for sums of up to [num_rows, size], where that makes them faster; all
        ranks call this.
        """

    def halves(self, dtype: torch.dtype) -> tuple[SumGroup, SumGroup] | None:
        """Returns groups for two halves of a forward's rows, so that sums of one half are made
        while the other is computed; None where all rows are to be computed together.

        Args:
            dtype: Type of the rows.
        """


@dataclass(frozen=True, slots=True)
class SingleRank:
    """A group of one rank; its operations return their input unchanged."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        return x

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        return x[None]

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


SINGLE: Group = SingleRank()


def replicas(num_shares: int, group: Group) -> int:
    """Returns the number of ranks that hold the same share, where there are fewer shares than
    ranks.

    Raises:
        ValueError: The ranks are no multiple of the shares.
    """
    if num_shares >= group.size:
        return 1
    if group.size % num_shares:
        raise ValueError(f"{num_shares} shares cannot be held equally often by {group.size} ranks")
    return group.size // num_shares


def share(total: int, group: Group, what: str) -> int:
    """Returns the size of each rank's equal share.

    Args:
        total: Number of heads, outputs or inputs to share out.
        what: Their name, for the error.

    Raises:
        ValueError: The ranks cannot have equal shares.
    """
    if total % group.size:
        raise ValueError(f"{total} {what} cannot be shared equally by {group.size} ranks")
    return total // group.size


def local_kv_heads(num_kv_heads: int, group: Group) -> int:
    """Returns the number of a model's key and value heads on a rank."""
    copies = replicas(num_kv_heads, group)
    return share(num_kv_heads * copies, group, "key and value heads")
