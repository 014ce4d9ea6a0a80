"""Captures that are thrown away, without CUDA: whatever was made in one holds nothing sensible."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draft_service.steps import graph_cache, graphs
from draft_service.steps.draft_step import DraftStep


class Made(TorchDispatchMode):
    """Collects the tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {self._key(one) for one in tree_leaves((args, kwargs)) if _is_tensor(one)}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if _is_tensor(one) and self._key(one) not in given:
                self._made.append(weakref.ref(one))
        return result

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def spoil(self) -> None:
        """Overwrites those that are still there."""
        for made in self._made:
            tensor = made()
            if tensor is not None and tensor.dtype == torch.bool:
                tensor.logical_not_()
            elif tensor is not None:
                tensor.add_(7)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


class _Graph:
    """Runs its function when it is replayed."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.replay = run


def _compile_ahead(runs: Sequence[Callable[[], object]], device: torch.device) -> int:
    made = Made()
    for run in runs:
        assert isinstance(run, partial)
        own: DraftStep = run.func.__self__  # type: ignore[attr-defined]
        own.uploads.records(0, run.args[0])  # padding alone, so that nothing else is written
        own.uploads.send(run.args[0])
        with made:
            run()
        own.uploads.finish()
    made.spoil()
    return 0


def capture_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets drafts on the CPU capture their steps; graphs run the operations again."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(graph_cache, "run_aside", lambda run, device: run())
    monkeypatch.setattr(graph_cache, "capture_graph", lambda run, pool: (_Graph(run), None))
    monkeypatch.setattr(graphs, "compile_ahead", _compile_ahead)
