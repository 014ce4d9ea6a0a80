"""Which sequences read keys together, and what the records say of them."""

import itertools

import numpy as np
import pytest
import torch

from foredraft.trees.draft_tree import DraftTree
from foredraft.types import SamplingParams
from verify_service.executor.captured import shared_keys
from verify_service.executor.captured.fill import RecordFiller
from verify_service.executor.captured.shared_keys import (
    COLUMNS,
    BlockSizes,
    Sharers,
    columns_of,
    find_groups,
)
from verify_service.executor.choice.sampler import VerifyRows
from verify_service.executor.records import STEP, record

PAGE = 16


def table(common: str, own: int, num_own: int = 3) -> list[int]:
    """Returns a page table that begins with a page for each letter of `common`."""
    return [*map(ord, common), *range(1000 + 10 * own, 1000 + 10 * own + num_own)]


def saved(groups: list[Sharers]) -> int:
    return sum(group.saved for group in groups)


def test_sequences_that_begin_alike_are_a_group() -> None:
    tables = [table("abcdefgh", 0), table("xy", 1), table("abcdefghij", 2), table("abcdefgh", 3)]
    assert find_groups(tables, PAGE) == [Sharers([0, 2, 3], 128)]


def test_shared_keys_are_whole_tiles() -> None:
    assert find_groups([table("abcdefg", 0), table("abcdefg", 1)], PAGE) == [Sharers([0, 1], 64)]
    assert find_groups([table("abc", 0), table("abc", 1)], PAGE) == []


def test_one_page_table_may_be_the_beginning_of_another() -> None:
    assert find_groups([table("abcd", 0, 0), table("abcd", 1)], PAGE) == [Sharers([0, 1], 64)]


def test_those_who_share_much_do_not_wait_for_those_who_share_little() -> None:
    much, little = "a" * 4 + "b" * 60, "a" * 4 + "c" * 4
    tables = [table(much, 0), table(little, 1), table(much, 2), table(little, 3), table(much, 4)]
    found = find_groups(tables, PAGE)
    assert sorted(found, key=lambda group: group.num_keys) == [
        Sharers([1, 3], 128),
        Sharers([0, 2, 4], 1024),
    ]


def test_hardly_another_way_to_group_saves_more() -> None:
    """All ways to put up to five sequences into groups, for random page tables."""
    rng, as_good = np.random.default_rng(1), 0
    for _ in range(60):
        count = int(rng.integers(2, 6))
        tables = [
            table("".join(rng.choice(list("aaab"), int(rng.integers(1, 4)))) * 4, i)
            for i in range(count)
        ]
        best = 0
        for labels in itertools.product(range(count), repeat=count):
            parts = [[i for i in range(count) if labels[i] == label] for label in set(labels)]
            best = max(best, sum((len(part) - 1) * common(tables, part) for part in parts))
        found = find_groups(tables, PAGE)
        members = [member for group in found for member in group.members]
        assert len(members) == len(set(members))
        assert saved(found) >= 0.75 * best
        as_good += saved(found) == best
        for group in found:
            assert group.num_keys <= common(tables, group.members)
    assert as_good >= 54


def test_prefixes_of_prefixes_may_be_nested_deeply() -> None:
    count = 1500
    tables = [[*range(4 * i + 4), 10_000 + i] for i in range(count)]
    found = find_groups(tables, PAGE)
    members = [member for group in found for member in group.members]
    assert len(members) == len(set(members))
    for group in found:
        assert group.num_keys <= 64 * (1 + min(group.members))
    # All from some sequence on could be one group.
    assert saved(found) >= max((count - 1 - i) * 64 * (i + 1) for i in range(count))


def common(tables: list[list[int]], part: list[int]) -> int:
    """Returns how many keys in whole tiles sequences have in common."""
    columns = zip(*(tables[i] for i in part), strict=False)
    pages = len(list(itertools.takewhile(lambda column: len(set(column)) == 1, columns)))
    return pages * PAGE // 64 * 64 if len(part) > 1 else 0


