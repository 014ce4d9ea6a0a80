"""The operations of a draft's step beside the model's forward: by one kernel each where these work,
else by torch.
"""

from typing import Protocol

import torch

from draft_service.steps import hand_on, outcomes, plan, uploads
from draft_service.steps.records import DraftShape
from draft_service.steps.static_beams import StaticBeams
from foredraft.sampling.rows import SamplingRows
from foredraft.trees.tree_building import Ordering


class Beams(Protocol):
    """Grows beam trees level by level; see `StaticBeams` for the methods."""

    def grow(
        self, logits: torch.Tensor, token_map: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def grow_all(self, logits: torch.Tensor, token_map: torch.Tensor | None) -> None: ...

    def seen(self) -> torch.Tensor: ...

    def write(self, results: torch.Tensor) -> None: ...


class StepOperations:
    """Chooses between kernels and torch once, for all steps of an attach.

    Args:
        shape: Sizes of the trees.
        ordering: Order of a node's children.
        device: Device of the steps.

    Attributes:
        apply_updates, fill, begin_block, hand_on_trees, select: See the functions of these names
            in `uploads`, `plan`, `hand_on` and `outcomes`.
    """

    def __init__(self, shape: DraftShape, ordering: Ordering, device: torch.device) -> None:
        self._shape, self._ordering, self._device = shape, ordering, device
        self._has_kernels = False
        if device.type == "cuda":
            from draft_service.steps import device_beams  # needs triton

            self._has_kernels = device_beams.works(shape.num_steps, shape.topk, shape.vocab, device)
        self.apply_updates = uploads.apply_updates
        self.fill = plan.fill
        self.begin_block = plan.begin_block
        self.hand_on_trees = hand_on.hand_on_trees
        self.select = outcomes.select
        if self._has_kernels:
            from draft_service.steps import kernels, outcome_kernels

            self.apply_updates = kernels.apply_updates
            self.fill = kernels.fill
            self.begin_block = kernels.begin_block
            self.hand_on_trees = kernels.hand_on_trees
            self.select = outcome_kernels.select

    def beams(self, batch: int, sampling: SamplingRows) -> Beams:
        """Returns the beams of one drafting round, which begin at the roots.

        Args:
            batch: Number of sequences.
            sampling: Sampling parameters of the sequences, which coupled drafts follow.
        """
        shape = self._shape
        rows = sampling if self._ordering == "coupled" else None
        if self._has_kernels and (rows is None or not rows.any_ranked):
            from draft_service.steps.device_beams import DeviceBeams

            return DeviceBeams(
                batch,
                shape.num_steps,
                shape.topk,
                shape.vocab,
                self._ordering,
                self._device,
                rows if rows is not None and rows.any_sampled else None,
            )
        return StaticBeams(
            batch, shape.num_steps, shape.topk, shape.num_nodes + 1, self._ordering, rows
        )
