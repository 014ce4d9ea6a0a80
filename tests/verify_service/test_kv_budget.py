"""The memory left for KV on a GPU, and the lines that say where the rest goes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.attention.paged_triton import TritonAttention
from foredraft.config.services import VerifyConfig
from foredraft.transport import cuda
from testing.checkpoints import make_checkpoint
from testing.eager_graphs import Event
from testing.meta_gpu import META, meta_gpu
from verify_service.executor.captured.shapes import batch_sizes
from verify_service.kv_budget import kv_budget, neighbours, step_limits
from verify_service.target import load_share
from verify_service.workspace import StepLimits, workspace_of

TOTAL, FREE = 24 << 30, 20 << 30


def test_kv_gets_what_steps_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE, TOTAL))
    caplog.set_level("INFO")
    config = VerifyConfig(
        model_path=str(make_checkpoint(tmp_path)), device="cpu", max_running_requests=20
    )
    target = replace(load_share(config), device=META, attention=TritonAttention())
    limits = step_limits(config, target, [], config.tree_limits, 512, 16)
    assert limits == StepLimits(512, 20, 1, 512, 16, 20)
    with meta_gpu(monkeypatch):
        left = kv_budget(config, target, [], limits)
        workspace = workspace_of(target.model, target.attention, limits)
    assert left == FREE - int(TOTAL * 0.15) - workspace.total
    assert f"workspace in MiB: {workspace}" in caplog.messages
    assert any(line.endswith(f"kv {left / 2**20:.0f}") for line in caplog.messages)


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        ({"cuda_graph_max_bs": 8}, {"graph_batch": 8}),
        ({"cuda_graph_max_bs": 99}, {"graph_batch": 20}),
        ({"disable_cuda_graph": True}, {"graph_batch": 0}),
        ({"chunked_prefill_size": 64}, {"chunk": 64}),
        ({"speculative_accept_threshold_acc": 0.5}, {"is_lossy": True}),
    ],
)
def test_flags_that_steps_follow(tmp_path: Path, flags: dict, changed: dict) -> None:
    config = VerifyConfig(
        model_path=str(make_checkpoint(tmp_path)), device="cpu", max_running_requests=20, **flags
    )
    limits = step_limits(config, load_share(config), [], config.tree_limits, 512, 16)
    assert limits == replace(StepLimits(512, 20, 1, 512, 16, 20), **changed)
    assert not limits.graph_batch or batch_sizes(limits.graph_batch)[-1] == limits.graph_batch


def test_drafts_on_cards_without_a_rank_take_none_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "uuid_of", lambda device: f"GPU-{device.index or 0}")
    infos = [draft_pb2.GetDraftInfoResponse(device_uuid=f"GPU-{i}") for i in range(3)]
    infos.append(draft_pb2.GetDraftInfoResponse())  # on the host
    links: Any = [SimpleNamespace(client=SimpleNamespace(info=info)) for info in (*infos, None)]
    path = str(make_checkpoint(tmp_path))
    for size, count in ((1, 1), (2, 2)):
        config = VerifyConfig(model_path=path, tensor_parallel_size=size)
        target: Any = SimpleNamespace(device=torch.device("cuda"))
        assert neighbours(config, target, links) == [*infos[:count], infos[3]]
        target.device = torch.device("cpu")
        assert neighbours(config, target, links) == [infos[3]]
