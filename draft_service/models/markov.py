"""DSpark's addition to a block: a bias of logits by the previous token."""

import torch
from torch import nn

from foredraft.layers.linear import Linear
from foredraft.layers.parameters import new_parameter
from foredraft.models.block_config import BlockOptions

PREFIX = "markov_head."


class MarkovHead(nn.Module):
    """Computes the bias W2 f(W1[previous token]) of rank r over the columns of the draft's
    vocabulary.

    f is the identity (`vanilla`), a gate by the row's hidden state (`gated`), or a recurrence over
    the rows (`rnn`).

    Args:
        options: Options of the block, with markov_rank above 0.
        size: Width H of hidden states.
        num_tokens: Number of rows of W1: tokens of the target's vocabulary.
        num_columns: Number of rows of W2: columns of the draft's logits.
    """

    def __init__(
        self,
        options: BlockOptions,
        size: int,
        num_tokens: int,
        num_columns: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        rank = options.markov_rank
        self._rank, self._kind = rank, options.markov_kind
        self.tokens = new_parameter((num_tokens, rank), dtype, device)
        self.columns = Linear(rank, num_columns, False, dtype, device)
        self.gate: Linear | None = None
        if self._kind == "gated":
            self.gate = Linear(size + rank, rank, True, dtype, device)
        elif self._kind == "rnn":
            self.gate = Linear(2 * rank + size, 3 * rank, True, dtype, device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the memory that each tensor of a checkpoint fills."""
        found: dict[str, torch.Tensor] = {
            f"{PREFIX}markov_w1.weight": self.tokens,
            f"{PREFIX}markov_w2.weight": self.columns.weight,
        }
        if self.gate is not None and self.gate.bias is not None:
            name = "gate_proj" if self._kind == "gated" else "joint_proj"
            found[f"{PREFIX}{name}.weight"] = self.gate.weight
            found[f"{PREFIX}{name}.bias"] = self.gate.bias
        return found

    def start(self, batch: int) -> torch.Tensor:
        """Returns the state before the first row, [batch, r]; only `rnn` changes it."""
        return self.tokens.new_zeros(batch, self._rank)

    def embed(self, previous: torch.Tensor) -> torch.Tensor:
        """Computes W1[previous]: int64 [n] -> [n, r]."""
        return self.tokens[previous]

    def bias(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the bias of the logits of one row of each sequence, [n, columns], and the
        next state.

        Args:
            embedded: [n, r], from `embed` for the previous tokens.
            hidden: [n, H], hidden states of the rows.
            state: [n, r], state after the previous rows.
        """
        if self.gate is None:
            return self.columns(embedded), state
        if self._kind == "gated":
            gate = self.gate(torch.cat((hidden, embedded), -1)).sigmoid()
            return self.columns(gate * embedded), state
        parts = self.gate(torch.cat((state, embedded, hidden), -1)).chunk(3, -1)
        kept, candidate, out = parts[0].sigmoid(), parts[1].tanh(), parts[2].tanh()
        return self.columns(out), kept * state + (1 - kept) * candidate
