"""The kernels with large tiles on cards with less shared memory than an H200: compiled for them,
which needs none of them.
"""

import importlib.util

import numpy as np
import pytest
import torch

from foredraft import device_limits
from foredraft.attention import paged_triton
from foredraft.attention.base import SequenceSpan
from foredraft.attention.paged_triton import TritonAttention
from foredraft.attention.split_kv import Balance
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers import skinny_gemm
from testing.attention_spans import batch_of
from testing.triton_compiled import SHARED, Recorder
from testing.triton_device import INTERPRETED

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or INTERPRETED, reason="needs Triton's compiler"
)
ROWS = {"tree": 32, "chunk": 512}


def pretend(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    """Lets the launchers take the CPU for a card of that kind."""
    pair = divmod(capability, 10)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: pair)
    able = {"launch_pdl": pair >= (9, 0), "DEPENDENT": pair >= (9, 0)}
    monkeypatch.setattr(paged_triton, "overlapped", lambda device: able)
    monkeypatch.setattr(skinny_gemm, "overlapped", lambda device: able)
    room = device_limits.has_room.__wrapped__(torch.device("cuda"))
    monkeypatch.setattr(paged_triton, "has_room", lambda device: room)


@pytest.mark.parametrize("rows", list(ROWS))
@pytest.mark.parametrize(
    ("head_dim", "kept"),
    [(128, torch.bfloat16), (128, torch.float8_e5m2), (256, torch.bfloat16)],
    ids=["128", "128-8-bit", "256"],
)
@pytest.mark.parametrize("capability", [80, 86])  # of 89 and 120 as of 86
def test_attention_fits(monkeypatch, capability, head_dim, kept, rows):
    from foredraft.attention import split_kv_kernels, triton_kernels

    pretend(monkeypatch, capability)
    recorder = Recorder(triton_kernels.attend)
    monkeypatch.setattr(triton_kernels, "attend", recorder)
    for module, name in (
        (triton_kernels, "combine"),
        (triton_kernels, "combine_items"),
        (split_kv_kernels, "build_work_lists"),
    ):
        monkeypatch.setattr(module, name, Recorder(getattr(module, name)))
    kv = PagedKV(1, 40, 16, 2, head_dim, kept, torch.device("cpu"))
    count = ROWS[rows]
    mask = torch.ones(count, count, dtype=torch.bool).tril() if rows == "tree" else None
    span = SequenceSpan(0, np.arange(64, 64 + count), np.arange(40), 0, 64, 64, mask)
    backend, batch = TritonAttention(), batch_of([span], 16)
    plan = backend.plan(batch, kv, (None,), 4)
    queries = torch.zeros(count, 8, head_dim, dtype=torch.bfloat16)
    batch.plan = plan
    for splits in (1, 4) if rows == "tree" else (1,):
        for plan.balance in (None, Balance(torch.bfloat16)) if rows == "tree" else (None,):
            plan.num_splits = splits
            backend.plan(batch, kv, (None,), 4)
            backend.attend(plan, queries, 0, None, 0.1, queries.view(count, -1))
    assert max(recorder.shared_memory(capability)) <= SHARED[capability]


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("rows", [4, 64])
def test_products_of_few_rows_fit_where_they_are_used(monkeypatch, rows, gated):
    from foredraft.layers import skinny_gemm_kernels

    pretend(monkeypatch, 90)
    recorder = Recorder(skinny_gemm_kernels.multiply)
    monkeypatch.setattr(skinny_gemm_kernels, "multiply", recorder)
    x = torch.zeros(rows, 4096, dtype=torch.bfloat16)
    for outputs in (4096, 16384):
        weight = torch.empty(outputs, 4096, dtype=torch.bfloat16)
        skinny_gemm.multiply(x, weight, None, gated)
    assert max(recorder.shared_memory(90)) <= SHARED[90]


@pytest.mark.parametrize(
    ("capability", "used"), [(80, False), (89, False), (90, True), (100, True), (120, False)]
)
def test_products_of_few_rows_are_for_cards_that_have_room(monkeypatch, capability, used):
    pretend(monkeypatch, capability)

    class OnGpu(torch.Tensor):
        is_cuda = True

    weight = torch.zeros(64, 64, dtype=torch.bfloat16).as_subclass(OnGpu)
    assert skinny_gemm.supports(torch.zeros(2, 64, dtype=torch.bfloat16), weight) is used
