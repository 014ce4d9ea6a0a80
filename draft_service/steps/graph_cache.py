"""CUDA graphs of functions that run again and again."""

from collections.abc import Callable, Hashable
from typing import Any

import torch

from foredraft.runner.aside import capture_graph, run_aside


class GraphCache:
    """Captures functions as CUDA graphs when they first run, and replays them after that.

    Until `start`, functions run operation by operation, on any device.

    Args:
        device: Device that the functions run on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._captures = False
        self._pool: Any = None

    def start(self) -> None:
        """Captures functions from now on."""
        self._captures, self._pool = True, torch.cuda.graph_pool_handle()

    def is_ready(self, key: Hashable) -> bool:
        """Returns whether the function of a key runs without being captured first, for which the
        host waits.
        """
        return not self._captures or key in self._graphs

    def run(self, key: Hashable, function: Callable[[], object]) -> None:
        """Runs a function; one that was captured under the same key is replayed instead."""
        if not self._captures:
            function()
        elif (graph := self._graphs.get(key)) is not None:
            graph.replay()
        else:
            # A real run compiles missing kernels, and is this step's result.
            run_aside(function, self._device)
            self._graphs[key], _ = capture_graph(function, self._pool)

    def close(self) -> None:
        """Drops the graphs, which hold memory and addresses, once none runs."""
        if self._captures:
            torch.cuda.synchronize(self._device)
        self._graphs.clear()
