"""Ranks that exchange small blocks inside kernels, on two GPUs or as processes in Triton's
interpreter: sums are those of gathered blocks, bit for bit.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from foredraft.layers import fused
from foredraft.models.loader import load_model
from foredraft.parallel import peer_memory
from foredraft.parallel.group import SINGLE, Group
from foredraft.parallel.peer_memory import PROGRAMS, PeerMemory, num_bytes
from foredraft.telemetry.metrics import value
from testing.checkpoints import make_checkpoint
from testing.cpu_ranks import NoLog, run_ranks
from testing.triton_device import INTERPRETED, needs_triton
from tests.parallel.test_group import logits_of
from verify_service.executor.ranks.board import Board
from verify_service.executor.ranks.group import ProcessGroup
from verify_service.executor.ranks.times import RankTimes

NUM_RANKS = 3 if INTERPRETED else max(2, torch.cuda.device_count())
NUM_PROGRAMS = 16  # of interpreted ranks
# Many rows, and so many that each program exchanges several.
MANY_ROWS = (3 * NUM_PROGRAMS + 3,) if INTERPRETED else (67, 3 * PROGRAMS + 3)
pytestmark = [
    needs_triton,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and torch.cuda.device_count() < NUM_RANKS, reason="needs two NVIDIA GPUs"
    ),
]
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]


def shared_memories(size: int) -> list[torch.Tensor]:
    length = num_bytes(size, NUM_PROGRAMS)
    return [torch.zeros(length, dtype=torch.uint8).share_memory_() for _ in range(size)]


class InterpretedGroup(ProcessGroup):
    """Ranks on the CPU that exchange rows as those on GPUs do."""

    def __init__(self, group: ProcessGroup, memories: list[torch.Tensor]) -> None:
        super().__init__(group.rank, group.size, group._group, NoLog())
        self.memory = PeerMemory(group.rank, memories, NUM_PROGRAMS)
        self.shares = True

    def memory_for(self, num_rows: int, size: int, dtype: torch.dtype) -> PeerMemory | None:
        takes = self.shares and self.memory.takes_rows(num_rows, size, dtype)
        return self.memory if takes else None

    @property
    def nanoseconds(self) -> tuple[int, int]:
        return self.memory.nanoseconds


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exchange(memory: PeerMemory, device: torch.device) -> None:
    """Every kind of exchange, many times over and of changing sizes, all ranks adding up all blocks
    and each a share of them.
    """
    rank, size = memory.rank, memory.size
    for turn in range(6 if INTERPRETED else 300):
        dtype = DTYPES[turn % len(DTYPES)]
        shape = [(3, 5), (2, 2100), (7, 1024)][turn // len(DTYPES) % 3]
        peer_memory.TWO_SHOT_BYTES = turn % 2 * (1 << 30)
        own = [random(*shape, seed=7 * turn + other, dtype=dtype) for other in range(size)]
        x = own[rank].to(device)
        total = own[0].float()
        for other in own[1:]:
            total = total + other.float()
        assert torch.equal(memory.sum(x).cpu(), total.to(dtype))
        assert torch.equal(memory.first(x).cpu(), own[0])
        assert torch.equal(memory.all(x).cpu(), torch.cat(own, -1))
        # Not-a-number may have the bits of a place where nothing has come.
        mark = torch.full((8,), -1, dtype=torch.int32).view(dtype).to(device)
        assert memory.sum(mark).isnan().all()
        assert memory.all(mark).isnan().all()
    # Blocks as large as they may be, the last one not full.
    size_of_all = 3 * 4000 * memory.num_programs // (NUM_PROGRAMS if INTERPRETED else 16)
    large = [random(2, size_of_all, seed=other, dtype=torch.float16) for other in range(size)]
    assert memory.takes(large[0])
    assert torch.equal(memory.all(large[rank].to(device)).cpu(), torch.cat(large, -1))
    words = torch.arange(3000, device=device) + rank
    assert torch.equal(memory.first(words).cpu(), torch.arange(3000))


def both_ways(group: Group, device: torch.device, shares: list[bool]) -> None:
    """The norm of a sum, exchanged and gathered, has the same bits, and those of one rank's norm
    where there are few numbers to round.
    """
    for dtype in DTYPES:
        for size in [200] if INTERPRETED else [200, 4096, 5120]:
            many = ((num_rows, 1) for num_rows in MANY_ROWS)
            for num_rows, num_parts in ((1, 1), (3, 2), (5, 1), *many):
                seed = size + num_rows
                stream = random(num_rows, size, seed=seed, dtype=dtype).to(device)
                weight = random(size, seed=1, dtype=dtype).to(device)
                post = (random(size, seed=2, dtype=dtype).to(device), 1e-5)
                parts = random(group.size, num_parts, num_rows, size, seed=3)
                deltas = parts if num_parts > 1 else parts[:, 0].to(dtype)
                own = deltas[group.rank].to(device)
                rounded = [delta.sum(0) if num_parts > 1 else delta for delta in deltas]
                total = rounded[0].to(dtype).float()
                for other in rounded[1:]:
                    total = total + other.to(dtype).float()
                for normed in (None, post):
                    found = []
                    for way, peer_memory.TWO_SHOT_BYTES in ((True, 1 << 30), (True, 0), (False, 0)):
                        shares[0] = way
                        mine = stream.clone()
                        out = fused.add_norm(mine, own, weight, 1e-5, False, normed, None, group)
                        found.append((mine, out.rows))
                    for other in found[1:]:
                        assert torch.equal(found[0][0], other[0])
                        assert torch.equal(found[0][1], other[1])
                    mine = stream.clone()
                    delta = total.to(dtype).to(device)
                    want = fused.add_norm(mine, delta, weight, 1e-5, False, normed).rows
                    assert torch.equal(found[0][0], mine) or normed is not None
                    torch.testing.assert_close(found[0][1], want, rtol=0.02, atol=0.02)


def look_up(group: Group, device: torch.device) -> None:
    """Rows of a table whose rows the ranks share."""
    for num_rows in (1, 5, *MANY_ROWS):
        for dtype in DTYPES:
            table = random(20 * group.size, 200, seed=num_rows, dtype=dtype)
            tokens = torch.randint(len(table), (num_rows,), generator=torch.manual_seed(num_rows))
            first = 20 * group.rank
            own, asked = table[first : first + 20].to(device), tokens.to(device)
            found = fused.rows_of_ranks(own, asked, first, 20, group)
            assert found is not None
            assert torch.equal(found.cpu(), table[tokens])


def interpreted(group: ProcessGroup, memories: list[torch.Tensor]) -> None:
    cpu = torch.device("cpu")
    own = InterpretedGroup(group, memories)
    exchange(own.memory, cpu)

    class Switch(list):  # type: ignore[type-arg]
        def __setitem__(self, key: object, value: bool) -> None:  # type: ignore[override]
            own.shares = value

    both_ways(own, cpu, Switch([True]))
    own.shares = True
    look_up(own, cpu)


def on_card(rank: int, meeting: str) -> None:
    """Runs a rank on its card."""
    import torch.distributed as dist

    from verify_service.executor.ranks.cuda_group import CudaGroup

    is_first = rank == 0
    port = int(Path(meeting).read_text())
    store = dist.TCPStore("127.0.0.1", port, NUM_RANKS, is_first, wait_for_workers=False)
    group = CudaGroup.join(rank, NUM_RANKS, NUM_RANKS, store, NoLog())
    memory, device = group._memory, torch.device("cuda", rank)
    assert memory is not None
    exchange(memory, device)

    class Switch(list):  # type: ignore[type-arg]
        def __setitem__(self, key: object, value: bool) -> None:  # type: ignore[override]
            group._memory = memory if value else None

    both_ways(group, device, Switch([True]))
    group._memory = memory
    look_up(group, device)
    # More rows than there are blocks are gathered.
    x = random(600, 4096, seed=rank).to(device)
    total = sum(random(600, 4096, seed=other) for other in range(NUM_RANKS))
    assert torch.equal(group.all_reduce(x).cpu(), total)
    assert torch.equal(group.broadcast(x.clone()).cpu(), random(600, 4096, seed=0))
    # Captured, replayed many times without a wait between them.
    x = random(4, 4096, seed=rank).bfloat16().to(device)
    for peer_memory.TWO_SHOT_BYTES in (1 << 30, 0):
        group.all_reduce(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = x
            for _ in range(8):
                out = group.all_reduce(out) / NUM_RANKS
        for _ in range(500):
            graph.replay()
        torch.cuda.synchronize()
        want = sum(random(4, 4096, seed=other).bfloat16().float() for other in range(NUM_RANKS))
        assert torch.equal(out.cpu(), (want.bfloat16() / NUM_RANKS).cpu())
    # A forward's times are told when the next one begins.
    started, found = time.monotonic_ns(), []
    for _ in range(2):
        forward(group, memory, device, lambda: None)
        torch.cuda.synchronize()
        found.append(memory.nanoseconds)
    exchanged, computed = (after - before for before, after in zip(*found, strict=True))
    assert exchanged > 0
    assert computed > 0
    assert exchanged + computed < time.monotonic_ns() - started
    group.close()


def test_ranks_exchange_blocks(tmp_path: Path) -> None:
    if INTERPRETED:
        run_ranks(NUM_RANKS, tmp_path, interpreted, shared_memories(NUM_RANKS), way="gloo")
        return
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "meeting").write_text(str(free.getsockname()[1]))
    mp.spawn(on_card, (str(tmp_path / "meeting"),), nprocs=NUM_RANKS)  # type: ignore[attr-defined]


def compute(group: ProcessGroup, memories: list[torch.Tensor], path: str, out: str) -> None:
    """Runs an interpreted rank of a model, with the kernels of a GPU."""
    own = InterpretedGroup(group, memories)
    fused.on_gpu = lambda x: True
    model = load_model(path, torch.float32, group=own)
    exchanged = logits_of(model, own)
    own.shares = False
    assert torch.equal(logits_of(model, own), exchanged)
    torch.save(exchanged, f"{out}/{group.rank}")


@pytest.mark.skipif(not INTERPRETED, reason="is for the interpreter")
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_a_model_of_two_ranks_that_exchange_rows(tmp_path: Path, name: str) -> None:
    path, meeting = make_checkpoint(tmp_path / "model", name), tmp_path / "meeting"
    meeting.mkdir()
    run_ranks(2, meeting, compute, shared_memories(2), str(path), str(tmp_path), way="gloo")
    first, second = (torch.load(tmp_path / str(rank)) for rank in range(2))
    assert torch.equal(first, second)
    expected = logits_of(load_model(path, torch.float32), SINGLE)
    torch.testing.assert_close(first, expected, atol=1e-4, rtol=1e-4)


def forward(
    group: Group, memory: PeerMemory, device: torch.device, between: Callable[[], None]
) -> None:
    """A row's lookup, a sum with its norm, and logits."""
    table, tokens = torch.ones(2, 64, device=device), torch.zeros(1, dtype=torch.int64)
    rows = fused.rows_of_ranks(table, tokens.to(device), 0, 2, group)
    assert rows is not None
    between()
    out = fused.add_norm(rows, rows.clone(), table[0], 1e-5, False, group=group).rows
    between()
    memory.all(out)


