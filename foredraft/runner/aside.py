"""CUDA graph capture, and warm-up runs on a stream of their own.

What is captured must have run once before, outside of the graph.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from foredraft.kernel_launch import no_collection

T = TypeVar("T")

# Parts of messages of other allocators than torch's for GPUs: memory is used up.
RAN_OUT = ("out of memory", "ALLOC_FAILED", "can't allocate memory")


def ran_out(error: BaseException | None) -> bool:
    """Returns whether an error means that memory ran out.

    A capture that such an error broke off may hide it behind an error of its own.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in RAN_OUT):
            return True
        error = error.__cause__ or error.__context__
    return False


def run_aside(run: Callable[[], object], device: torch.device) -> None:
    """Runs a function on a side stream, ordered after and before the work of the current stream."""
    current, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            run()
    finally:  # what was started before an error still runs
        current.wait_stream(side)


def capture_graph(run: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """Captures the work that `run` puts into the current stream.

    Returns the graph, and what `run` returned.

    Args:
        pool: Memory that is shared by graphs which never run at the same time.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads of this process may use CUDA meanwhile: a draft may be attached at any time.
    with captured_into(graph, pool, "thread_local"):
        result = run()
    return graph, result


@contextmanager
def captured_into(graph: torch.cuda.CUDAGraph, pool: Any, error_mode: str) -> Iterator[None]:
    """Captures the work of the `with` block into a graph.

    Args:
        pool: See `capture_graph`.
        error_mode: Which threads' calls of CUDA end the capture, see `torch.cuda.graph`.
    """
    before = torch.cuda.current_stream()
    with no_collection():
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode=error_mode):
                yield
        except BaseException:
            # Where the capture cannot be ended either, torch stays on the capture's stream.
            torch.cuda.set_stream(before)
            raise


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # One for all: cuBLAS keeps a workspace (32 MiB on Hopper) for every stream that it has ever
    # worked on.
    return torch.cuda.Stream(device)
