"""Builds an engine from a configuration: target model, memory, scheduler, draft."""

import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.attention.choice import attention_for, device_for
from foredraft.config.services import VerifyConfig
from foredraft.config.speculation import HEADS, MODELS, with_tree_defaults
from foredraft.errors import ConfigError
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers.conversions import convert_linears
from foredraft.models.decoder import DecoderModel
from foredraft.models.loader import available_host_bytes, load_model
from foredraft.models.registry import resolve_model_path
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner
from verify_service.controller.controller import Controller, DraftKind
from verify_service.controller.costs import CostModel
from verify_service.controller.tables import RowTable, Table
from verify_service.drafts.drafting import Drafting
from verify_service.drafts.hidden_states import HiddenStates
from verify_service.drafts.links import (
    DraftLink,
    connect_drafts,
    followed_levels,
    infos_of,
    tree_limits_of,
)
from verify_service.drafts.page_marks import DraftMarks
from verify_service.drafts.several import Drafts
from verify_service.engine.engine import Engine, EngineLimits
from verify_service.engine.self_test import SelfTest, built_in_prompts
from verify_service.executor.sampler import Chooser, Thresholds
from verify_service.executor.simulation import SimulatedAcceptance
from verify_service.executor.target_step import TargetStep
from verify_service.kv_type import check_kv_flags, kv_scales, kv_type
from verify_service.memory import (
    CPU_FRACTION,
    GPU_FRACTION,
    GpuBudget,
    explained,
    num_pages,
    workspace_bytes,
)
from verify_service.metrics import AnyMetrics
from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.prefix_tree import PrefixTree
from verify_service.scheduler.scheduler import Scheduler
from verify_service.sizes import arena_bytes, chunk_size
from verify_service.warm_up import reach_of, warm_up

logger = logging.getLogger(__name__)

