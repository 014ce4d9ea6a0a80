"""Temperature, top-k, top-p and min-p over whole rows of logits, with deterministic ties.

In this order: temperature; top-k keeps the k best; top-p keeps the smallest prefix of what remains,
best first, whose probability (renormalised) reaches p, and at least one token; min-p keeps what is
at least min_p times as likely as the best. Of equally likely tokens the lower id comes first.
"""

import math

import torch

from foredraft.sampling.rows import SamplingRows

# Of a mass: above the rounding of sums in float64, far below that of p. What is reached exactly
# then counts as reached in whatever order the sum is.
_REACHED = 1 - 1e-12


def tempered(
    logits: torch.Tensor, rows: SamplingRows, best: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes (logits - best) / temperature, float32 [R, V]: tempered log-probabilities relative
    to the best token's 0.

    Args:
        best: float32 [R], the best tokens' logits; by default the largest of each row.
    """
    best = logits.amax(-1) if best is None else best
    return relative(logits, best[:, None], rows.temperature[:, None])


def relative(logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Computes the same as `tempered` for any part of a row.

    Subtracting first keeps the digits where they matter, near the best.
    """
    best = torch.where(best == -math.inf, 0.0, best)
    return (logits - best).div_(torch.where(temperature > 0, temperature, 1.0))


def log_min_p(rows: SamplingRows) -> torch.Tensor:
    """Returns the lowest tempered relative log-probability that min-p keeps, float32 [R]."""
    return rows.min_p.log()


def keep_mask(scores: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Returns which tokens the filters keep.

    Args:
        scores: float32 [R, V] from `tempered`.
        rows: The parameters of each row.

    Returns:
        bool [R, V].
    """
    keep = scores >= log_min_p(rows)[:, None]
    if not rows.any_ranked:
        return keep
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    total = _total_mass(scores)
    kept = ranked_keep(ranked, total, rows)
    return keep & torch.empty_like(keep).scatter_(-1, order, kept)


def _masses(scores: torch.Tensor) -> torch.Tensor:
    """Returns exp(scores), float64; of float32 on a GPU, whose kernels have no other."""
    return scores.exp().to(torch.float64) if scores.is_cuda else scores.to(torch.float64).exp_()


def _total_mass(scores: torch.Tensor) -> torch.Tensor:
    """Sums exp(scores) of each row, float32 [R, V] -> float64 [R]."""
    if not scores.is_cuda:
        return _masses(scores).sum(-1)
    # Short sums in float32, which are fast, and their sum in float64.
    padded = torch.nn.functional.pad(scores.exp(), (0, -scores.shape[-1] % 256))
    return padded.view(scores.shape[0], -1, 256).sum(-1).sum(-1, dtype=torch.float64)


def ranked_keep(ranked: torch.Tensor, total: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Returns which of a row's ranked tokens top-k and top-p keep.

    Args:
        ranked: float32 [R, C], tempered scores, best first, with every token that can be kept (ties
            at the k-th place included); minus infinity after a row's last token.
        total: float64 [R], the sum of exp(scores) over the whole row.
        rows: The parameters of each row.

    Returns:
        bool [R, C].
    """
    width = ranked.shape[-1]
    limited = rows.top_k > 0
    top_k = torch.where(limited, rows.top_k, width).clamp_max(width)[:, None]
    mass = _masses(ranked)
    through = mass.cumsum(-1)
    total = torch.where(limited, through.gather(-1, top_k - 1)[:, 0], total)[:, None]
    top_p = rows.top_p.to(torch.float64)[:, None]
    before = through - mass
    rank = torch.arange(width, device=ranked.device)
    has_enough = (rank > 0) & (top_p < 1) & (before >= top_p * total * _REACHED)
    return (rank < top_k) & ~has_enough
