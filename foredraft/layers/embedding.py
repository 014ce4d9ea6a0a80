"""Token embedding and LM head, which may be one matrix."""

import torch
import torch.nn.functional as F
from torch import nn

from foredraft.layers.linear import Linear
from foredraft.layers.parameters import new_parameter


class Embedding(nn.Module):
    """Rows of a table, scaled.

    Attributes:
        weight: [vocab_size, hidden].
        takes_any_id: Ids beyond the table read its last row. Of a draft whose target pads the same tokens to a larger table:
            no token has such an id, but whoever sends ids may send it.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        scale: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = new_parameter((vocab_size, hidden_size), dtype, device)
        self.takes_any_id = False
        # Rounded to the weights' type first, as Gemma was trained.
        self._scale = torch.tensor(scale, dtype=dtype).item() if scale != 1.0 else None

    @property
    def is_plain(self) -> bool:
        """Whether rows of the table are embeddings as they are."""
        return self._scale is None and not self.takes_any_id

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [n] -> [n, hidden]."""
        if self.takes_any_id:
            tokens = tokens.clamp(max=len(self.weight) - 1)
        # On a GPU the latter takes several times as long for a few tokens.
        rows = self.weight[tokens] if self.weight.is_cuda else F.embedding(tokens, self.weight)
        return rows if self._scale is None else rows.mul_(self._scale)


class LMHead(Linear):
    """Hidden states after the final norm to logits.

    Args:
        tied: The embedding whose weight this is too, or None.
        softcap: Logits are capped by tanh to it; None for no cap.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        tied: Embedding | None,
        softcap: float | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        size = (0, 0) if tied is not None else (hidden_size, vocab_size)
        super().__init__(*size, False, dtype, device)
        if tied is not None:
            self.weight = tied.weight
        self.softcap = softcap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden] -> [num_rows, vocab_size]: float32 on the CPU and where capped, else of x's type."""
        logits = super().forward(x)
        if self.softcap is None:
            # On a GPU whoever reads the largest tensor of a step converts it on the way.
            return logits if logits.is_cuda else logits.float()
        logits = logits.float()
        return (logits / self.softcap).tanh_().mul_(self.softcap)
