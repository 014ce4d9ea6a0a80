"""Controllers of one draft, and models of steps for them."""

import random

from testing.policy_simulation import Load, simulate
from testing.step_model import TABLES, StepModel
from testing.step_trace import Trace
from verify_service.controller.controller import Controller
from verify_service.controller.costs import CostModel
from verify_service.controller.messages import DraftKind
from verify_service.controller.tables import RowTable, Table

GPU_CHAIN = StepModel.from_json(TABLES / "h200.json", (3, 1, 3))
GPU_TREE = StepModel.from_json(TABLES / "h200.json", (5, 8, 31))
CPU_CHAIN = StepModel.from_json(TABLES / "gemma_cpu.json", (5, 1, 5))
TYPICAL = RowTable([1, 2, 4, 8, 16], [0.1, 0.11, 0.13, 0.17, 0.25])


def run(
    model: StepModel, loads: list[Load], seconds: float, seed: int = 0, error: float = 0.0
) -> Trace:
    """Runs a new controller against a model of steps; its table is wrong by up to `error`."""
    rng = random.Random(seed)
    times = model.times(lambda: rng.uniform(1 - error, 1 + error))
    per_token = 3.4e-8 if model.is_padded else 0.0  # by the bytes of its KV
    return simulate(
        model, controller(times, *model.tree[2::-2], per_token), loads, seconds, seed=seed
    )


def controller(
    table: Table | None, nodes: int, depth: int, per_token: float = 0.0, is_first: bool = False
) -> Controller:
    """Returns a controller of a draft with trees of so many nodes and levels.

    Args:
        per_token: Seconds that a step takes for each token of context.
        is_first: Whether the draft is asked before it is known what it is worth.
    """
    is_beside = table is not None and table.is_padded
    costs = None if table is None else CostModel(table, per_token)
    return Controller(costs, [DraftKind(nodes, depth, is_first, is_beside)])