def count_time(group: ProcessGroup, memories: list[torch.Tensor]) -> None:
    """Counts a rank's time by a clock that goes on by 1 when it is read."""
    from foredraft.parallel import exchange_kernels

    own, clock = InterpretedGroup(group, memories), [0]

    def read() -> Any:
        clock[0] += 1
        return exchange_kernels.tl.full((), clock[0], exchange_kernels.tl.int64)

    def wait(time: int) -> None:
        clock[0] += time

    exchange_kernels.nanoseconds = read
    cpu = torch.device("cpu")
    for _ in range(2):
        forward(own, own.memory, cpu, lambda: wait(100))
        own.memory.first(torch.zeros(3))  # no product comes before it
        wait(10**9)
    board = Board.create(group.size)
    board = Board(board.file, board.bells, group.rank, group.size)
    board.group = own
    board.worked(10**9)  # as the host takes it
    board.beat()
    RankTimes(group.size).publish(board.progress())
    rank, found = str(group.rank), {}
    for part in ("products", "all_reduce", "waiting"):
        found[part] = 1e9 * value("foredraft_rank_seconds_total", rank=rank, part=part)
    # The second forward has told what was before it: four waits, 1 or 101 before each of the first.
    assert found == pytest.approx({"products": 203, "all_reduce": 4, "waiting": 0})


@pytest.mark.skipif(not INTERPRETED, reason="is for the interpreter")
def test_what_a_ranks_device_counts_is_published(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, count_time, shared_memories(2), way="gloo")


def wait_in_vain(number: int) -> None:
    """Waits on a card for a rank that there is not; of two processes one waits for a flag."""
    peer_memory.EAGER_PATIENCE = 1000
    device = torch.device("cuda", 0)
    memories = [torch.zeros(num_bytes(2), dtype=torch.uint8, device=device) for _ in range(2)]
    memory, dtype = PeerMemory(0, memories), (torch.float32, torch.int64)[number]
    memory.first(torch.ones(1024, dtype=dtype, device=device))
    until = time.monotonic() + 60
    while memory.lost_rank is None and time.monotonic() < until:
        time.sleep(0.01)
    # The kernel goes on.
    os._exit(0 if memory.lost_rank == 1 else 1)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter would wait for ever")
def test_a_rank_that_sends_nothing_is_found() -> None:
    mp.spawn(wait_in_vain, nprocs=2)  # type: ignore[attr-defined]
