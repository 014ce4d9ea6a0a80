"""Capturing a graph while others wait to be freed, and after one that failed."""

import gc

import pytest
import torch

from foredraft.runner.aside import capture_graph, ran_out, run_aside
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


def test_captures_after_one_that_ran_out_of_memory() -> None:
    device = torch.device("cuda")
    x = torch.ones(64, device=device)
    pool, before = torch.cuda.graph_pool_handle(), torch.cuda.current_stream()
    kept = [capture_graph(lambda: x + 1, pool)]
    with pytest.raises(RuntimeError) as failed:
        capture_graph(lambda: (x + 2).new_empty(1 << 50), pool)
    assert ran_out(failed.value)
    assert torch.cuda.current_stream() == before
    kept.append(capture_graph(lambda: x * 4, pool))
    for (graph, y), want in zip(kept, (2.0, 4.0), strict=True):
        graph.replay()
        assert y.tolist() == [want] * 64
