"""The kernels of `--exactness strict` compiled for cards, which needs none of them: the interpreter
takes what the compiler refuses.
"""

import importlib.util

import numpy as np
import pytest
import torch

from foredraft import device_limits
from foredraft.attention import exact_triton
from foredraft.attention.base import SequenceSpan
from foredraft.attention.exact_triton import ExactAttention
from foredraft.attention.triton_plan import SharedKeys, plan_of_spans
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.batch import ancestor_mask
from testing.attention_spans import batch_of
from testing.triton_compiled import SHARED, Recorder
from testing.triton_device import INTERPRETED

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or INTERPRETED, reason="needs Triton's compiler"
)
KERNELS = ("attend", "fold", "find_paths")
# Rows of each sequence, tree nodes or none, and how many sequences there are.
STEPS = {"row": (1, False, 1), "trees": (8, True, 48), "tree": (40, True, 1), "chunk": (512, False, 1)}  # fmt: skip  # noqa: E501
SHARED_KEYS = "rows with shared keys"
LISTED = "a chunk and a tree"  # blocks are listed, and as large as the chunk's


BF16, FP8 = torch.bfloat16, torch.float8_e5m2
CASES = [
    *((capability, 128, BF16, None, step) for capability in (86, 90) for step in STEPS),
    (80, 128, BF16, None, "chunk"),
    (86, 256, BF16, None, "chunk"),
    (86, 256, BF16, None, "trees"),
    (86, 128, FP8, None, "chunk"),
    (90, 128, FP8, None, "trees"),
    (90, 256, BF16, 128, "row"),
    (90, 256, BF16, 128, "trees"),
    (90, 256, BF16, 128, "tree"),
    (90, 128, BF16, None, LISTED),
    (86, 128, BF16, None, LISTED),
    (86, 256, BF16, 128, LISTED),
    (90, 128, BF16, None, SHARED_KEYS),
    (86, 256, BF16, None, SHARED_KEYS),
]


@pytest.mark.parametrize(("capability", "head_dim", "kept", "window", "step"), CASES)
def test_attention_compiles_and_fits(monkeypatch, capability, head_dim, kept, window, step):
    from foredraft.attention import exact_fold_kernels, exact_kernels

    pair = divmod(capability, 10)
    able = {"launch_pdl": pair >= (9, 0), "DEPENDENT": pair >= (9, 0)}
    monkeypatch.setattr(exact_triton, "overlapped", lambda device: able)
    monkeypatch.setattr(device_limits, "INTERPRETED_UNITS", 132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: pair)
    room = device_limits.has_room.__wrapped__(torch.device("cuda"))
    monkeypatch.setattr(exact_triton, "has_room", lambda device: room)
    recorders = []
    for name in KERNELS:
        module = exact_kernels if name == "attend" else exact_fold_kernels
        recorders.append(Recorder(getattr(module, name)))
        monkeypatch.setattr(module, name, recorders[-1])
    kv = PagedKV(1, 100, 16, 8, head_dim, kept, torch.device("cpu"))
    more = {LISTED: [(512, False, 1), (8, True, 1)], SHARED_KEYS: [(1, False, 80)]}
    shapes = more.get(step) or [STEPS[step]]
    spans: list[SequenceSpan] = []
    for rows, is_tree in [(rows, is_tree) for rows, is_tree, count in shapes for _ in range(count)]:
        first = sum(span.num_rows for span in spans)
        positions, mask = np.arange(700, 700 + rows), None
        if is_tree:
            mask = ancestor_mask([-1] * (rows - 1))
            positions = 700 + mask.sum(1).numpy() - 1
        spans.append(
            SequenceSpan(
                first, positions, np.arange(100), 0, 700, 700, mask, positions if is_tree else None
            )
        )
    batch = batch_of(spans, 16)
    backend = ExactAttention()
    if step == LISTED:
        batch.plan = plan_of_spans(batch, kv, 4)
        batch.plan.blocks = torch.zeros(2, 40, dtype=torch.int32)
    plan = backend.plan(batch, kv, (window,), 4)
    if step == SHARED_KEYS:
        numbers = torch.zeros(80, dtype=torch.int32)
        plan.shared = SharedKeys(*[numbers] * 5, plan.page_tables)
    queries = torch.zeros(batch.num_rows, 32, head_dim, dtype=torch.bfloat16)
    backend.attend(plan, queries, 0, window, 0.1, torch.empty(batch.num_rows, 32 * head_dim).half())
    for recorder in recorders:
        if recorder.launches:
            assert max(recorder.shared_memory(capability)) <= SHARED[capability]