CPU_PAGE_SIZE, GPU_PAGE_SIZE = 32, 16
# Three rows are the first that read packed weights.
MEASURED_ROWS = (1, 2, 3, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Target:
    """A loaded target model and the name it is served under."""

    model: DecoderModel
    path: Path
    name: str
    device: torch.device
    weight_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return next(self.model.parameters()).dtype


def load_target(config: VerifyConfig) -> Target:
    """Loads the target model as configured.

    Raises:
        CheckpointError: What is wrong with the path or the files.
        ConfigError: A flag asks for what this machine does not have.
    """
    device = device_for(config.device)
    check_kv_flags(config, device)
    if device.type == "cpu":
        torch.set_num_threads(config.num_threads or os.cpu_count() or 1)
    path = resolve_model_path(config.model_path, config.revision)
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    if dtype is None and device.type == "cpu":
        # bf16 is slow on most CPUs and gains nothing from verifying several rows.
        dtype = torch.float32
    started = time.monotonic()
    model = load_model(path, dtype=dtype, device=device, load_format=config.load_format)
    num_parameters = sum(p.numel() for p in model.parameters())
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    num_packed = 0
    if device.type == "cpu" and 4 * weight_bytes < available_host_bytes():
        num_packed = convert_linears(model, "packed", device)
    name = config.served_model_name or Path(config.model_path).name.removesuffix(".gguf")
    logger.info(
        "loaded %s: %.1f M parameters, %.0f MiB and %.0f MiB packed for verifying, in %.1f s",
        name,
        num_parameters / 1e6,
        weight_bytes / 2**20,
        num_packed / 2**20,
        time.monotonic() - started,
    )
    return Target(model, path, name, device, weight_bytes)


def connect_draft(config: VerifyConfig, target: Target, metrics: AnyMetrics) -> list[DraftLink]:
    """Starts the connections to the configured drafts; see `connect_drafts`."""
    return connect_drafts(config, target.model, target.path, target.device, metrics)


def build_engine(
    config: VerifyConfig, target: Target, metrics: AnyMetrics, links: Sequence[DraftLink]
) -> Engine:
    """Sizes the memory and puts the engine together; the engine is not started.

    Raises:
        ConfigError: The flags do not fit the model or the memory.
    """
    config = with_tree_defaults(config, target.model.config.architecture)
    tree_limits = tree_limits_of(links, config)
    # A draft that has not answered yet will be verified all the same.
    max_rows = tree_limits[2] if links else 1
    model_config, device = target.model.config, target.device
    context_length = config.context_length or model_config.max_position_embeddings
    if context_length > model_config.max_position_embeddings:
        raise ConfigError(
            f"--context-length {context_length} is more than the model's "
            f"{model_config.max_position_embeddings} positions"
        )
    page_size = config.page_size or (CPU_PAGE_SIZE if device.type == "cpu" else GPU_PAGE_SIZE)
    infos = infos_of(links)
    draft_bytes = sum(info.kv_bytes_per_token for info in infos) * page_size
    kv_dtype = kv_type(config, target.dtype)
    target_bytes = model_config.kv_bytes_per_token(kv_dtype.itemsize) * page_size
    pages = num_pages(
        page_size=page_size,
        bytes_per_page=target_bytes + draft_bytes,
        budget_bytes=_kv_budget(config, target, max_rows, infos),
        max_total_tokens=config.max_total_tokens,
        max_useful_tokens=config.max_running_requests * (context_length + page_size),
    )
    limits = EngineLimits(
        vocab_size=model_config.vocab_size,
        context_length=context_length,
        num_pages=pages,
        page_size=page_size,
        max_running_requests=config.max_running_requests,
        eos_token_ids=frozenset(model_config.eos_token_ids),
        max_nodes=max_rows - 1,
    )
    # The scratch page takes what padding rows of captured steps write.
    scratch = 0 if device.type == "cpu" else 1
    scales = kv_scales(config, target.model, kv_dtype)
    pool_flag = "--mem-fraction-static" if config.max_total_tokens is None else "--max-total-tokens"
    with explained("the KV cache", pool_flag):
        kv = PagedKV.for_model(model_config, pages, page_size, kv_dtype, device, scratch, scales)
    runner = ModelRunner(target.model, kv, attention_for(device))
    pool = PagePool(pages, page_size)
    drafts = {
        link.name: _drafting(link, number, pool, limits, metrics)
        for number, link in enumerate(links)
    }
    drafting: Drafting | Drafts | None = None
    if len(drafts) > 1:
        drafting = Drafts(drafts)
    elif drafts:
        [drafting] = drafts.values()
    scheduler = Scheduler(
        pool,
        None if config.disable_radix_cache else PrefixTree(pool),
        max_running_requests=config.max_running_requests,
        chunked_prefill_size=chunk_size(config, target.device),
        max_queue=config.max_queued_requests,
        context_length=context_length,
        usable_prefix=drafting.usable_prefix if drafting is not None else None,
        look_ahead=int(any(name in HEADS for name in config.algorithms)),
        longest_shared=model_config.dynamic_from,
    )
    thresholds = Thresholds(
        config.speculative_accept_threshold_single, config.speculative_accept_threshold_acc
    )
    if thresholds.lossy:
        logger.warning(
            "LOSSY: --speculative-accept-threshold-single %g and --speculative-accept-threshold-acc %g let drafts change the text",
            thresholds.single,
            thresholds.acc,
        )
    if config.enable_torch_compile or config.torch_compile_max_bs is not None:
        logger.info(
            "--enable-torch-compile and --torch-compile-max-bs change nothing: steps are captured as CUDA graphs with fused "
            "kernels anyway; --cuda-graph-max-bs bounds them"
        )
    if config.speculative_attention_mode != "prefill":
        logger.info(
            "--speculative-attention-mode changes nothing: one attention backend computes prompts and verifies drafts"
        )
    self_tests = []
    models = [name for name in config.algorithms if name in MODELS]
    if models and not config.skip_draft_self_test:
        prompts = built_in_prompts(target.path, limits.vocab_size)
        for name in models:
            on_result = metrics.of(name).self_test_accept_length.set
            self_tests.append(SelfTest(prompts, on_result, name if len(drafts) > 1 else ""))
    logger.info(
        "KV cache: %d tokens in %d pages of %d, %s, %.0f MiB",
        pages * page_size,
        pages,
        page_size,
        str(kv_dtype).removeprefix("torch."),
        pages * target_bytes / 2**20,
    )
    with explained(
        "the steps' CUDA graphs",
        f"{pool_flag}, --cuda-graph-max-bs, --speculative-num-draft-tokens or --max-running-requests",
    ):
        target_step = _target_step(config, runner, limits, thresholds, tree_limits, links)
        if device.type == "cuda":
            levels = followed_levels([link.config for link in links] or [config])
            reach = reach_of(
                chunk_size(config, target.device), limits, has_branches=tree_limits[1] > 1
            )
            warm_up(runner, reach, _captured(links), levels)
    costs = None
    if len(links) > 1 or (links and config.speculative_adaptive):
        table = _measure(target_step, runner, pool)
        # Steps are as long as the memory that they read: their weights, and so much for each token.
        per_token = model_config.kv_bytes_per_token(kv_dtype.itemsize) / target.weight_bytes
        costs = CostModel(table, per_token * table.unit)
    for link in links:
        link.sized(limits.num_pages, limits.page_size, limits.context_length)
    limits_of = [link.config.tree_limits for link in links]
    kinds = [DraftKind(num_tokens - 1, num_steps) for num_steps, _, num_tokens in limits_of]
    return Engine(
        target_step,
        scheduler,
        drafting,
        Controller(costs, kinds, config.speculative_adaptive),
        limits,
        metrics,
        self_tests,
        overlap=not config.disable_overlap_schedule,
    )


def _drafting(
    link: DraftLink, number: int, pool: PagePool, limits: EngineLimits, metrics: AnyMetrics
) -> Drafting:
    """The engine's side of a draft."""
    config, page_size = link.config, limits.page_size
    marks = DraftMarks(pool)
    hidden = HiddenStates(link.arena, marks, page_size, config.draft_refill_tokens, number)
    return Drafting(
        link.client,
        marks,
        page_size,
        limits.vocab_size,
        config.tree_limits[:2],
        config.speculative_ngram_scope,
        config.draft_refill_tokens,
        metrics.of(link.name),
        hidden,
    )


def _target_step(
    config: VerifyConfig,
    runner: ModelRunner,
    limits: EngineLimits,
    thresholds: Thresholds,
    tree_limits: tuple[int, int, int],
    links: Sequence[DraftLink],
) -> TargetStep:
    """Runs the target, on a GPU by captured graphs unless these are switched off."""
    simulated = None
    if config.simulate_accept_length is not None:
        logger.warning("acceptance is simulated: the text is meaningless")
        simulated = SimulatedAcceptance(config.simulate_accept_length, tree_limits[0])
    device = runner.model.device
    chooser = Chooser(limits.vocab_size, device, limits.eos_token_ids, thresholds, simulated)
    chooser.warm_up()
    if device.type == "cpu" or config.disable_cuda_graph:
        return TargetStep(runner, chooser)
    from verify_service.executor.decode_graphs import DecodeGraphs  # needs triton
    from verify_service.executor.decode_step import DecodeStep
    from verify_service.executor.graph_step import GraphStep
    from verify_service.executor.mixed_graphs import MixedGraphs

    started = time.monotonic()
    step = DecodeStep(
        runner.model,
        runner.kv,
        runner.attention,
        max_batch=min(
            config.cuda_graph_max_bs or limits.max_running_requests, limits.max_running_requests
        ),
        max_rows=limits.max_nodes + 1,
        max_path=followed_levels([link.config for link in links] or [config]) + 1,
        max_tokens=limits.context_length,
        num_slots=limits.max_running_requests,
        simulate=simulated is not None,
    )
    graphs = DecodeGraphs(step)
    layers = _captured(links)
    graphs.warm_up(layers)
    logger.info("captured %d CUDA graphs in %.1f s", len(graphs.shapes), time.monotonic() - started)
    started = time.monotonic()
    mixed = MixedGraphs(
        runner.model,
        runner.kv,
        runner.attention,
        tables=step.tables,
        max_tree=step.max_rows,
        max_rows=chunk_size(config, runner.model.device)
        + limits.max_running_requests * step.max_rows,
        pool=graphs.pool,
    )
    mixed.warm_up(layers, has_branches=tree_limits[1] > 1 and limits.max_nodes > 1)
    logger.info(
        "captured %d more for prompts in %.1f s", mixed.num_graphs, time.monotonic() - started
    )
    return GraphStep(runner, chooser, graphs, mixed, simulated)


def _captured(links: Sequence[DraftLink]) -> tuple[int, ...]:
    """Layers that a draft reads, as far as drafts have said it."""
    return max((tuple(info.hidden.layers) for info in infos_of(links)), default=())


def _kv_budget(
    config: VerifyConfig,
    target: Target,
    max_rows: int,
    infos: Sequence[draft_pb2.GetDraftInfoResponse],
) -> int:
    """Bytes for KV pages, of target and draft together.

    Args:
        max_rows: Of a sequence in a step, the root included.
    """
    if target.device.type == "cpu":
        return int(available_host_bytes() * (config.mem_fraction_static or CPU_FRACTION))
    free, total = torch.cuda.mem_get_info(target.device)
    fraction = config.mem_fraction_static or GPU_FRACTION
    # A draft that has answered has loaded its weights; the rest it allocates when it is attached.
    draft = sum(
        info.workspace_bytes
        + info.bytes_per_sequence * config.max_running_requests
        + (arena_bytes(config, target.device) if info.HasField("hidden") else 0)
        for info in infos
        if info.device_uuid
    )
    budget = GpuBudget(
        total=total,
        used=total - free,
        kept_free=int(total * (1 - fraction)),
        workspace=workspace_bytes(
            target.model.config,
            target.dtype.itemsize,
            chunk_size(config, target.device),
            config.max_running_requests * max_rows,
            sum(len(info.hidden.layers) for info in infos),
            config.max_running_requests,
        ),
        draft=draft,
    )
    logger.info("GPU memory in MiB: %s", budget)
    return budget.kv


def _measure(target_step: TargetStep, runner: ModelRunner, pool: PagePool) -> Table:
    """Times the target's steps: captured ones as they are, others by number of rows, on pages that are given back."""
    times = target_step.measure()
    if times is not None:
        table = ", ".join(f"{b}x{r}: {t * 1e3:.2f}" for (b, r), t in sorted(times.table().items()))
        logger.info("captured steps in ms by sequences x rows: %s", table)
        return times
    room = pool.num_pages * pool.page_size
    widths = [rows for rows in MEASURED_ROWS if rows <= room]
    pages = pool.allocate(pool.pages_for(widths[-1]))

    cpu_seconds = dict.fromkeys(widths, math.inf)

    def run(rows: int) -> float:
        chain = SequenceRows.chunk(pages, 0, [0] * rows, "all")
        started, started_cpu = time.perf_counter(), time.process_time()
        runner.forward([chain])
        cpu_seconds[rows] = min(cpu_seconds[rows], time.process_time() - started_cpu)
        return time.perf_counter() - started

    by_rows = RowTable.measure(widths, run)
    if runner.model.device.type == "cpu":
        by_rows = by_rows.bounded([cpu_seconds[rows] for rows in widths], torch.get_num_threads())
    pool.release(pages)
    table = ", ".join(f"{rows}: {seconds * 1e3:.1f}" for rows, seconds in by_rows.table().items())
    logger.info("target forward in ms by rows: %s", table)
    return by_rows
