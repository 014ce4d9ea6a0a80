"""Tests batches whose sequences are alike, so that the same drafts are right for all of them in a
step: as with equal prompts, or with simulated accept lengths.
"""

from dataclasses import replace

import pytest

from testing.policy_simulation import FixedNodes, Load, simulate
from testing.rounds import rounds
from testing.step_model import StepModel
from verify_service.controller.controller import Controller
from verify_service.controller.costs import CostModel
from verify_service.controller.messages import DraftKind

# A chain of an 8B model on an H200, as a log of its steps showed.
LARGE = StepModel(
    name="alike",
    is_padded=True,
    target={(128, 1): 6.9e-3, (128, 2): 8.7e-3, (128, 4): 12.4e-3},
    draft=(0.0, 0.0, 0.0),
    tree=(3, 1, 3),
    extra={(128, 1): 0.0, (128, 2): 2.2e-3, (128, 4): 3.4e-3},
    change=(9e-3, 0.02e-3),
    read=(1e-3, 6e-6),
    stall=15e-3,
)
SECONDS = 5.0


@pytest.mark.parametrize("seed", rounds([0], [0, 1, 2]))
@pytest.mark.parametrize("acceptance", [0.2, 0.6, 0.8])
@pytest.mark.parametrize("arrivals", [0, 2])
def test_one_unlucky_step_of_a_large_batch_ends_nothing(
    acceptance: float, arrivals: float, seed: int
) -> None:
    model = replace(LARGE, prompt=0.22) if arrivals else LARGE
    loads = [Load(0, 128, (acceptance, acceptance), arrivals)]

    def rate(policy: Controller) -> float:
        trace = simulate(model, policy, loads, SECONDS, seed=seed, are_alike=True)
        return trace.rate(0.5, SECONDS)

    fixed = [rate(FixedNodes(nodes)) for nodes in (0, 1, 3)]
    adaptive = rate(Controller(CostModel(model.times()), [DraftKind(3, 3, is_beside=True)]))
    assert adaptive > 0.95 * max(fixed)
