"""Muon for the hidden matrices, AdamW for embeddings and norms, with one state dict."""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

ITERATIONS = 5  # number of Newton-Schulz iterations
MOMENTUM = 0.95  # Nesterov momentum of Muon
FLOOR = 0.02  # share of the peak learning rate at the end


def orthogonalize(gradients: Tensor) -> Tensor:
    """Returns the nearest semi-orthogonal matrices to a stack [N, rows, cols].

    It uses Newton-Schulz iterations in bf16.

    The quintic coefficients are from Jordan et al., "Muon" (2024): singular values end near one,
    not at it.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradients.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class MuonAdamW:
    """Two optimizers behind one learning rate.

    A Muon update is scaled to a root mean square of 0.2, AdamW's usual one (Liu et al. 2025, "Muon
    is scalable"), so both take the same learning rate and decoupled weight decay.

    Args:
        model: Model to train. Muon updates its 2-D weights outside embeddings and output head,
            AdamW the rest; `muon=False` leaves all to AdamW.
        weight_decay: Decoupled decay of the 2-D weights.
    """

    def __init__(self, model: nn.Module, weight_decay: float, muon: bool = True) -> None:
        self.weight_decay = weight_decay
        groups: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        decayed: list[Tensor] = []
        plain: list[Tensor] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            embedding = any(part in name for part in ("embed_tokens", "lm_head", "markov_w"))
            if muon and parameter.dim() == 2 and not embedding:
                groups[tuple(parameter.shape)].append(parameter)
            elif parameter.dim() == 2:
                decayed.append(parameter)
            else:
                plain.append(parameter)
        self._groups = list(groups.values())
        self._momenta = [
            torch.zeros(len(group), *group[0].shape, device=group[0].device)
            for group in self._groups
        ]
        device = next(model.parameters()).device
        self._adam = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=device.type == "cuda",
        )
        self._orthogonalize = (
            torch.compile(orthogonalize, dynamic=False) if device.type == "cuda" else orthogonalize
        )

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Updates the weights from their gradients and clears these."""
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        for parameters, momentum in zip(self._groups, self._momenta, strict=True):
            gradients = torch.stack([parameter.grad for parameter in parameters])  # type: ignore[misc]
            momentum.lerp_(gradients, 1 - MOMENTUM)
            nesterov = gradients.lerp(momentum, MOMENTUM)
            rows, cols = nesterov.shape[-2:]
            update = self._orthogonalize(nesterov).float() * (0.2 * math.sqrt(max(rows, cols)))
            torch._foreach_mul_(parameters, 1 - lr * self.weight_decay)
            torch._foreach_add_(parameters, list(update.unbind()), alpha=-lr)
            for parameter in parameters:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that a later run needs to continue exactly."""
        return {"adam": self._adam.state_dict(), "muon": self._momenta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state from `state_dict`."""
        self._adam.load_state_dict(state["adam"])
        for momentum, saved in zip(self._momenta, state["muon"], strict=True):
            momentum.copy_(saved)


def cosine_schedule(step: int, steps: int, warmup: int, peak: float) -> float:
    """Returns the learning rate of 0-based `step`: linear warm-up, then a cosine.

    The cosine ends at a fiftieth of the peak.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
