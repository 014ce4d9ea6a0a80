"""Builds an engine from a configuration: target model, memory, scheduler, draft."""

import dataclasses
import logging
from collections.abc import Sequence

import torch

from foredraft.attention.choice import device_for
from foredraft.config.services import VerifyConfig
from foredraft.config.speculation import with_tree_defaults
from foredraft.errors import ForedraftError
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.config import ModelConfig
from foredraft.models.registry import resolve_model_path
from foredraft.runner.model_runner import ModelRunner
from verify_service.attach.links import DraftLink, tree_limits_of
from verify_service.controller.controller import Controller
from verify_service.controller.messages import DraftKind
from verify_service.drafts.drafts import Drafts
from verify_service.engine.engine import Engine, EngineLimits
from verify_service.engine.judging import known_outcome
from verify_service.engine.self_test import SelfTest, built_in_prompts
from verify_service.executor.choice.simulation import SimulatedAcceptance
from verify_service.executor.ranks import messages
from verify_service.executor.ranks.runner import RankedRunner
from verify_service.executor.ranks.workers import Ranks
from verify_service.flag_notes import note_flags
from verify_service.kv_budget import host_bytes_per_rank, kv_budget, neighbours, step_limits
from verify_service.kv_type import kv_scales, kv_type
from verify_service.memory import explained, num_pages
from verify_service.metrics import AnyMetrics
from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.page_tables import PageTables
from verify_service.scheduler.prefill_budget import PrefillBudget
from verify_service.scheduler.prefix_tree import PrefixTree
from verify_service.scheduler.scheduler import Scheduler
from verify_service.sizes import chunk_size, max_decode_delay
from verify_service.target import Target, load_share
from verify_service.target_costs import measured_costs
from verify_service.target_executor import graph_sizes, make_executor

logger = logging.getLogger(__name__)

CPU_PAGE_SIZE, GPU_PAGE_SIZE = 32, 16


def load_target(config: VerifyConfig) -> Target:
    """Loads the target model.

    Where several ranks share it, first starts the others, which load their parts meanwhile.

    Raises:
        CheckpointError: The path or the files are wrong.
        ConfigError: A flag asks for what this machine does not have.
    """
    check_flags(config)
    if config.tensor_parallel_size == 1:
        target = load_share(config)
    else:
        ranks = Ranks.start(config)
        try:
            target = dataclasses.replace(load_share(config, ranks.group), ranks=ranks)
        except ForedraftError:
            ranks.close()
            raise
    logger.info("target %s: checksum %s", target.name, target.checksum)
    return target


def check_flags(config: VerifyConfig) -> None:
    """Raises ConfigError where the flags do not fit the target, or ranks cannot run on the
    device.
    """
    if config.tensor_parallel_size > 1 and device_for(config.device).type != "cpu":
        config.check_gpus(torch.cuda.device_count())
    path = resolve_model_path(config.model_path, config.revision)
    model = ModelConfig.from_dir(path)
    config.check_context(model.max_position_embeddings)
    config.check_shares(model.shared_sizes, model.why_not_shared)


def build_engine(
    config: VerifyConfig, target: Target, metrics: AnyMetrics, links: Sequence[DraftLink]
) -> Engine:
    """Sizes the memory and puts the engine together; the engine is not started.

    Raises:
        ConfigError: The flags do not fit the model or the memory.
    """
    config = with_tree_defaults(config, target.model.config.architecture)
    tree_limits = tree_limits_of(links, config)
    limits = _size_memory(config, target, links, tree_limits)
    kv = _make_cache(config, target, limits)
    runner = _make_runner(config, target, limits, links, kv)
    pool = PagePool(limits.num_pages, limits.page_size)
    drafts = Drafts([link.proxy(number, pool) for number, link in enumerate(links)])
    scheduler = _make_scheduler(config, target, pool, drafts, links, limits)
    note_flags(config)
    simulated = None
    if config.simulate_accept_length is not None:
        simulated = SimulatedAcceptance(config.simulate_accept_length, tree_limits[0])
    self_tests = _make_self_tests(config, target, metrics, links, limits)
    on_gpu = target.device.type == "cuda"
    if on_gpu:  # the draft captures its steps beside the verifier
        _allow_attach(links, limits)
    with explained(
        "the steps' CUDA graphs",
        f"{_pool_flag(config)}, --cuda-graph-max-bs, --speculative-num-draft-tokens or"
        " --max-running-requests",
    ):
        executor = make_executor(config, target, runner, limits, links, simulated)
    costs = None
    if len(links) > 1 or (links and config.speculative_adaptive):
        costs = measured_costs(executor, runner, pool, target.weight_bytes)
    if not on_gpu:  # both would be timed on the same cores
        _allow_attach(links, limits)
    if target.ranks is not None:
        target.ranks.watchdog.watch_steps()
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


