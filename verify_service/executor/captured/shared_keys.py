"""Sequences of a captured step that begin with the same pages: attention reads those keys once.

The host finds them by the page tables whenever other sequences run, and puts them into the records;
`shared_keys` reads them on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from foredraft.attention.base import AttentionBackend
from foredraft.attention.segments import TILE
from foredraft.attention.triton_plan import SharedKeys
from foredraft.kvcache.paged_kv import PagedKV
from verify_service.executor.records import STEP

# Bytes of one layer's keys and values that must be read less often, or the kernel that reads shared
# keys takes longer than it saves.
LEAST_BYTES = 128 << 20
_SPARE = 7  # blocks that are there beside those that hold all sequences
COLUMNS = ("shared_keys", "member", "block_first", "block_size")


@dataclass(frozen=True, slots=True)
class Sharers:
    """Sequences that begin with the same keys.

    Attributes:
        members: Indexes of the sequences.
        num_keys: Number of keys that they share; whole tiles.
    """

    members: list[int]
    num_keys: int

    @property
    def saved(self) -> int:
        """Number of keys that are not read again."""
        return (len(self.members) - 1) * self.num_keys


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Sizes of the blocks of sequences that read shared keys together, for one shape of steps.

    Attributes:
        most: Maximum number of sequences of a block; below 2 nothing can be shared.
        count: Number of blocks.
        key_bytes: Bytes of a layer's key and value of all heads.
    """

    most: int
    count: int
    key_bytes: int

    @classmethod
    def of(
        cls,
        attention: AttentionBackend,
        kv: PagedKV,
        group_size: int,
        dtype: torch.dtype,
        shape: tuple[int, int],
    ) -> "BlockSizes":
        """Returns the sizes for steps of (batch, rows of each sequence)."""
        batch, rows = shape
        most = attention.shared_rows(batch * rows, group_size, dtype, kv) // rows
        count = min(batch // 2, -(-batch // most) + _SPARE) if most > 1 else 0
        return cls(most, count, 2 * kv.num_kv_heads * kv.data.shape[-1] * kv.data.itemsize)

    def cut(self, groups: Sequence[Sharers]) -> list[Sharers]:
        """Cuts groups into blocks, those that save most first; none if it is not worth a kernel."""
        blocks: list[Sharers] = []
        for group in sorted(groups, key=lambda group: group.saved, reverse=True):
            members = group.members
            parts = (members[i : i + self.most] for i in range(0, len(members), max(1, self.most)))
            blocks += (Sharers(part, group.num_keys) for part in parts if len(part) > 1)
        blocks = blocks[: self.count]
        saved = sum(block.saved for block in blocks)
        return blocks if saved * self.key_bytes >= LEAST_BYTES else []


def find_groups(page_tables: Sequence[list[int]], page_size: int) -> list[Sharers]:
    """Finds groups of sequences that share many keys; a sequence is in one group at most."""
    by_first: dict[int, list[int]] = {}
    for index, pages in enumerate(page_tables):
        by_first.setdefault(pages[0], []).append(index)
    groups: list[Sharers] = []
    for members in by_first.values():
        if len(members) > 1:
            members.sort(key=page_tables.__getitem__)
            common = [
                _num_common(page_tables[one], page_tables[other]) * page_size // TILE * TILE
                for one, other in pairwise(members)
            ]
            groups += _groups_of(members, common)
    return groups


@dataclass(slots=True)
class _Branch:
    """Sequences that stand beside each other in the order of their page tables.

    Attributes:
        num_keys: Number of keys that all of them share.
        groups: Groups of them that may still be broken up for a larger one.
        others: Sequences that are in no group.
    """

    num_keys: int
    groups: list[Sharers] = field(default_factory=list)
    others: list[int] = field(default_factory=list)

    def add(self, part: "_Branch") -> None:
        self.groups += part.groups
        self.others += part.others

    def close(self) -> list[Sharers]:
        """Puts into one group all that is in none, and what saves more there than in its own.

        Returns the groups that would save less in any that shares fewer keys; they are no longer
        in `groups`.
        """
        least = self.num_keys
        final = [group for group in self.groups if group.saved > len(group.members) * least]
        self.groups = [group for group in self.groups if group.saved <= len(group.members) * least]
        gain = sum(len(group.members) * least - group.saved for group in self.groups)
        if gain > (0 if self.others else least):  # a group's first member saves nothing
            self.others += [member for group in self.groups for member in group.members]
            self.groups = []
        if len(self.others) > 1:
            self.groups.append(Sharers(sorted(self.others), least))
            self.others = []
        return final


def _groups_of(members: list[int], common: list[int]) -> list[Sharers]:
    """Returns groups of some sequences. Within all that share some keys those who share more are a
    group of their own if that saves more.

    Page tables in order are the leaves of a prefix tree, read from left to right. `branches` is the
    path of open nodes; a node is closed, and its groups decided, when the next table shares less.

    Args:
        members: Sequences in the order of their page tables.
        common: Number of keys that each of them shares with the next one.
    """
    found: list[Sharers] = []
    branches = [_Branch(0)]  # each within the one before
    for member, num_keys in zip(members, [*common, 0], strict=True):
        part = _Branch(num_keys, others=[member])
        while branches[-1].num_keys > num_keys:
            branches[-1].add(part)
            part = branches.pop()
            found += part.close()
        if branches[-1].num_keys < num_keys:
            branches.append(_Branch(num_keys))
        branches[-1].add(part)
    return found + branches[0].groups


def _num_common(pages: list[int], others: list[int]) -> int:
    """Returns how many pages two page tables begin with in common."""
    low, high = 0, min(len(pages), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if pages[low:middle] == others[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def columns_of(blocks: Sequence[Sharers], num_sequences: int) -> npt.NDArray[np.int32]:
    """Returns what the records hold of some blocks, int32 [COLUMNS, num_sequences]."""
    columns = np.zeros((len(COLUMNS), num_sequences), np.int32)
    keys, member, first, size = columns
    used = 0
    for index, block in enumerate(blocks):
        keys[block.members] = block.num_keys
        member[used : used + len(block.members)] = block.members
        first[index], size[index] = used, len(block.members)
        used += len(block.members)
    return columns


def shared_keys(
    records: torch.Tensor, num_rows: int, tables: torch.Tensor, num_blocks: int
) -> SharedKeys:
    """Reads the blocks of a step from its records, on the device.

    Args:
        records: int32 [B, words].
        num_rows: Number of rows of each sequence.
        tables: int32 [B, pages]: page tables of the sequences.
        num_blocks: Number of blocks of the step's shape.
    """
    keys, member, first, size = (records[:, STEP[name]] for name in COLUMNS)
    first, size = first[:num_blocks], size[:num_blocks]
    rows = torch.arange(num_rows, dtype=torch.int32, device=records.device)
    leaders = member[first.long()].long()
    return SharedKeys(
        keys=keys.contiguous(),
        row_index=(member[:, None] * num_rows + rows).flatten(),
        first_row=first * num_rows,
        num_rows=size * num_rows,
        num_keys=keys[leaders],
        page_tables=tables[leaders],
    )
