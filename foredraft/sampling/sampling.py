"""The sampling rule: which token follows, as a function of logits, parameters, seed and position,
and of nothing else.

    chosen = argmax_v(log p(v) + g(seed, position, v))     temperature > 0, p after temperature, top-k, top-p, min-p
    chosen = argmax_v(logits(v))                           temperature = 0

The noise lives in `noise`, the rule for a CPU in `rule_cpu`, for a GPU in `triton_sampling`. What is
here as operations on whole rows is their reference, and serves drafts on a GPU.
"""  # noqa: E501

import math

import torch

from foredraft.sampling import rule_cpu
from foredraft.sampling.filters import keep_mask, tempered
from foredraft.sampling.noise import gumbel
from foredraft.sampling.rows import SamplingRows
from foredraft.types import NO_TOKEN

# Rows at a time by kernels, which keep a number for each token of each.
_KERNEL_ROWS = 128


def choose(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Applies the rule; of equal scores the lowest token id wins.

    Args:
        logits: float32 [R, V], penalties and masks applied.
        rows: The parameters of each row.

    Returns:
        int64 [R], the chosen tokens; NO_TOKEN for a row in which a logit is NaN or plus infinity.
    """
    if not rows.any_sampled:
        return choose_greedily(logits)
    return _choose_by_kernels(logits, rows) if logits.is_cuda else rule_cpu.choose(logits, rows)


def choose_greedily(logits: torch.Tensor) -> torch.Tensor:
    """Applies the rule for temperature 0, see `choose`."""
    if not logits.is_cuda:
        return rule_cpu.greedy(logits)
    return greedy(scrub(logits)).masked_fill_(broken_rows(logits), NO_TOKEN)


def broken_rows(logits: torch.Tensor) -> torch.Tensor:
    """Returns which rows of [R, V] have a NaN or plus infinity, bool [R]."""
    return ~(logits.amax(-1) < math.inf)


def _choose_by_kernels(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    from foredraft.sampling.triton_sampling import choose_tokens

    parts = [
        choose_tokens(
            logits[first : first + _KERNEL_ROWS],
            rows.take(slice(first, first + _KERNEL_ROWS)),
        )
        for first in range(0, len(rows), _KERNEL_ROWS)
    ]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def scrub(logits: torch.Tensor) -> torch.Tensor:
    """Replaces NaN by minus infinity and plus infinity by the largest number; copies only where
    needed.
    """
    # The CPU looks before it copies; on a GPU looking would wait for the device.
    if not logits.is_cuda and (not len(logits) or float(logits.max()) < math.inf):
        return logits
    largest = torch.finfo(logits.dtype).max
    return torch.nan_to_num(logits, nan=-math.inf, posinf=largest, neginf=-math.inf)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Returns the lowest id among the largest logits of each row without NaN, int64 [R]."""
    return logits.argmax(-1) if logits.is_cuda else rule_cpu.greedy(logits)


def perturbed_top(
    logits: torch.Tensor,
    rows: SamplingRows,
    k: int,
    token_map: torch.Tensor | None = None,
    dense: bool | None = None,
    best: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the k best tokens by log p + g, best first. The rule chooses the first.

    Args:
        logits: float32 [R, V] without NaN; rows with temperature 0 are treated as temperature 1.
        rows: The parameters of each row.
        k: Number of tokens, at most V.
        token_map: int64 [V], the target's token id of each column, for a reduced vocabulary.
        dense: Whether to compute whole rows by operations of torch, with the noise of every token;
            by default on a GPU. The result is the same.
        best: float32 [R], the largest logit of each row's whole vocabulary, where `logits` are a
            part of it and no row has a top-k or top-p.

    Returns:
        int64 [R, k] columns and float32 [R, k] scores, relative to an unperturbed best token's 0;
        minus infinity where the filters keep fewer than k tokens.
    """
    if not (logits.is_cuda if dense is None else dense):
        return rule_cpu.perturbed_top(logits, rows, k, token_map, best)
    scores = tempered(logits, rows, best)
    scores.masked_fill_(~keep_mask(scores, rows), -math.inf)
    tokens = (
        token_map if token_map is not None else torch.arange(logits.shape[-1], device=logits.device)
    )
    scores += gumbel(rows.seed, rows.position, tokens)
    if k == 1:
        best = scores.argmax(-1, keepdim=True)
        return best, scores.gather(-1, best)
    columns = scores.topk(k, dim=-1).indices.sort(-1).values
    top, order = scores.gather(-1, columns).sort(dim=-1, descending=True, stable=True)
    return columns.gather(-1, order), top


def probabilities(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Computes the distribution that the rule samples from, float32 [R, V]; one-hot for temperature
    0.
    """
    logits = scrub(logits)
    scores = tempered(logits, rows)
    probs = scores.masked_fill(~keep_mask(scores, rows), -math.inf).softmax(-1)
    one_hot = torch.zeros_like(probs).scatter_(-1, greedy(logits)[:, None], 1.0)
    return torch.where(rows.temperature[:, None] > 0, probs, one_hot)


def log_probs(
    logits: torch.Tensor, tokens: torch.Tensor, top_n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes log-probabilities from the raw logits (temperature 1, no filters).

    Args:
        logits: float32 [R, V].
        tokens: int64 [R], the emitted tokens.
        top_n: Number of alternatives, best first.

    Returns:
        float32 [R] of the emitted tokens, int64 [R, top_n] alternatives, float32 [R, top_n] of
        these.
    """
    norm = logits.logsumexp(-1, keepdim=True)
    emitted = (logits.gather(-1, tokens[:, None]) - norm)[:, 0]
    top = logits.topk(top_n, dim=-1)
    return emitted, top.indices, top.values - norm
