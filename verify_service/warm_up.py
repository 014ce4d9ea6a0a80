"""Compiles the kernels of steps outside of graphs on a GPU, which would delay the first such
step by seconds.
"""

import logging
import time
from collections.abc import Callable, Sequence

import torch

from foredraft.models.decoder import DecoderModel
from foredraft.runner.model_runner import ModelRunner
from foredraft.runner.warm_up import Reach, forwards_to_run
from verify_service.engine.engine import EngineLimits
from verify_service.executor.kernels.hand_over import hand_over

logger = logging.getLogger(__name__)


def reach_of(chunk: int, limits: EngineLimits, has_branches: bool, model: DecoderModel) -> Reach:
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
        halved_rows=model.halved_rows,
    )


class WarmUp:
    """Runs a few forwards; they write to the first page.

    Args:
        reach: Limits of the forwards.
        layers: Layers whose input (the residual stream) a draft reads.
        num_levels: Number of levels of the trees of a draft whose steps stay on the device.
    """

    def __init__(
        self, runner: ModelRunner, reach: Reach, layers: Sequence[int], num_levels: int
    ) -> None:
        self._runner, self._num_levels = runner, num_levels
        group_size = runner.model.group_size
        # Nothing is captured while no draft is attached; one that reads no layers may read the
        # hidden states of all rows.
        reads = ((tuple(layers), False), ((), False), ((), not layers))
        self._forwards = [
            (rows, captured, all_hidden)
            for rows in forwards_to_run(reach, runner.kv, group_size, runner.attention)
            for captured, all_hidden in dict.fromkeys(reads)
        ]
        self._width = runner.model.config.hidden_size * max(1, len(layers))

    def trials(self) -> list[Callable[[], object]]:
        """Returns the forwards as functions that `compile_ahead` takes."""
        return [
            self._runner.trial(rows, captured, all_hidden)
            for rows, captured, all_hidden in self._forwards
        ]

    def run(self) -> None:
        """Runs the forwards, which compiles missing kernels."""
        started = time.monotonic()
        with self._runner.without_repeats():
            for rows, captured, all_hidden in self._forwards:
                self._runner.forward(rows, captured, all_hidden=all_hidden)
        self._hand_over()
        torch.cuda.synchronize(self._runner.kv.data.device)
        logger.info("ran what no graph takes in %.1f s", time.monotonic() - started)

    def _hand_over(self) -> None:
        runner, path = self._runner, self._num_levels + 1
        device = runner.kv.data.device
        accepted = torch.zeros(1, 1 + path, dtype=torch.int32, device=device)
        index = torch.zeros(path, dtype=torch.int64, device=device)
        hidden = torch.zeros(1, self._width, dtype=runner.model.dtype, device=device)
        rows = hidden.new_empty(1, path, self._width)
        hand_over(accepted, index, hidden, torch.empty_like(accepted), rows)
