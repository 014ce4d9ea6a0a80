"""Captured decode steps without CUDA: a "graph" runs its operations again, into the memory of its
first run.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from foredraft.attention.base import AttentionBackend
from foredraft.attention.paged_triton import TritonAttention
from foredraft.config.services import VerifyConfig
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.model_runner import ModelRunner
from verify_service import startup
from verify_service.attach.links import DraftLink
from verify_service.engine.engine import EngineLimits
from verify_service.executor.captured import graph_capture
from verify_service.executor.captured.executor import GraphExecutor
from verify_service.executor.captured.graph_capture import GraphCapturer
from verify_service.executor.captured.graphs import DecodeGraphs
from verify_service.executor.captured.listener import StepListener
from verify_service.executor.captured.mixed import MixedGraphs, MixedKind
from verify_service.executor.captured.step import DecodeStep
from verify_service.executor.choice.sampler import Sampler
from verify_service.executor.ranks import graphs, messages
from verify_service.flag_notes import thresholds_of
from verify_service.sizes import chunk_size
from verify_service.target import Target, load_share
from verify_service.target_executor import graph_sizes


class Event:
    """Stands for an event that is complete at once."""

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
    """Copies all tensors of a structure into the tensors of another like it."""
    if isinstance(old, torch.Tensor):
        old.copy_(new)
    elif dataclasses.is_dataclass(old):
        for field in dataclasses.fields(old):
            overwrite(getattr(old, field.name), getattr(new, field.name))
    elif isinstance(old, list):
        for one, other in zip(old, new, strict=True):
            overwrite(one, other)


class EagerGraphCapturer(GraphCapturer):
    """Captures without CUDA, see the module."""

    _kv: PagedKV  # cache of the newest engine

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        """Runs once, and takes back what that has changed: a capture does nothing."""
        keys, step = self._kv.data.clone(), self._step
        kept = [step.state, step.two_phase.histories]
        before = [tensor.clone() for tensor in kept]
        graph = Graph(run)
        self._kv.data.copy_(keys)
        for tensor, values in zip(kept, before, strict=True):
            tensor.copy_(values)
        return graph, graph.result


class EagerGraphs(DecodeGraphs):
    """Decode graphs without CUDA, see the module."""

    def __init__(self, step: DecodeStep, listener: StepListener | None = None) -> None:
        super().__init__(step, listener, EagerGraphCapturer(step))


class EagerMixedGraphs(MixedGraphs):
    """Graphs of forwards with prompts without CUDA, see the module."""

    def _capture(self, kind: MixedKind) -> Any:
        self._make_room(kind)
        self._try(kind)
        return Graph(lambda: self.compute(kind))


def _without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", Event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(graph_capture, "run_aside", lambda run, device: run())
    made = PagedKV.for_model

    def with_scratch(
        config: Any, pages: int, size: int, dtype: Any, device: Any, *rest: Any
    ) -> Any:
        EagerGraphCapturer._kv = made(config, pages, size, dtype, device, 1, *rest[1:])
        return EagerGraphCapturer._kv

    monkeypatch.setattr(PagedKV, "for_model", with_scratch)


def _use_eager_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "DecodeGraphs", EagerGraphs)
    monkeypatch.setattr(graphs, "MixedGraphs", EagerMixedGraphs)


def _sampler(config: VerifyConfig, runner: ModelRunner, limits: EngineLimits) -> Sampler:
    device, thresholds = runner.model.device, thresholds_of(config)
    return Sampler(limits.vocab_size, device, limits.eos_token_ids, thresholds)


def use_eager_rank_0(monkeypatch: pytest.MonkeyPatch, ranks: Any) -> None:
    """Makes engines of this process rank 0 of several, on CPUs.

    Args:
        ranks: The other ranks, which run `use_eager_worker`.
    """
    _without_cuda(monkeypatch)
    _use_eager_classes(monkeypatch)

    def load(config: VerifyConfig) -> Target:
        return dataclasses.replace(load_share(config, ranks.group), ranks=ranks)

    def executor(
        config: VerifyConfig,
        target: Target,
        runner: ModelRunner,
        limits: EngineLimits,
        *rest: Any,
    ) -> GraphExecutor:
        sampler = _sampler(config, runner, limits)
        sizes = graph_sizes(config, limits, (), target)
        pages = (limits.num_pages, limits.page_size, 1)
        ranks.board.write(messages.setup(pages, sizes.numbers))
        model, kv, group = runner.model, runner.kv, ranks.group
        both = graphs.captured(model, kv, TritonAttention(), sizes, group, ranks.board)
        return GraphExecutor(runner, sampler, *both, None, ranks)

    monkeypatch.setattr("testing.engines.load_target", load)
    monkeypatch.setattr(startup, "make_executor", executor)


def use_eager_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a worker of this process follow `use_eager_rank_0`."""
    _without_cuda(monkeypatch)
    _use_eager_classes(monkeypatch)
    monkeypatch.setattr("verify_service.target.choose_attention", lambda *asked: TritonAttention())


def use_eager_graphs(
    monkeypatch: pytest.MonkeyPatch,
    attention: type[AttentionBackend] = TritonAttention,
    captures_first: bool = False,
) -> None:
    """Makes engines on the CPU run such graphs, in Triton's interpreter.

    Args:
        attention: Attention backend of the graphs.
        captures_first: Whether graphs of decode steps are captured at the start, and while the
            engine idles, as on a GPU; else when a step needs one.
    """
    _without_cuda(monkeypatch)

    def executor(
        config: VerifyConfig,
        target: Target,
        runner: ModelRunner,
        limits: EngineLimits,
        links: Sequence[DraftLink],
        *rest: Any,
    ) -> GraphExecutor:
        sampler = _sampler(config, runner, limits)
        step = DecodeStep(
            runner.model,
            runner.kv,
            attention(),
            graph_sizes(config, limits, links, target).steps,
        )
        decode = EagerGraphs(step)
        mixed = EagerMixedGraphs(
            runner.model,
            runner.kv,
            attention(),
            tables=step.tables,
            max_tree=step.max_rows,
            max_rows=chunk_size(config, runner.model.device),
            shortage=decode.shortage,
        )
        if captures_first:
            decode.warm_up(())
        return GraphExecutor(runner, sampler, decode, mixed)

    monkeypatch.setattr(startup, "make_executor", executor)
