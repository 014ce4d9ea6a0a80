"""How the target's hidden states become features."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draft_service.drafters.target_states import TargetStates
from draft_service.steps.draft_runner import DraftRunner
from foredraft.kernel_launch import VARIANTS


class Head:
    """Doubles its rows, and notes whether kernels may have few variants alone.

    Attributes:
        were_few: `VARIANTS.are_few` of each projection.
    """

    hidden_width, dtype, device = 4, torch.float32, torch.device("cpu")
    config = SimpleNamespace(layer=SimpleNamespace(hidden_size=4))

    def __init__(self) -> None:
        self.were_few: list[bool] = []

    def fuse(self, rows: torch.Tensor) -> torch.Tensor:
        self.were_few.append(VARIANTS.are_few)
        return 2 * rows


@pytest.mark.parametrize("are_fused", [False, True])
def test_rows_are_projected_by_any_kernel_in_a_graph_and_by_few_outside(are_fused: bool) -> None:
    """Outside, a kernel for another number of rows would be compiled in the middle of a step."""
    head, kv, attention = Head(), SimpleNamespace(data=torch.zeros(1)), SimpleNamespace()
    made: Any = DraftRunner(head, kv, attention)  # type: ignore[type-var, arg-type]
    states = TargetStates(made, are_fused)
    source: Any = SimpleNamespace(rows=torch.arange(20.0).view(5, 4))
    index = torch.tensor([3, 1])
    want = source.rows[index] * (1 if are_fused else 2)
    assert torch.equal(states.at(source)(index), want)
    assert torch.equal(states.fuse(source.rows[index]), want)
    assert head.were_few == ([] if are_fused else [False, True])
