"""The ranks that compute one model together, as its layers see them."""

from dataclasses import dataclass
from typing import Protocol

import torch


class Group(Protocol):
    """Ranks that each hold a share of every split layer.

    Attributes:
        rank: Number of this rank, from 0.
        size: Number of ranks.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums x [any shape] over the ranks; each gets the same bits. May change x and return it."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Puts the ranks' x [..., n], all of one shape, side by side: [..., size * n]."""


@dataclass(frozen=True, slots=True)
class SingleRank:
    """A group of one, which hands everything back as it is."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        return x


SINGLE: Group = SingleRank()


def share(total: int, group: Group, what: str) -> int:
    """The equal share of each rank.

    Args:
        total: Number of heads, outputs or inputs to share out.
        what: Their name, for the error.

    Raises:
        ValueError: The ranks cannot have equal shares.
    """
    if total % group.size:
        raise ValueError(f"{total} {what} cannot be shared equally by {group.size} ranks")
    return total // group.size
