"""What one algorithm with KV on the verifier's pages computes: `DraftMethod`.

`paged_proposer` has the order of work in a step, which is the same for all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draft_service.drafters.beam_drafting import TreeRequest
from draft_service.drafters.hidden_source import HiddenSource
from draft_service.drafters.paged_sequences import Extension
from draft_service.steps.draft_step import DraftStep, StepOptions
from foredraft.api.draft.v1 import draft_pb2
from foredraft.models.config import ModelConfig
from foredraft.transport.base import HiddenReader
from foredraft.trees.draft_tree import DraftTree
from foredraft.trees.tree_building import Ordering


@dataclass(frozen=True, slots=True)
class MethodSizes:
    """Sizes of a draft model, as one verifier uses it.

    Attributes:
        config: Configuration of the model, or of a head's layers.
        dtype: Type of its activations, and of the hidden states that it reads.
        device: Device that it runs on.
        num_columns: Number of columns of its logits.
        feature_size: Number of elements of the features that a level takes from the one before;
            0 for none.
        row_width: Number of elements of a hidden state of the target, as the verifier sends it; 0
            for a model that reads tokens alone.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    num_columns: int
    feature_size: int = 0
    row_width: int = 0

    @property
    def shift(self) -> int:
        """Distance of a token's key index to its position, see `PagedSequences`."""
        return int(self.row_width > 0)


class DraftMethod(ABC):
    """Computes committed tokens and trees with one model, for one verifier.

    Attributes:
        sizes: Sizes of the model.
    """

    sizes: MethodSizes

    @abstractmethod
    def extend(
        self, extensions: Sequence[Extension], reader: HiddenReader | None
    ) -> list[TreeRequest]:
        """Computes the KV of committed tokens, in order; returns the trees that are wanted.

        Args:
            extensions: The committed tokens.
            reader: Reads the target's hidden states; None for a model that reads tokens alone.

        Raises:
            InvalidRequest: Hidden states are missing.
        """

    @abstractmethod
    def draft(self, requests: Sequence[TreeRequest]) -> list[DraftTree]:
        """Returns a tree for each of `extend`'s requests, in their order."""

    @abstractmethod
    def warm_up(self) -> None:
        """Compiles the kernels of `extend` on a GPU.

        Writes to the first page, which no sequence has yet.
        """

    def fixed_step(self, options: StepOptions, source: HiddenSource | None) -> DraftStep:
        """Creates the steps of fixed shape that do the same on the device.

        Args:
            options: What the attach asks for.
            source: The target's hidden states; None for a model that reads tokens alone.
        """
        raise NotImplementedError(f"{type(self).__name__} has no steps of fixed shape")


def ordering_of(attach: draft_pb2.AttachRequest) -> Ordering:
    """Returns the order of a node's children that a verifier asks for."""
    return "coupled" if attach.draft_sampling == "coupled" else "topk"
