"""Token embedding and LM head, which may be one matrix."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from foredraft.layers import fused
from foredraft.layers.linear import Linear, LinearMethod
from foredraft.layers.norm import RMSNorm
from foredraft.layers.normed import Normed
from foredraft.layers.parameters import Target, new_parameter
from foredraft.parallel.group import SINGLE, Group


class VocabularyShare:
    """The range of tokens whose rows of a table belong to one rank.

    Attributes:
        total: Number of tokens of the whole vocabulary.
        first: The first token of this rank.
        size: Number of rows that every rank has, the last one's padding included.
        count: Number of this rank's tokens.
    """

    def __init__(self, total: int, group: Group) -> None:
        self.total, self.group = total, group
        self.size = -(-total // group.size)
        self.first = min(total, self.size * group.rank)
        self.count = min(self.size, total - self.first)

    def target(self, weight: torch.Tensor) -> Target:
        """Returns the memory that a checkpoint's table [total, hidden] fills in a weight [size,
        hidden].
        """
        return Target(weight[: self.count], (self.total, weight.shape[1]), 0, self.first)

    def clear_padding(self, weight: torch.Tensor) -> None:
        """Sets the rows that belong to no token."""
        with torch.no_grad():
            weight[self.count :].zero_()


class Embedding(nn.Module):
    """Looks up rows of a table, and scales them.

    Args:
        table: Holds the rows in a form of its own; None for plain ones.

    Attributes:
        weight: [vocab_size, hidden], of a group this rank's share of the rows; absent where there
            is a `table`.
        takes_any_id: Ids beyond the table read its last row. Of a draft whose target pads the same
            tokens to a larger table: no token has such an id, but whoever sends ids may send it.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        scale: float,
        dtype: torch.dtype,
        device: torch.device,
        group: Group = SINGLE,
        table: Linear | None = None,
    ) -> None:
        super().__init__()
        self.share = VocabularyShare(vocab_size, group)
        self.table, self._dtype = table, dtype
        if table is None:
            self.weight = new_parameter((self.share.size, hidden_size), dtype, device)
            self.share.clear_padding(self.weight)
        self.takes_any_id = False
        # Rounded to the weights' type first, as Gemma was trained.
        self._scale = torch.tensor(scale, dtype=dtype).item() if scale != 1.0 else None

    @property
    def is_plain(self) -> bool:
        """Whether embeddings are unscaled rows of a whole table."""
        is_whole = self.table is None and self.share.group.size == 1
        return is_whole and self._scale is None and not self.takes_any_id

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Looks up embeddings, int64 [n] -> [n, hidden]."""
        if self.share.group.size > 1:
            rows = self._gathered(tokens)
            return rows if self._scale is None else rows.mul_(self._scale)
        if self.table is not None:
            if self.takes_any_id:
                tokens = tokens.clamp(max=self.share.total - 1)
            rows = self.table.method.rows(self.table, tokens).to(self._dtype)
            return rows if self._scale is None else rows.mul_(self._scale)
        if self.takes_any_id:
            tokens = tokens.clamp(max=len(self.weight) - 1)
        # On a GPU the latter takes several times as long for a few tokens.
        rows = self.weight[tokens] if self.weight.is_cuda else F.embedding(tokens, self.weight)
        return rows if self._scale is None else rows.mul_(self._scale)

    def normed(
        self, tokens: torch.Tensor, norm: RMSNorm, reader: Linear
    ) -> tuple[torch.Tensor, Normed]:
        """Looks up embeddings, and returns them and their norm; `reader` reads the norm first."""
        if not self.is_plain:
            rows = self(tokens)
            return rows, Normed(norm(rows))
        size = len(tokens), self.weight.shape[1]
        rows, out = self.weight.new_empty(size), self.weight.new_empty(size)
        return rows, Normed(out, norm.of_rows(self.weight, tokens, out, rows, reader))

    def _gathered(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns rows from the rank that has each; the other ranks add zeros."""
        share = self.share
        if fused.on_gpu(self.weight):
            rows = fused.rows_of_ranks(self.weight, tokens, share.first, share.count, share.group)
            if rows is not None:
                return rows
        own = tokens - share.first
        is_own = (own >= 0) & (own < share.count)
        rows = self.weight[own.clamp(0, len(self.weight) - 1)]
        return share.group.all_reduce(rows.masked_fill_(~is_own[:, None], 0))


class LMHead(Linear):
    """Computes logits from hidden states after the final norm.

    Args:
        tied: The embedding that shares the weight, or None.
        softcap: Limit that tanh caps logits to; None for no cap.
        group: Ranks that hold parts of the matrix's rows; every rank gets all logits.
        method: Form of the weights; None for plain ones.

    Attributes:
        gathers: Whether all ranks of a group get all logits; else each has those of its own tokens,
            until `gather` is called.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        tied: Embedding | None,
        softcap: float | None,
        dtype: torch.dtype,
        device: torch.device,
        group: Group = SINGLE,
        method: LinearMethod | None = None,
    ) -> None:
        share = VocabularyShare(vocab_size, group)
        size = (0, 0) if tied is not None else (hidden_size, share.size)
        super().__init__(*size, False, dtype, device, method=method)
        self.share = share
        if tied is not None:
            self.weight = tied.weight
        elif method is None:
            share.clear_padding(self.weight)
        self.softcap = softcap
        self.gathers = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes logits, [num_rows, hidden] -> [num_rows, vocab_size].

        They are float32 on the CPU and where capped, else of x's type.
        """
        logits = super().forward(x)
        if self.share.group.size > 1:
            if self.gathers:
                logits = self.gather(logits)
            else:
                logits[:, self.share.count :] = -math.inf
        if self.softcap is None:
            # On a GPU the readers of the largest tensor of a step convert it themselves.
            return logits if logits.is_cuda else logits.float()
        capped = (logits.float() / self.softcap).tanh_().mul_(self.softcap)
        return capped if self.gathers else capped.masked_fill_(logits == -math.inf, -math.inf)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """The ranks' parts [num_rows, share.size] as whole rows [num_rows, vocab_size]."""
        return self.share.group.all_gather(logits)[:, : self.share.total].contiguous()
