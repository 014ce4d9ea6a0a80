"""Capturing a graph while graphs that nobody uses any more wait to be freed."""

import gc

import pytest
import torch

from foredraft.runner.aside import capture_graph, run_aside
from testing.triton_device import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


def test_graphs_in_dead_cycles_do_not_end_a_capture() -> None:
    device = torch.device("cuda")
    x = torch.ones(64, device=device)
    pool = torch.cuda.graph_pool_handle()
    run_aside(lambda: x + 1, device)
    for _ in range(8):
        dead: list[object] = [capture_graph(lambda: x + 1, pool)[0]]
        dead.append(dead)
        del dead

    def work() -> torch.Tensor:
        kept = [[i] for i in range(5 * sum(gc.get_threshold()))]  # enough for a collection
        return x * 2 + len(kept) * 0

    assert gc.isenabled()
    graph, y = capture_graph(work, pool)
    assert gc.isenabled()
    graph.replay()
    assert y.tolist() == [2.0] * 64
