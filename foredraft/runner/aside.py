"""Runs something once for real on a stream of its own, as it has to be before it is captured as a CUDA graph."""

import functools
from collections.abc import Callable

import torch


def run_aside(run: Callable[[], object], device: torch.device) -> None:
    """Behind the current stream, which goes on behind it."""
    current, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        run()
    current.wait_stream(side)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # One for all: cuBLAS keeps a workspace (32 MiB on Hopper) for every stream that it has ever worked on.
    return torch.cuda.Stream(device)
