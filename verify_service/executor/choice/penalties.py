"""Penalties and biases that depend on a sequence's tokens, applied to the logits of tree rows.

They apply to the raw logits in this order: repetition penalty (Keskar et al. 2019: positive logits
of tokens in prompt or output are divided by it, negative ones multiplied), frequency and presence
penalties over the output (OpenAI's definition), logit bias, and the mask that holds back
end-of-sequence tokens before `min_new_tokens`.
"""

import math
from collections.abc import Iterable, Sequence

import torch

from foredraft.types import SamplingParams
from verify_service.scheduler.token_limits import biases, is_biased


def needed(params: SamplingParams) -> bool:
    """Returns whether a request with these parameters needs a `PenaltyState`."""
    return params.has_penalties or params.min_new_tokens > 0 or is_biased(params)


class PenaltyState:
    """The committed history of one sequence, as far as its penalties need it.

    Args:
        params: The request's parameters.
        prompt_tokens: The prompt.
        vocab_size: Ids at or above it are ignored.
        device: Device of the logits.
        eos_token_ids: The model's own end-of-sequence tokens, masked with the request's stop
            tokens.

    Attributes:
        num_committed: Number of output tokens that were added.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_tokens: Sequence[int],
        vocab_size: int,
        device: torch.device | str = "cpu",
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self._params = params
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._uses_history = params.has_penalties
        self.num_committed = 0
        self._slots: dict[int, int] = {}  # token -> its index in the two tensors below
        self._ids = self._ints([0] * 64)
        self._counts = torch.zeros(64, device=device)  # occurrences in the output
        bias = torch.from_numpy(biases(params, vocab_size))
        # Few are biased mostly, and all but few where only these are allowed.
        found = bias.nonzero()[:, 0]
        is_few = len(found) < vocab_size // 4
        self._bias_ids = found.to(device) if is_few else slice(None)
        self._bias = (bias[found] if is_few else bias).to(device)
        ends = {t for t in (*params.stop_token_ids, *eos_token_ids) if 0 <= t < vocab_size}
        self._end_ids = self._ints(sorted(ends))
        if params.repetition_penalty != 1.0:
            self._add(prompt_tokens, 0.0)

    def commit(self, tokens: Sequence[int]) -> None:
        """Adds emitted tokens to the history."""
        self.num_committed += len(tokens)
        if self._uses_history:
            self._add(tokens, 1.0)

    def apply_(
        self, logits: torch.Tensor, paths: Sequence[Sequence[int]], output_index: Sequence[int]
    ) -> torch.Tensor:
        """Applies penalties and biases to logits in place.

        Args:
            logits: float32 [n, V], one row per row of the tree.
            paths: For every row the tokens on its path after the committed ones, its own included
                (`tree.paths`).
            output_index: For every row, the length of the output once the token chosen there is
                appended.

        Returns:
            `logits`.
        """
        if self._uses_history:
            self._apply_history_(logits, paths)
        if len(self._bias):
            logits[:, self._bias_ids] += self._bias
        early = [j for j, index in enumerate(output_index) if index < self._params.min_new_tokens]
        if early and len(self._end_ids):
            logits[self._ints(early)[:, None], self._end_ids] = -math.inf
        return logits

    def _apply_history_(self, logits: torch.Tensor, paths: Sequence[Sequence[int]]) -> None:
        # A row differs from the committed history only at the tokens of its own path: those are
        # computed from their raw logits and written last, over the values that every row shares.
        extra: dict[tuple[int, int], int] = {}
        for row, path in enumerate(paths):
            for token in path:
                if 0 <= token < self._vocab_size:
                    extra[row, token] = extra.get((row, token), 0) + 1
        own_rows = self._ints([row for row, _ in extra])
        own_ids = self._ints([token for _, token in extra])
        slots = [self._slots.get(token, -1) for _, token in extra]
        own_counts = torch.tensor(list(extra.values()), dtype=torch.float32, device=self._device)
        known = self._ints(slots)
        own_counts += torch.where(known >= 0, self._counts[known.clamp_min(0)], 0.0)
        own = self._penalised(logits[own_rows, own_ids], own_counts)

        ids, counts = self._ids[: len(self._slots)], self._counts[: len(self._slots)]
        logits[:, ids] = self._penalised(logits[:, ids], counts)
        logits[own_rows, own_ids] = own

    def _penalised(self, values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        params = self._params
        if params.repetition_penalty != 1.0:
            values = torch.where(
                values > 0, values / params.repetition_divisor, values * params.repetition_divisor
            )
        # The presence term is a select, not a product, so that it is exact for a count of 0.
        return (
            values
            - counts * params.frequency_penalty
            - torch.where(counts > 0, params.presence_penalty, 0.0)
        )

    def _add(self, tokens: Iterable[int], weight: float) -> None:
        added: dict[int, float] = {}
        for token in tokens:
            if 0 <= token < self._vocab_size:
                added[token] = added.get(token, 0.0) + weight
        if not added:
            return
        new = [token for token in added if token not in self._slots]
        for token in new:
            self._slots[token] = len(self._slots)
        while len(self._ids) < len(self._slots):
            self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)])
            self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])
        slots = self._ints([self._slots[token] for token in added])
        self._ids[slots] = self._ints(list(added))
        self._counts[slots] += torch.tensor(
            list(added.values()), dtype=torch.float32, device=self._device
        )

    def _ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