def test_groups_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_keys, "LEAST_BYTES", 1000)
    groups = [Sharers([0, 1], 64), Sharers([2, 3, 4, 5, 6], 128), Sharers([7, 8, 9], 256)]
    assert BlockSizes(2, 4, 4).cut(groups) == [
        Sharers([2, 3], 128),
        Sharers([4, 5], 128),
        Sharers([7, 8], 256),
        Sharers([0, 1], 64),
    ]
    assert BlockSizes(2, 1, 8).cut(groups) == [Sharers([2, 3], 128)]
    assert BlockSizes(2, 1, 7).cut(groups) == []  # 896 bytes are not worth a kernel
    assert BlockSizes(0, 0, 1 << 30).cut(groups) == []


class Sequence:
    """What `RecordFiller` reads of a running sequence.

    Args:
        pages: Its page table.
    """

    def __init__(self, pages: list[int]) -> None:
        self.pages, self.slot, self.device_pages_from = pages, pages[-1], len(pages)
        self.sampling, self.is_masked = SamplingParams(), False
        self.num_computed, self.tokens = PAGE * len(pages), [7]


class Buffers:
    """Buffers whose steps can share keys between pairs of sequences, if at all."""

    page_size = PAGE

    def __init__(self, *, can_share: bool) -> None:
        self.filled = np.zeros(4, record(2))
        self._can_share = can_share

    def next_records(self, num_sequences: int) -> np.ndarray:
        self.filled.view(np.uint8)[:] = 0
        return self.filled[:num_sequences]

    def block_sizes(self, num_sequences: int, num_rows: int) -> BlockSizes:
        return BlockSizes(2, self._can_share * (num_sequences // 2), 1 << 30)

    def upload(self, num_sequences: int) -> None:
        pass


def fill(filler: RecordFiller, sequences: list[Sequence]) -> None:
    filler.fill_known([VerifyRows(one, DraftTree((), ())) for one in sequences], 1)  # type: ignore[arg-type]


def test_records_follow_the_running_sequences() -> None:
    buffers = Buffers(can_share=True)
    filler = RecordFiller(buffers, None)  # type: ignore[arg-type]
    alike = [Sequence(table("abcdefgh", own)) for own in range(2)]
    other = Sequence(table("stuvwxyz", 2))
    for sequences, keys in [
        ([*alike, other], [128, 128, 0]),
        ([*alike, other], [128, 128, 0]),  # kept from the step before
        ([other, *alike], [0, 128, 128]),
        ([alike[0], other], [0, 0]),
    ]:
        fill(filler, sequences)
        assert filler.shares_keys == any(keys)
        assert buffers.filled["shared_keys"][: len(keys)].tolist() == keys


def test_nobody_looks_for_shared_keys_where_no_step_can_share(monkeypatch) -> None:
    monkeypatch.setattr("verify_service.executor.captured.fill.find_groups", None)
    filler = RecordFiller(Buffers(can_share=False), None)  # type: ignore[arg-type]
    fill(filler, [Sequence(table("abcdefgh", own)) for own in range(2)])
    assert not filler.shares_keys


def test_the_device_reads_what_the_host_wrote() -> None:
    blocks = [Sharers([3, 1], 128), Sharers([0, 4, 5], 64)]
    records = torch.zeros(8, STEP.size, dtype=torch.int32)
    for name, column in zip(COLUMNS, columns_of(blocks, 6), strict=True):
        records[:6, STEP[name]] = torch.from_numpy(column)
    tables = torch.arange(80, dtype=torch.int32).view(8, 10)
    found = shared_keys.shared_keys(records, 2, tables, 3)
    assert found.keys.tolist() == [64, 128, 0, 128, 64, 64, 0, 0]
    assert found.first_row.tolist() == [0, 4, 0]
    assert found.num_rows.tolist() == [4, 6, 0]
    assert found.num_keys.tolist()[:2] == [128, 64]
    assert found.row_index.tolist()[:10] == [6, 7, 2, 3, 0, 1, 8, 9, 10, 11]
    assert torch.equal(found.page_tables[:2], tables[[3, 0]])
