"""What a draft reads of a forward of the target: `DraftFeatures`."""

from dataclasses import dataclass

import torch

from foredraft.layers.fusion import Fusion
from foredraft.runner.model_runner import ForwardOutput


@dataclass(frozen=True, slots=True)
class DraftFeatures:
    """Takes the rows that a draft reads from the output of a forward.

    Attributes:
        layers: Layers whose input residual stream the draft reads; empty for the state after the
            final norm.
        fusion: Projects rows before they are sent; None where they are sent as they are.
    """

    layers: tuple[int, ...]
    fusion: Fusion | None

    def of(self, output: ForwardOutput) -> torch.Tensor:
        """Returns the hidden states that a forward captured for the draft, [T, width]."""
        return output.streams_of(self.layers) if self.layers else output.hidden

    @torch.inference_mode()
    def projected(self, rows: torch.Tensor) -> torch.Tensor:
        """Projects rows [n, width] to what the draft is sent.

        Returns the rows unchanged where the draft projects them itself.
        """
        if self.fusion is None or not len(rows):
            return rows
        weight = next(iter(self.fusion.tensors().values()))
        return self.fusion(rows.to(weight.dtype))

    def handed(
        self, output: ForwardOutput, index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rows of a running step for a draft that follows on the device.

        Args:
            output: Output of the step's forward.
            index: int64 [n], indices of the forward's rows that the step may commit.

        Returns:
            The rows, and the indices into them that stand for `index`.
        """
        source = self.of(output)
        if self.fusion is None:
            return source, index
        # Indices of rows that were not accepted may lie beyond the forward's rows.
        rows = self.projected(source.index_select(0, index.clamp(0, len(source) - 1)))
        return rows, torch.arange(len(index), device=index.device)
