"""Functions that are captured once and replayed after that."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draft_service.steps import graph_cache
from draft_service.steps.graph_cache import GraphCache

CPU = torch.device("cpu")


class Graph:
    """Counts replays."""

    num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Graphs that were captured, without CUDA: what is captured does not run."""
    graphs: list[Graph] = []

    def capture(run: Callable[[], object], pool: Any) -> tuple[Graph, None]:
        graphs.append(Graph())
        return graphs[-1], None

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(graph_cache, "run_aside", lambda run, device: run())
    monkeypatch.setattr(graph_cache, "capture_graph", capture)
    return graphs


def test_until_it_starts_functions_just_run(captured: list[Graph]) -> None:
    cache, runs = GraphCache(CPU), []
    assert cache.is_ready("a")
    for i in range(3):
        cache.run("a", lambda i=i: runs.append(i))  # type: ignore[misc]
    assert runs == [0, 1, 2]
    assert captured == []


def test_each_function_runs_once_and_is_replayed_later(captured: list[Graph]) -> None:
    cache, runs = GraphCache(CPU), []
    cache.start()
    for key in ("a", "b", "a", "a"):
        assert cache.is_ready(key) == (key in runs)
        cache.run(key, lambda key=key: runs.append(key))  # type: ignore[misc]
    assert runs == ["a", "b"]
    assert [graph.num_replays for graph in captured] == [2, 0]
    cache.close()
    assert not cache.is_ready("a")
