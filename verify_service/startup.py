"""Builds an engine from a configuration: target model, memory, scheduler, draft."""

import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from foredraft.attention.choice import device_for
from foredraft.config.services import VerifyConfig
from foredraft.config.speculation import with_tree_defaults
from foredraft.errors import ConfigError, ForedraftError
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.config import ModelConfig
from foredraft.models.registry import resolve_model_path
from foredraft.parallel.group import SINGLE
from foredraft.runner.batch import SequenceRows
from foredraft.runner.compile_ahead import compile_ahead
from foredraft.runner.model_runner import ModelRunner
from verify_service.attach.links import (
    DraftLink,
    captured_layers,
    followed_levels,
    tree_limits_of,
)
from verify_service.controller.controller import Controller
from verify_service.controller.costs import CostModel
from verify_service.controller.messages import DraftKind
from verify_service.controller.tables import RowTable, Table
from verify_service.drafts.drafts import Drafts
from verify_service.engine.engine import Engine, EngineLimits
from verify_service.engine.self_test import SelfTest, built_in_prompts
from verify_service.engine.tree_sizes import known_outcome
from verify_service.executor.base import Executor
from verify_service.executor.choice.sampler import Sampler, Thresholds
from verify_service.executor.choice.simulation import SimulatedAcceptance
from verify_service.executor.eager import EagerExecutor
from verify_service.executor.ranks import messages
from verify_service.executor.ranks.choice import RankedSampler
from verify_service.executor.ranks.runner import RankedRunner
from verify_service.executor.ranks.workers import Ranks
from verify_service.executor.timing import best_of_rounds, without_waits
from verify_service.kv_budget import kv_budget, neighbours, step_limits
from verify_service.kv_type import kv_scales, kv_type
from verify_service.memory import explained, num_pages
from verify_service.metrics import AnyMetrics
from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.prefix_tree import PrefixTree
from verify_service.scheduler.scheduler import Scheduler
from verify_service.sizes import chunk_size, max_decode_delay
from verify_service.target import Target, load_share
from verify_service.warm_up import WarmUp, reach_of

if TYPE_CHECKING:  # needs triton
    from verify_service.executor.ranks.graphs import GraphSizes

logger = logging.getLogger(__name__)

CPU_PAGE_SIZE, GPU_PAGE_SIZE = 32, 16
MEASURED_ROWS = (1, 2, 3, 4, 8, 16, 32)


def load_target(config: VerifyConfig) -> Target:
    """Loads the target model.

    Where several ranks share it, first starts the others, which load their parts meanwhile.

    Raises:
        CheckpointError: The path or the files are wrong.
        ConfigError: A flag asks for what this machine does not have.
    """
    size = config.tensor_parallel_size
    if size == 1:
        target = load_share(config)
    else:
        check_ranks(config)
        ranks = Ranks.start(config)
        try:
            target = dataclasses.replace(load_share(config, ranks.group), ranks=ranks)
        except ForedraftError:
            ranks.close()
            raise
    logger.info("target %s: checksum %s", target.name, target.checksum)
    return target


