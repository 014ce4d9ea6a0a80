"""Rows that ranks send each other beside what their GPUs compute: all arrive, whoever is slow."""

import random
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from foredraft.attention.choice import exact_attention_for
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.decoder import DecoderModel
from foredraft.models.loader import load_model
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner
from testing.checkpoints import make_checkpoint
from testing.cpu_ranks import NoLog

NUM_RANKS = min(4, max(2, torch.cuda.device_count()))
SIZE, MOST_ROWS, TURNS = 1024, 4096, 60
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < NUM_RANKS, reason="needs two NVIDIA GPUs"),
]


def rows_of(turn: int, half: int, rank: int, device: torch.device) -> torch.Tensor:
    """Rows that every rank can make anew."""
    num_rows = 1 + (turn * 977 + half * 331) % MOST_ROWS
    generator = torch.Generator(device=device).manual_seed(turn * 100 + half * 10 + rank)
    return torch.randn(num_rows, SIZE, device=device, generator=generator).bfloat16()


def on_card(rank: int, meeting: str, model: str) -> None:
    """Runs a rank on its card."""
    from foredraft.layers import fused
    from verify_service.exactness import make_exact
    from verify_service.executor.ranks.cuda_group import CudaGroup

    port = int(Path(meeting).read_text())
    store = dist.TCPStore("127.0.0.1", port, NUM_RANKS, rank == 0, wait_for_workers=False)
    group, device = CudaGroup.join(rank, NUM_RANKS, NUM_RANKS, store, NoLog()), torch.device("cuda")
    assert group.halves(torch.bfloat16) is None
    group.reserve(2 * MOST_ROWS, SIZE, torch.bfloat16)
    halves = group.halves(torch.bfloat16)
    assert halves is not None
    # Two halves in turns; each rank now and then keeps its GPU busy before it sends or reads.
    slow = random.Random(rank)
    weight, stream = torch.ones(SIZE, device=device), torch.zeros(MOST_ROWS, SIZE, device=device)
    differences = torch.zeros(1, dtype=torch.int64, device=device)

    def wait() -> None:
        if slow.random() < 0.3:
            torch.cuda._sleep(slow.randrange(3_000_000))

    def begun(turn: int, half: int) -> torch.Tensor:
        own = rows_of(turn, half, rank, device)
        wait()
        return halves[half].begin_sum(own)

    def read(turn: int, half: int, own: torch.Tensor) -> None:
        wait()
        mine = stream[: len(own)].bfloat16()
        fused.add_norm(mine, own, weight.bfloat16(), 1e-5, False, None, None, halves[half])
        total = rows_of(turn, half, 0, device).float()
        for other in range(1, NUM_RANKS):
            total += rows_of(turn, half, other, device)
        differences.add_((mine != total.bfloat16()).sum())

    pending = [begun(0, half) for half in range(2)]
    for turn in range(1, TURNS):
        for half in range(2):
            own, pending[half] = pending[half], torch.empty(0)
            read(turn - 1, half, own)
            del own
            pending[half] = begun(turn, half)
    for half in range(2):
        read(TURNS - 1, half, pending[half])
    assert differences.item() == 0
    # More than there is room for goes another way.
    large = torch.full((2 * MOST_ROWS, SIZE), 1.0 + rank, device=device).bfloat16()
    own = halves[0].begin_sum(large)
    gathered = halves[0].gathered(own)
    assert gathered[:, 0, 0].tolist() == [1.0 + other for other in range(NUM_RANKS)]
    # A model's forwards, in parts of columns and whole, have the same bits both ways.
    loaded = load_model(model, torch.bfloat16, device, group=group)
    make_exact(loaded, "strict")
    whole = forward(loaded, device)
    loaded._halved_rows = 2
    found = [forward(loaded, device) for _ in range(2)]
    for halved in found:
        assert all(torch.equal(one, other) for one, other in zip(halved, whole, strict=True))
    group.close()


def forward(model: DecoderModel, device: torch.device) -> list[torch.Tensor]:
    """Returns logits, hidden states, a captured stream and the cache of two chunks of prompts."""
    config, dtype = model.config, torch.bfloat16
    kv = PagedKV.for_model(config, 400, 16, dtype, device, 0, None, model.num_kv_heads)
    runner, found = ModelRunner(model, kv, exact_attention_for(device)), []
    for start, num_rows in ((0, 1500), (1500, 700)):
        tokens = [(7 * i + start) % config.vocab_size for i in range(num_rows)]
        chunks = [
            SequenceRows.chunk(list(range(1, 150)), start, tokens),
            SequenceRows.chunk(list(range(150, 350)), start, tokens[:900]),
        ]
        out = runner.forward(chunks, (1,))
        found += [out.logits, out.hidden, *out.captured]
    return [*found, kv.data[:, :, 16:]]


def test_rows_arrive_beside_other_work(tmp_path: Path) -> None:
    sizes = {"hidden_size": SIZE, "num_attention_heads": 16, "num_key_value_heads": 4}
    model = make_checkpoint(tmp_path / "model", intermediate_size=2560, head_dim=64, **sizes)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "meeting").write_text(str(free.getsockname()[1]))
    arguments = str(tmp_path / "meeting"), str(model)
    mp.spawn(on_card, arguments, nprocs=NUM_RANKS)  # type: ignore[attr-defined]
