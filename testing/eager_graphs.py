"""Captured decode steps without CUDA: a "graph" runs its operations again, into the memory of its first run."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from foredraft.attention.paged_triton import TritonAttention
from foredraft.config.services import VerifyConfig
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.model_runner import ModelRunner
from verify_service import startup
from verify_service.engine.engine import EngineLimits
from verify_service.executor.decode_graphs import DecodeGraphs
from verify_service.executor.decode_step import DecodeStep
from verify_service.executor.graph_step import GraphStep
from verify_service.executor.mixed_graphs import MixedGraphs, MixedKind
from verify_service.executor.sampler import Chooser, Thresholds


class Event:
    """What is done at once is done."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Graph:
    """Runs `run` when it is replayed."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run, self.result = run, run()

    def replay(self) -> None:
        overwrite(self.result, self._run())


def overwrite(old: Any, new: Any) -> None:
    """Copies all tensors of a structure into those of another like it."""
    if isinstance(old, torch.Tensor):
        old.copy_(new)
    elif dataclasses.is_dataclass(old):
        for field in dataclasses.fields(old):
            overwrite(getattr(old, field.name), getattr(new, field.name))
    elif isinstance(old, list):
        for one, other in zip(old, new, strict=True):
            overwrite(one, other)


class EagerGraphs(DecodeGraphs):
    """See the module."""

    def _run_aside(self, run: Callable[[], object]) -> None:
        pass

    def _capture(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        keys, step = self._kv.data.clone(), self._step
        kept = [step.state, step.late.words]
        before = [tensor.clone() for tensor in kept]
        graph = Graph(run)
        # A capture does nothing.
        self._kv.data.copy_(keys)
        for tensor, values in zip(kept, before, strict=True):
            tensor.copy_(values)
        return graph, graph.result


class EagerMixedGraphs(MixedGraphs):
    """Likewise for forwards with prompts."""

    def _capture(self, kind: MixedKind) -> Any:
        self._make_room(kind)
        return Graph(lambda: self.compute(kind))


def use_eager_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on engines on the CPU run such graphs, in Triton's interpreter."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    made = PagedKV.for_model

    def with_scratch(
        config: Any, pages: int, size: int, dtype: Any, device: Any, *rest: Any
    ) -> Any:
        return made(config, pages, size, dtype, device, 1, *rest[1:])

    def target_step(
        config: VerifyConfig,
        runner: ModelRunner,
        limits: EngineLimits,
        thresholds: Thresholds,
        *rest: Any,
    ) -> GraphStep:
        chooser = Chooser(limits.vocab_size, runner.model.device, limits.eos_token_ids, thresholds)
        EagerGraphs._kv = runner.kv
        step = DecodeStep(
            runner.model,
            runner.kv,
            TritonAttention(),
            max_batch=limits.max_running_requests,
            max_rows=limits.max_nodes + 1,
            max_path=config.tree_limits[0] + 1,
            max_tokens=limits.context_length,
            num_slots=limits.max_running_requests,
        )
        mixed = EagerMixedGraphs(
            runner.model,
            runner.kv,
            TritonAttention(),
            tables=step.tables,
            max_tree=step.max_rows,
            max_rows=config.chunked_prefill_size,
        )
        return GraphStep(runner, chooser, EagerGraphs(step), mixed)

    monkeypatch.setattr(startup.PagedKV, "for_model", with_scratch)
    monkeypatch.setattr(startup, "_target_step", target_step)
