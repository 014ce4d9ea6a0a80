"""Compiles the kernels of steps outside of graphs on a GPU, which would delay the first such
step by seconds.
"""

import logging
import time
from collections.abc import Sequence

import torch

from foredraft.runner.model_runner import ModelRunner
from foredraft.runner.warm_up import Reach, forwards_to_run
from verify_service.engine.engine import EngineLimits
from verify_service.executor.kernels.hand_over import hand_over

logger = logging.getLogger(__name__)


def reach_of(chunk: int, limits: EngineLimits, has_branches: bool) -> Reach:
    """Returns the limits of prompts and trees in one step.

    Args:
        chunk: Prompt tokens of a step at most.
        has_branches: Whether trees may be more than chains.
    """
    num_sequences, num_rows = limits.max_running_requests, limits.max_nodes + 1
    return Reach(
        num_rows=chunk + num_sequences * num_rows,
        num_sequences=num_sequences,
        num_keys=limits.context_length,
        num_tree_rows=num_rows if has_branches else 0,
    )


def warm_up(runner: ModelRunner, reach: Reach, layers: Sequence[int], num_levels: int) -> None:
    """Runs a few forwards; they write to the first page.

    Args:
        reach: Limits of the forwards.
        layers: Layers whose input (the residual stream) a draft reads.
        num_levels: Number of levels of the trees of a draft whose steps stay on the device.
    """
    started = time.monotonic()
    config, kv = runner.model.config, runner.kv
    with runner.without_repeats():
        for rows in forwards_to_run(reach, kv, runner.model.group_size, runner.attention):
            runner.forward(rows, layers)
            if layers:  # unread while no draft is attached
                runner.forward(rows)
    _warm_up_hand_over(runner, config.hidden_size * max(1, len(layers)), num_levels)
    torch.cuda.synchronize(kv.data.device)
    logger.info("ran what no graph takes in %.1f s", time.monotonic() - started)


def _warm_up_hand_over(runner: ModelRunner, width: int, num_levels: int) -> None:
    device, path = runner.kv.data.device, num_levels + 1
    accepted = torch.zeros(1, 1 + path, dtype=torch.int32, device=device)
    index = torch.zeros(path, dtype=torch.int64, device=device)
    hidden = torch.zeros(1, width, dtype=runner.model.dtype, device=device)
    rows = hidden.new_empty(1, path, width)
    hand_over(accepted, index, hidden, torch.empty_like(accepted), rows)