def check_ranks(config: VerifyConfig) -> None:
    """Raises ConfigError where ranks cannot share the target, or cannot run on the device."""
    if device_for(config.device).type != "cpu":
        config.check_gpus(config.algorithms, torch.cuda.device_count())
    path = resolve_model_path(config.model_path, config.revision)
    config.check_shares(ModelConfig.from_dir(path).shared_sizes)


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
    draft_bytes = page_size * sum(
        info.kv_bytes_per_token for info in neighbours(config, target, links)
    )
    kv_dtype = kv_type(config, target.dtype)
    ranks, num_kv_heads = target.ranks, target.model.num_kv_heads
    # Bytes of this rank's key and value heads only.
    whole_bytes = model_config.kv_bytes_per_token(kv_dtype.itemsize) * page_size
    target_bytes = whole_bytes * num_kv_heads // model_config.num_kv_heads
    pages = num_pages(
        page_size=page_size,
        bytes_per_page=target_bytes + draft_bytes,
        budget_bytes=kv_budget(
            config,
            target,
            links,
            step_limits(config, target, links, tree_limits, context_length, page_size),
        ),
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
        kv = PagedKV.for_model(
            model_config, pages, page_size, kv_dtype, device, scratch, scales, num_kv_heads
        )
    runner = ModelRunner(target.model, kv, target.attention)
    if ranks is not None:
        sizes = None
        if device.type == "cuda" and not config.disable_cuda_graph:
            simulates = config.simulate_accept_length is not None
            sizes = _graph_sizes(config, limits, links, simulates, device)
        numbers = [] if sizes is None else sizes.numbers
        ranks.board.write(messages.setup((pages, page_size, scratch), numbers))
        runner = RankedRunner(target.model, kv, target.attention, ranks)
    pool = PagePool(pages, page_size)
    drafts = Drafts([link.proxy(number, pool) for number, link in enumerate(links)])
    scheduler = Scheduler(
        pool,
        None if config.disable_radix_cache else PrefixTree(pool),
        max_running_requests=config.max_running_requests,
        chunked_prefill_size=chunk_size(config, target.device),
        max_decode_delay=max_decode_delay(config),
        key_cost=model_config.key_cost,
        max_queue=config.max_queued_requests,
        context_length=context_length,
        usable_prefix=drafts.usable_prefix if links else None,
        look_ahead=int(any(link.capabilities.layers is not None for link in links)),
        longest_shared=model_config.dynamic_from,
    )
    thresholds = Thresholds(
        config.speculative_accept_threshold_single, config.speculative_accept_threshold_acc
    )
    if thresholds.lossy:
        logger.warning(
            "LOSSY: --speculative-accept-threshold-single %g and --speculative-accept-threshold-acc"
            " %g let drafts change the text",
            thresholds.single,
            thresholds.acc,
        )
    simulated = None
    if config.simulate_accept_length is not None:
        logger.warning("acceptance is simulated: the text is meaningless")
        simulated = SimulatedAcceptance(config.simulate_accept_length, tree_limits[0])
    if config.enable_torch_compile or config.torch_compile_max_bs is not None:
        logger.info(
            "--enable-torch-compile and --torch-compile-max-bs change nothing: on a GPU, steps are"
            " captured as CUDA graphs with fused kernels anyway; --cuda-graph-max-bs bounds them"
        )
    if config.speculative_attention_mode != "prefill":
        logger.info(
            "--speculative-attention-mode changes nothing: one attention backend computes prompts"
            " and verifies drafts"
        )
    self_tests = []
    tested = [link for link in links if not link.capabilities.is_free]
    if tested and not config.skip_draft_self_test:
        prompts = built_in_prompts(target.path, limits.vocab_size)
        for link in tested:
            on_result = metrics.of(link.name).self_test_accept_length.set
            self_tests.append(SelfTest(prompts, on_result, link.name))
    logger.info(
        "KV cache: %d tokens in %d pages of %d, %s, %.0f MiB",
        pages * page_size,
        pages,
        page_size,
        str(kv_dtype).removeprefix("torch."),
        pages * target_bytes / 2**20,
    )
    if device.type == "cuda":  # the draft captures its steps beside the verifier
        _allow_attach(links, limits)
    with explained(
        "the steps' CUDA graphs",
        f"{pool_flag}, --cuda-graph-max-bs, --speculative-num-draft-tokens or"
        " --max-running-requests",
    ):
        executor = _executor(
            config, runner, limits, thresholds, simulated, tree_limits, links, ranks
        )
    costs = None
    if len(links) > 1 or (links and config.speculative_adaptive):
        table = _measure(executor, runner, pool)
        # Steps are as long as the memory that they read: their weights, and so much for each token.
        per_token = model_config.kv_bytes_per_token(kv_dtype.itemsize) / target.weight_bytes
        costs = CostModel(table, per_token * table.unit)
    if device.type == "cpu":  # both would be timed on the same cores
        _allow_attach(links, limits)
    if ranks is not None:
        ranks.watchdog.watch_steps()
    limits_of = [link.config.tree_limits for link in links]
    kinds = [DraftKind(num_tokens - 1, num_steps) for num_steps, _, num_tokens in limits_of]
    engine = Engine(
        executor,
        scheduler,
        drafts,
        Controller(costs, kinds, config.speculative_adaptive),
        limits,
        metrics,
        self_tests,
        overlap=not config.disable_overlap_schedule,
        judge=known_outcome if simulated is None else simulated.outcome,
    )
    for link in links:
        link.on_attached = engine.wake
    return engine


def _allow_attach(links: Sequence[DraftLink], limits: EngineLimits) -> None:
    for link in links:
        link.sized(limits.num_pages, limits.page_size, limits.context_length)


def _executor(
    config: VerifyConfig,
    runner: ModelRunner,
    limits: EngineLimits,
    thresholds: Thresholds,
    simulated: SimulatedAcceptance | None,
    tree_limits: tuple[int, int, int],
    links: Sequence[DraftLink],
    ranks: Ranks | None,
) -> Executor:
    """Creates the executor of the target: on a GPU with captured graphs unless these are
    switched off.
    """
    device = runner.model.device
    rule = (limits.vocab_size, device, limits.eos_token_ids, thresholds, simulated)
    if ranks is not None and device.type == "cpu":
        runner.model.lm_head.gathers = False
        sampler: Sampler = RankedSampler(ranks, runner.model.lm_head, *rule)
    else:  # a GPU's kernels choose by whole rows
        sampler = Sampler(*rule)
    layers, has_branches = captured_layers(links), tree_limits[1] > 1
    if device.type == "cpu":
        return EagerExecutor(runner, sampler, ranks)
    levels = followed_levels([link.config for link in links] or [config])
    reach = reach_of(chunk_size(config, device), limits, has_branches)
    rest, choose = WarmUp(runner, reach, layers, levels), sampler.trial()
    if config.disable_cuda_graph:
        choose()
        rest.run()
        return EagerExecutor(runner, sampler, ranks)
    from verify_service.executor.captured.executor import GraphExecutor  # needs triton
    from verify_service.executor.ranks.graphs import captured

    started = time.monotonic()
    sizes = _graph_sizes(config, limits, links, simulated is not None, device)
    group, board = (SINGLE, None) if ranks is None else (ranks.group, ranks.board)
    graphs, mixed = captured(runner.model, runner.kv, runner.attention, sizes, group, board)
    has_branches &= limits.max_nodes > 1
    if ranks is None:  # what ranks exchange cannot be captured and thrown away
        runs = [*graphs.runs(layers), *mixed.runs(layers, has_branches), *rest.trials(), choose]
        num_compiled = compile_ahead(runs, device)
        logger.info("compiled %d kernels in %.1f s", num_compiled, time.monotonic() - started)
    choose()
    rest.run()
    started = time.monotonic()
    graphs.warm_up(layers)
    logger.info("captured %d CUDA graphs in %.1f s", len(graphs.shapes), time.monotonic() - started)
    started = time.monotonic()
    mixed.warm_up(layers, has_branches)
    logger.info(
        "captured %d more for prompts in %.1f s", mixed.num_graphs, time.monotonic() - started
    )
    return GraphExecutor(runner, sampler, graphs, mixed, simulated, ranks)


def _graph_sizes(
    config: VerifyConfig,
    limits: EngineLimits,
    links: Sequence[DraftLink],
    simulate: bool,
    device: torch.device,
) -> "GraphSizes":
    """Returns the sizes of captured graphs on a GPU."""
    from verify_service.executor.captured.step import StepSizes  # needs triton
    from verify_service.executor.ranks.graphs import GraphSizes

    num_sequences, max_rows = limits.max_running_requests, limits.max_nodes + 1
    return GraphSizes(
        StepSizes(
            max_batch=min(config.cuda_graph_max_bs or num_sequences, num_sequences),
            max_rows=max_rows,
            max_path=followed_levels([link.config for link in links] or [config]) + 1,
            max_tokens=limits.context_length,
            num_slots=num_sequences,
            simulate=simulate,
        ),
        chunk_size(config, device) + num_sequences * max_rows,
    )


def _measure(executor: Executor, runner: ModelRunner, pool: PagePool) -> Table:
    """Times the target's steps: captured ones as they are, others by number of rows, on pages that
    are given back.
    """
    times = executor.measure()
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

    seconds = best_of_rounds(widths, run)
    if runner.model.device.type == "cpu":
        spent = [cpu_seconds[rows] for rows in widths]
        seconds = without_waits(seconds, spent, torch.get_num_threads())
    by_rows = RowTable(widths, seconds)
    pool.release(pages)
    table = ", ".join(f"{rows}: {seconds * 1e3:.1f}" for rows, seconds in by_rows.table().items())
    logger.info("target forward in ms by rows: %s", table)
    return by_rows