def _size_memory(
    config: VerifyConfig,
    target: Target,
    links: Sequence[DraftLink],
    tree_limits: tuple[int, int, int],
) -> EngineLimits:
    """Returns the engine's limits, with as many pages as fit beside weights, steps and drafts."""
    model_config = target.model.config
    context_length = config.context_length or model_config.max_position_embeddings
    on_cpu = target.device.type == "cpu"
    page_size = config.page_size or (CPU_PAGE_SIZE if on_cpu else GPU_PAGE_SIZE)
    draft_bytes = page_size * sum(
        info.kv_bytes_per_token for info in neighbours(config, target, links)
    )
    steps = step_limits(config, target, links, tree_limits, context_length, page_size)
    pages = num_pages(
        page_size=page_size,
        bytes_per_page=_page_bytes(config, target, page_size) + draft_bytes,
        budget_bytes=kv_budget(config, target, links, steps),
        max_total_tokens=config.max_total_tokens,
        max_useful_tokens=config.max_running_requests * (context_length + page_size),
        available_bytes=host_bytes_per_rank(config) if on_cpu else float("inf"),
    )
    return EngineLimits(
        vocab_size=model_config.vocab_size,
        context_length=context_length,
        num_pages=pages,
        page_size=page_size,
        max_running_requests=config.max_running_requests,
        eos_token_ids=frozenset(model_config.eos_token_ids),
        # A draft that has not answered yet will be verified all the same.
        max_nodes=tree_limits[2] - 1 if links else 0,
    )


def _page_bytes(config: VerifyConfig, target: Target, page_size: int) -> int:
    """Returns the bytes of a page of the target: of this rank's key and value heads only."""
    model_config, kv_dtype = target.model.config, kv_type(config, target.dtype)
    whole_bytes = model_config.kv_bytes_per_token(kv_dtype.itemsize) * page_size
    return whole_bytes * target.model.num_kv_heads // model_config.num_kv_heads


def _pool_flag(config: VerifyConfig) -> str:
    """Returns the flag that determines the number of pages."""
    return "--mem-fraction-static" if config.max_total_tokens is None else "--max-total-tokens"


def _make_cache(config: VerifyConfig, target: Target, limits: EngineLimits) -> PagedKV:
    """Allocates the target's KV cache."""
    kv_dtype = kv_type(config, target.dtype)
    pages, page_size = limits.num_pages, limits.page_size
    # The scratch page takes what padding rows of captured steps write.
    scratch = 0 if target.device.type == "cpu" else 1
    scales = kv_scales(config, target.model, kv_dtype)
    with explained("the KV cache", _pool_flag(config)):
        kv = PagedKV.for_model(
            target.model.config,
            pages,
            page_size,
            kv_dtype,
            target.device,
            scratch,
            scales,
            target.model.num_kv_heads,
        )
    logger.info(
        "KV cache: %d tokens in %d pages of %d, %s, %.0f MiB",
        pages * page_size,
        pages,
        page_size,
        str(kv_dtype).removeprefix("torch."),
        pages * _page_bytes(config, target, page_size) / 2**20,
    )
    return kv


def _make_runner(
    config: VerifyConfig,
    target: Target,
    limits: EngineLimits,
    links: Sequence[DraftLink],
    kv: PagedKV,
) -> ModelRunner:
    """Creates the target's runner; tells other ranks their sizes first."""
    ranks = target.ranks
    if ranks is None:
        return ModelRunner(target.model, kv, target.attention)
    numbers = []
    if target.device.type == "cuda" and not config.disable_cuda_graph:
        numbers = graph_sizes(config, limits, links, target).numbers
    cache = (limits.num_pages, limits.page_size, kv.num_scratch_pages)
    ranks.board.write(messages.setup(cache, numbers))
    return RankedRunner(target.model, kv, target.attention, ranks)


def _make_scheduler(
    config: VerifyConfig,
    target: Target,
    pool: PagePool,
    drafts: Drafts,
    links: Sequence[DraftLink],
    limits: EngineLimits,
) -> Scheduler:
    model_config = target.model.config
    tables = PageTables(
        pool,
        None if config.disable_radix_cache else PrefixTree(pool),
        usable_prefix=drafts.usable_prefix if links else None,
        look_ahead=int(any(link.capabilities.layers is not None for link in links)),
        longest_shared=model_config.dynamic_from,
    )
    device = target.device
    budget = PrefillBudget(
        chunk_size(config, device),
        max_decode_delay(config),
        model_config.key_cost,
        bounds_rows=device.type == "cuda",
    )
    return Scheduler(
        tables,
        budget,
        max_running_requests=config.max_running_requests,
        max_queue=config.max_queued_requests,
        context_length=limits.context_length,
    )


def _make_self_tests(
    config: VerifyConfig,
    target: Target,
    metrics: AnyMetrics,
    links: Sequence[DraftLink],
    limits: EngineLimits,
) -> list[SelfTest]:
    """Creates the self-tests of drafts with a model."""
    tested = [link for link in links if not link.capabilities.is_free]
    if not tested or config.skip_draft_self_test:
        return []
    prompts = built_in_prompts(target.path, limits.vocab_size)
    return [
        SelfTest(prompts, metrics.of(link.name).self_test_accept_length.set, link.name)
        for link in tested
    ]


def _allow_attach(links: Sequence[DraftLink], limits: EngineLimits) -> None:
    for link in links:
        link.sized(limits.num_pages, limits.page_size, limits.context_length)
