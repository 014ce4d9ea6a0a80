"""Captures parts of a decode step as CUDA graphs."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from foredraft.models.decoder import ModelOutput
from foredraft.runner.aside import capture_graph, run_aside
from verify_service.executor.captured.step import DecodeStep

T = TypeVar("T")


class GraphCapturer:
    """Captures what a `DecodeStep` computes, and leaves the sequences' state as it was.

    Attributes:
        pool: Memory of the graphs; shared with other graphs that never run at the same time.
    """

    def __init__(self, step: DecodeStep) -> None:
        self._step = step
        self.pool = torch.cuda.graph_pool_handle()

    def run_and_capture(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Runs once, which compiles missing kernels, and then captures."""
        self.run_aside(run)
        return self.capture(run)

    def run_aside(self, run: Callable[[], object]) -> None:
        """Runs once without capturing."""
        state = self._step.state.clone()
        try:
            with self._step.without_repeats():
                run_aside(run, self._step.inputs.device)
        finally:  # a step that goes on from here must not begin where this one has ended
            self._step.state.copy_(state)

    def capture(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Captures what has run before; returns the graph, and what `run` returned."""
        return capture_graph(run, self.pool)


def without_logits(output: ModelOutput) -> ModelOutput:
    """Drops the logits, so that other graphs can use the memory of the largest tensor."""
    return replace(output, logits=output.logits.new_empty(0))
