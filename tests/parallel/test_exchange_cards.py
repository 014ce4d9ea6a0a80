"""The kernels that exchange blocks compiled for cards, which needs none of them."""

import importlib.util

import pytest
import torch

from foredraft.layers import fused
from foredraft.parallel import peer_memory
from foredraft.parallel.peer_memory import PeerMemory, num_bytes
from testing.triton_compiled import SHARED, Recorder
from testing.triton_device import INTERPRETED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or INTERPRETED, reason="needs Triton's compiler"
    ),
]


class LastRank:
    """The last of several ranks, which has nobody to talk to."""

    def __init__(self, size: int) -> None:
        memories = [torch.zeros(num_bytes(size), dtype=torch.uint8) for _ in range(size)]
        self.rank, self.size = size - 1, size
        self.memory = PeerMemory(self.rank, memories)
        self.shares = True

    def memory_for(self, num_rows: int, size: int, dtype: torch.dtype) -> PeerMemory | None:
        return self.memory if self.shares else None

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(self.size, *x.shape)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(monkeypatch: pytest.MonkeyPatch, capability: int, size: int) -> None:
    from foredraft.layers import triton_kernels
    from foredraft.parallel import exchange_kernels

    able = {"launch_pdl": capability >= 90, "DEPENDENT": capability >= 90}
    recorders = []
    for module, name in (
        (exchange_kernels, "exchange"),
        (triton_kernels, "norm"),
        (triton_kernels, "norm_of_ranks"),
        (triton_kernels, "rows_of_ranks"),
    ):
        recorders.append(Recorder(getattr(module, name)))
        monkeypatch.setattr(module, name, recorders[-1])
    for module in (peer_memory, fused):
        monkeypatch.setattr(module, "overlapped", lambda device: able)
    group = LastRank(size)
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = torch.zeros(4, 4096, dtype=dtype), torch.ones(4096, dtype=dtype)
        group.memory.sum(x)
        group.memory.all(x)
        group.memory.all(torch.zeros(300, 4096, dtype=dtype))
        fused.rows_of_ranks(x, torch.zeros(4, dtype=torch.int64), 0, 4, group)
        for shares in (True, False):
            group.shares = shares
            for delta in (x, torch.zeros(2, 4, 4096)):
                fused.add_norm(x.clone(), delta, weight, 1e-5, False, None, None, group)
    group.memory.first(torch.zeros(40, dtype=torch.int32))
    group.memory.first(torch.zeros(40, dtype=torch.int64))
    for recorder in recorders:
        assert max(recorder.shared_memory(capability)) <= SHARED[capability]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [200, 4096])
def test_a_norm_adds_up_in_one_order(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: int
) -> None:
    """However a row's parts come together, and beside any number of others."""
    from foredraft.layers import triton_kernels

    recorders = []
    for name in ("norm_of_ranks", "norm"):
        recorders.append(Recorder(getattr(triton_kernels, name)))
        monkeypatch.setattr(triton_kernels, name, recorders[-1])
    monkeypatch.setattr(fused, "overlapped", lambda device: {"launch_pdl": True, "DEPENDENT": True})
    group, weight = LastRank(2), torch.ones(size, dtype=dtype)
    for group.shares in (True, False):
        for num_rows in (4, peer_memory.PROGRAMS + 1):
            x = torch.zeros(num_rows, size, dtype=dtype)
            for delta in (x, torch.zeros(2, num_rows, size)):
                fused.add_norm(x.clone(), delta, weight, 1e-5, False, None, None, group)
    exchanged, gathered = (recorder.reductions(90) for recorder in recorders)
    assert len(exchanged) == len(gathered) == 4
    found = exchanged + gathered
    assert len({layouts[-1] for layouts in found}) == 1
