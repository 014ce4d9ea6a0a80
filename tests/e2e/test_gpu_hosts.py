"""Ranks on the GPUs of two hosts: two process groups of this machine, each sees one card."""

import os
import signal
from pathlib import Path

import pytest
import torch

from foredraft.models.registry import resolve_model_path
from testing.drafts import card_variables
from testing.hosts import Host, other_ranks
from testing.stack import eventually, free_port, long_answer, running_stack
from testing.triton_device import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]
VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture(scope="module")
def demo() -> Path:
    return resolve_model_path("foredraft-demo")


def test_two_hosts_with_a_card_each(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two NVIDIA GPUs")
    first, second = card_variables(0), card_variables(1)
    own = {"device": "cuda", "num_threads": None, "dtype": "bfloat16", "tensor_parallel_size": 2}
    with running_stack(demo, **own, speculative_algorithm="NONE") as stack:
        expected = long_answer(stack.urls["http"])
    hosts = {"nnodes": 2, "dist_init_addr": f"127.0.0.1:{free_port()}"}
    flags = {name: value for name, value in {**own, **hosts}.items() if value is not None}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    given += ["--node-rank=1", f"--model-path={demo}", "--port=0", "--grpc-port=0"]
    monkeypatch.setenv(VISIBLE, first[VISIBLE])
    lines: list[str] = []
    with (
        Host(given, variables=second) as host,
        running_stack(demo, lines, **own, **hosts) as stack,
    ):
        assert long_answer(stack.urls["http"]) == expected, "with n-grams, over NCCL"
        [pid] = other_ranks(lines)
        [verifier] = [state.pid for state in stack.states() if state.name == "verify"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not Path(f"/proc/{verifier}").exists())
        stack.wait_healthy(timeout=300)
        assert long_answer(stack.urls["http"]) == expected, "all ranks are started anew"
    assert any("has closed its connection" in line for line in lines)
    assert host.process.returncode == 0
