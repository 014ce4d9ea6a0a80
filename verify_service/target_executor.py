"""Makes the executor of the target: eager, or on a GPU with captured graphs."""

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from foredraft.config.services import VerifyConfig
from foredraft.parallel.group import SINGLE
from foredraft.runner.compile_ahead import compile_ahead
from foredraft.runner.model_runner import ModelRunner
from verify_service.attach.links import (
    DraftLink,
    captured_layers,
    followed_levels,
    tree_limits_of,
)
from verify_service.engine.engine import EngineLimits
from verify_service.exactness import OFF
from verify_service.executor.base import Executor
from verify_service.executor.choice.sampler import Sampler
from verify_service.executor.choice.simulation import SimulatedAcceptance
from verify_service.executor.eager import EagerExecutor
from verify_service.executor.ranks.choice import RankedSampler
from verify_service.executor.ranks.workers import Ranks
from verify_service.flag_notes import thresholds_of
from verify_service.sizes import chunk_size
from verify_service.target import Target
from verify_service.warm_up import WarmUp, reach_of

if TYPE_CHECKING:  # needs triton
    from verify_service.executor.ranks.graphs import GraphSizes

logger = logging.getLogger(__name__)


def make_executor(
    config: VerifyConfig,
    target: Target,
    runner: ModelRunner,
    limits: EngineLimits,
    links: Sequence[DraftLink],
    simulated: SimulatedAcceptance | None,
) -> Executor:
    """Makes the executor of the target, and compiles its kernels.

    Args:
        config: The verifier's flags; on a GPU they may switch captured graphs off.
        target: The loaded target.
        runner: Runs the target.
        limits: Limits of the engine.
        links: The drafts' connections.
        simulated: Decides what is accepted in the target's place; None for the target itself.
    """
    device, ranks = target.device, target.ranks
    sampler = _sampler(config, runner, limits, simulated, ranks)
    if device.type == "cpu":
        return EagerExecutor(runner, sampler, ranks)
    has_branches = tree_limits_of(links, config)[1] > 1
    reach = reach_of(chunk_size(config, device), limits, has_branches, runner.model)
    layers, levels = captured_layers(links), _followed_levels(config, links)
    rest, choose = WarmUp(runner, reach, layers, levels), sampler.trial()
    if config.disable_cuda_graph:
        choose()
        rest.run()
        return EagerExecutor(runner, sampler, ranks)
    from verify_service.executor.captured.executor import GraphExecutor  # needs triton
    from verify_service.executor.ranks.graphs import captured

    started = time.monotonic()
    sizes = graph_sizes(config, limits, links, target)
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
    logger.info(
        "captured %d CUDA graphs in %.1f s", len(graphs.shapes.all()), time.monotonic() - started
    )
    started = time.monotonic()
    mixed.warm_up(layers, has_branches)
    logger.info(
        "captured %d more for prompts in %.1f s", mixed.num_graphs, time.monotonic() - started
    )
    return GraphExecutor(runner, sampler, graphs, mixed, simulated, ranks)


def graph_sizes(
    config: VerifyConfig, limits: EngineLimits, links: Sequence[DraftLink], target: Target
) -> "GraphSizes":
    """Returns the sizes of captured graphs on a GPU."""
    from verify_service.executor.captured.step import StepSizes  # needs triton
    from verify_service.executor.ranks.graphs import GraphSizes

    num_sequences, max_rows = limits.max_running_requests, limits.max_nodes + 1
    return GraphSizes(
        StepSizes(
            max_batch=min(config.cuda_graph_max_bs or num_sequences, num_sequences),
            max_rows=max_rows,
            max_path=_followed_levels(config, links) + 1,
            max_tokens=limits.context_length,
            num_slots=num_sequences,
            simulate=config.simulate_accept_length is not None,
            # The attention of `off` is faster with masks (docs/measurements/exactness.md). Lossy
            # acceptance walks trees on the host, which takes them as the draft sent them.
            has_branches=tree_limits_of(links, config)[1] > 1
            or target.exactness.level == OFF
            or thresholds_of(config).lossy,
        ),
        chunk_size(config, target.device) + num_sequences * max_rows,
    )


def _sampler(
    config: VerifyConfig,
    runner: ModelRunner,
    limits: EngineLimits,
    simulated: SimulatedAcceptance | None,
    ranks: Ranks | None,
) -> Sampler:
    model, thresholds = runner.model, thresholds_of(config)
    rule = (limits.vocab_size, model.device, limits.eos_token_ids, thresholds, simulated)
    if ranks is None or model.device.type == "cuda":  # a GPU's kernels choose by whole rows
        return Sampler(*rule)
    model.lm_head.gathers = False
    return RankedSampler(ranks, model.lm_head, *rule)


def _followed_levels(config: VerifyConfig, links: Sequence[DraftLink]) -> int:
    return followed_levels([link.config for link in links] or [config])
