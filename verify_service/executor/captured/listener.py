"""What other ranks must hear of captured steps: `StepListener`."""

from collections.abc import Sequence
from typing import Protocol

from foredraft.runner.batch import StepRows
from verify_service.executor.captured.step import StepKind
from verify_service.executor.captured.step_buffers import StepBuffers
from verify_service.executor.records import PageUpdate


class StepListener(Protocol):
    """Hears of captured steps before this process starts or captures them.

    The records of a step are in the newest buffers (`StepBuffers.all_records`).
    """

    def pages(self, updates: Sequence[PageUpdate]) -> None:
        """Hears of changed page tables."""

    def step(self, kind: StepKind, num_sequences: int, buffers: StepBuffers) -> None:
        """Hears of a whole step."""

    def forward(self, kind: StepKind, num_sequences: int, buffers: StepBuffers) -> None:
        """Hears of a forward whose tokens the sampler chooses."""

    def prepare(self, kind: StepKind, num_sequences: int, buffers: StepBuffers) -> None:
        """Hears that the graphs of a step are captured."""

    def two_phase_step(self, kind: StepKind, num_sequences: int, buffers: StepBuffers) -> None:
        """Hears of a two-phase step."""

    def mixed(self, rows: Sequence[StepRows], layers: Sequence[int]) -> None:
        """Hears of a forward with prompts."""

    def mixed_warm_up(self, layers: Sequence[int], has_branches: bool) -> None:
        """Hears that forwards with prompts are captured."""
