"""Unrolls drafting for training: all positions draft several tokens ahead in parallel.

Later tokens are drafted from the head's own outputs.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.draft.heads import DraftHead


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """Inputs of a head for a batch of windows of T tokens.

    Attributes:
        embeds: Embeddings of the tokens [B, T, H], not scaled.
        hidden: The target's hidden states after its final norm [B, T, H].
        captured: The residual streams that the head reads, [B, T, H] each.
    """

    embeds: Tensor
    hidden: Tensor
    captured: list[Tensor]


def unroll(
    head: DraftHead,
    inputs: DraftInputs,
    output_weight: Tensor,
    steps: int,
    noise: float = 0.0,
) -> list[tuple[Tensor, Tensor]]:
    """Computes training-time test for all positions at once (EAGLE-3, Li et al. 2025, section 3.2).

    Row i of step k stands at slot i + k: it takes the token of position i + k + 1 and, as feature,
    the target's at k = 0 and the output of row i of step k - 1 later; it predicts the token at
    position i + k + 2. Its attention sees the target-made slots 0 .. i and its own earlier steps,
    the same as drafting from slot i does.

    Args:
        head: The head.
        inputs: Windows of T tokens.
        output_weight: The target's output head [V, H].
        steps: Number of tokens to draft, K.
        noise: Half width of the uniform noise on the target's features (EAGLE's augmentation).

    Returns:
        For every step (output features [B, N, H], logits [B, N, draft vocabulary]), with N = T - K
        - 1 rows.
    """
    rows = inputs.embeds.shape[1] - steps - 1
    device = inputs.embeds.device
    features = head.fuse(inputs.hidden, inputs.captured)[:, :rows]
    if noise:
        features = features + (torch.rand_like(features) - 0.5) * (2 * noise)
    index = torch.arange(rows, device=device)
    causal = index[:, None] >= index
    own = index[:, None] == index
    keys: list[Tensor] = []
    values: list[Tensor] = []
    results = []
    for step in range(steps):
        positions = index + step
        embeds = inputs.embeds[:, step + 1 : step + 1 + rows]
        x, residual = head.prepare(embeds, features, positions)
        q, k, v = head.project(x, positions)
        keys.append(k)
        values.append(v)
        if step == 0:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = torch.cat((causal, *(own for _ in range(step))), dim=1)
            mixed = F.scaled_dot_product_attention(
                q, torch.cat(keys, dim=2), torch.cat(values, dim=2), attn_mask=mask
            )
        features = head.complete(mixed, residual)
        results.append((features, head.logits(features, output_weight)))
    return results


def draft_loss(
    results: list[tuple[Tensor, Tensor]],
    hidden: Tensor,
    target_probs: Tensor,
    decay: float,
    token_weight: float,
    feature_weight: float,
) -> tuple[Tensor, Tensor]:
    """Computes cross-entropy to the target's distribution plus regression to its features.

    Both are summed over the steps.

    Args:
        results: Results of `unroll`.
        hidden: The target's hidden states after its final norm [B, T, H].
        target_probs: The target's probabilities of the draft vocabulary's tokens [B, T, Vd]; they
            need not sum to one, so tokens outside the draft vocabulary weigh nothing.
        decay: Weight of a step relative to the one before it.
        token_weight, feature_weight: Weights of the two losses.

    Returns:
        (loss, share of rows at each step where the head's best token is the target's best of the
        draft vocabulary [K]).
    """
    loss = hidden.new_zeros((), dtype=torch.float32)
    agreement = []
    for step, (features, logits) in enumerate(results):
        rows = features.shape[1]
        ahead = slice(step + 1, step + 1 + rows)
        probs = target_probs[:, ahead]
        log_q = F.log_softmax(logits.float(), dim=-1)
        part = -token_weight * (probs.float() * log_q).sum(-1).mean()
        if feature_weight:
            goal = hidden[:, ahead].float()
            part = part + feature_weight * F.smooth_l1_loss(features.float(), goal)
        loss = loss + decay**step * part
        agreement.append((logits.argmax(-1) == probs.argmax(-1)).float().mean())
    return loss, torch.stack(agreement)
