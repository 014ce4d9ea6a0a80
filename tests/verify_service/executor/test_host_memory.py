"""What ranks of one host exchange through memory; here each rank is a thread, and
`tests/parallel/test_group.py` has processes.
"""

import mmap
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from foredraft.cpu import _kernels
from verify_service.executor.ranks import host_memory
from verify_service.executor.ranks.host_memory import ROOM_BYTES, HostMemory, num_bytes

PATIENCE = 100.0
NUM_IN_ROOM = ROOM_BYTES // 4


def together(memories: list[HostMemory], work: Callable[[HostMemory], Any]) -> list[Any]:
    """Returns what each rank's `work(memory)` returns; all of them work at once."""
    with ThreadPoolExecutor(len(memories)) as pool:
        return list(pool.map(work, memories))


def memories_of(size: int, patience: float = PATIENCE) -> list[HostMemory]:
    """Returns each rank's access to new memory."""
    shared = memoryview(mmap.mmap(-1, num_bytes(size)))
    return [HostMemory(rank, size, shared, patience) for rank in range(size)]


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns numbers of a rank whose sum depends on their order."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator) * 10.0 ** (3 * rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [(0, 5), (1,), (3, 7), (NUM_IN_ROOM,), (NUM_IN_ROOM + 1,), (5, NUM_IN_ROOM)]
)
@pytest.mark.parametrize("size", [2, 3])
def test_sums_have_the_bits_of_float32_sums_in_order(
    size: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    own = [numbers(rank, shape, dtype) for rank in range(size)]
    kept = [x.clone() for x in own]
    want = own[0].float()
    for x in own[1:]:
        want = want + x.float()
    found = together(memories_of(size), lambda memory: memory.sum(own[memory.rank]))
    assert all(torch.equal(x, want.to(dtype)) for x in found)
    assert all(torch.equal(x, before) for x, before in zip(own, kept, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (4, 6), (3, NUM_IN_ROOM)])
def test_each_rank_gets_all_of_every_type(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    own = [(numbers(rank, shape, torch.float32) > 0).to(dtype) + rank for rank in range(3)]
    memories = memories_of(3)
    for found in together(memories, lambda memory: memory.all(own[memory.rank])):
        assert torch.equal(found, torch.stack(own))
    for found in together(memories, lambda memory: memory.first(own[memory.rank])):
        assert torch.equal(found, own[0])


def test_rows_that_do_not_follow_each_other_in_memory() -> None:
    whole = [numbers(rank, (6, 8), torch.float32) for rank in range(2)]
    found = together(memories_of(2), lambda memory: memory.sum(whole[memory.rank].T[1:, ::2]))
    assert all(torch.equal(x, (whole[0] + whole[1]).T[1:, ::2]) for x in found)


def test_ranks_may_come_at_any_time() -> None:
    """Thousands of exchanges, most of them begun by a rank that falls asleep: who sleeps is always
    woken, and nobody reads numbers of another exchange.
    """

    def work(memory: HostMemory) -> bool:
        rng = random.Random(memory.rank)
        is_right = True
        for i in range(3000):
            if rng.random() < 0.02:
                time.sleep(rng.random() * 1e-3)
            shape = (1 + i % 5, 3)
            found = memory.sum(torch.full(shape, float(i * memory.rank)))
            is_right &= torch.equal(found, torch.full(shape, float(3 * i)))
        return is_right

    assert together(memories_of(3), work) == [True] * 3


def test_numbers_of_meetings_wrap_around() -> None:
    memories = memories_of(2)

    def work(memory: HostMemory) -> list[float]:
        for number in (0x7FFFFFF0, 0xFFFFFFE0, 0xFFFFFFFC):  # each is after the one before
            memory._number = number
            memory.meet()
        return [float(memory.sum(torch.tensor(float(i)))) for i in range(8)]

    assert together(memories, work) == [[2.0 * i for i in range(8)]] * 2


@pytest.fixture
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits return to Python every millisecond."""
    monkeypatch.setattr(host_memory, "_NANOSECONDS", 1_000_000)


@pytest.mark.usefixtures("short_looks")
def test_a_rank_that_does_not_come_is_named() -> None:
    memories = memories_of(3, patience=0.05)

    def work(memory: HostMemory) -> str:
        memory.meet()
        if memory.rank == 1:
            return "gone"
        with pytest.raises(TimeoutError) as raised:
            memory.meet()
        return str(raised.value)

    told = "rank 1 has not come within 0.05 s"
    assert together(memories, work) == [told, "gone", told]


@pytest.mark.usefixtures("short_looks")
def test_a_wait_of_many_looks_ends_when_the_rank_comes() -> None:
    memories = memories_of(2)

    def work(memory: HostMemory) -> float:
        if memory.rank == 1:
            time.sleep(0.05)
        return float(memory.sum(torch.ones(())))

    assert together(memories, work) == [2.0, 2.0]


def test_a_rank_that_is_none_is_refused() -> None:
    shared = memoryview(mmap.mmap(-1, num_bytes(2)))
    memory = HostMemory(2, 2, shared, PATIENCE)
    with pytest.raises(ValueError, match="no meeting of process 2 of 2"):
        memory.meet()
    with pytest.raises(TypeError, match="meet takes 5 arguments, not 1"):
        _kernels.meet(0)  # type: ignore[call-arg]
