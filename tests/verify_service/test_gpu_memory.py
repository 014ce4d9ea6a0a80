"""A GPU whose memory ends while a verifier starts: what is said names the flags that help."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.errors import ConfigError
from foredraft.models.registry import resolve_model_path
from testing.engines import running_engine
from testing.triton_device import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.fixture
def leave() -> Iterator[Callable[[int], None]]:
    """Leaves this process so many bytes more of the GPU, whatever others leave it."""

    def limit(room: int) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture(scope="module")
def demo() -> Path:
    return resolve_model_path("foredraft-demo")


def start(path: Path, **flags: Any) -> None:
    with running_engine(path, "NONE", device="cuda", **flags):
        pass


def test_no_room_beside_the_weights(demo):
    with pytest.raises(ConfigError, match=r"--mem-fraction-static.*--max-running-requests"):
        start(demo, max_total_tokens=None, mem_fraction_static=1e-4)


def test_no_memory_for_the_kv_cache(demo, leave):
    leave(1 << 29)
    with pytest.raises(ConfigError, match="for the KV cache: lower --max-total-tokens"):
        start(demo, max_total_tokens=1 << 22)


def test_no_memory_for_the_graphs(demo, leave, monkeypatch):
    from verify_service.executor.captured.graphs import DecodeGraphs

    warm_up = DecodeGraphs.warm_up

    def without_memory(graphs: DecodeGraphs, capture: tuple[int, ...]) -> None:
        leave(0)
        warm_up(graphs, capture)

    monkeypatch.setattr(DecodeGraphs, "warm_up", without_memory)
    flags = (
        r"--max-total-tokens, --cuda-graph-max-bs, --speculative-num-draft-tokens or --max-running"
    )
    with pytest.raises(ConfigError, match=f"CUDA graphs: lower {flags}"):
        start(demo)
    monkeypatch.undo()
    leave(1 << 32)
    start(demo)  # nothing was left behind that would keep it from starting
