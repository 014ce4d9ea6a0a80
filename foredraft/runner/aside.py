"""CUDA graph capture, and warm-up runs on a stream of their own.

What is captured must have run once before, outside of the graph.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from foredraft.kernel_launch import no_collection

T = TypeVar("T")


def run_aside(run: Callable[[], object], device: torch.device) -> None:
    """Runs a function on a side stream, ordered after and before the work of the current stream."""
    current, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        run()
    current.wait_stream(side)


def capture_graph(run: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """Captures the work that `run` puts into the current stream.

    Returns the graph, and what `run` returned.

    Args:
        pool: Memory that is shared by graphs which never run at the same time.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads of this process may use CUDA meanwhile: a draft may be attached at any time.
    with (
        no_collection(),
        torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
    ):
        result = run()
    return graph, result


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # One for all: cuBLAS keeps a workspace (32 MiB on Hopper) for every stream that it has ever
    # worked on.
    return torch.cuda.Stream(device)
