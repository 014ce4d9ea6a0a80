"""Random models whose greedy texts agree as often as wanted: each token has one successor, which a
target always takes, and which a draft ranks first, second, third, or nowhere.

Layers compute as ever, but the residual stream is so large that they do not change what follows.
Loading with --load-format dummy gives such models in a process where `install` was called.
`python -m testing.successors` does so and runs the draft service with the flags that follow,
or without flags another rank of the target. With ALWAYS_AHEAD in its environment a draft drafts
ahead whatever it costs.
"""

import os
import runpy
import sys

import torch

from draft_service.drafters.ahead_policy import AheadPolicy
from foredraft.models import loader
from foredraft.models.decoder import DecoderModel

# How often a draft ranks a token's successor first, second and third. With chains of 3 these give
# the accept length and the hits of foredraft-demo and its draft (docs/measurements/gpu.md).
RANKED = (0.72, 0.126, 0.042)
WEIGHTS = (1.0, 0.8, 0.65)  # of a token's three likeliest followers
STREAM = 1000.0  # the residual stream is so large that layers hardly change it
SEED = 5


def successors(vocab: int, is_draft: bool) -> torch.Tensor:
    """Returns the three likeliest followers of each token, int64 [3, vocab]."""
    generator = torch.Generator().manual_seed(SEED)
    true, *wrong = (torch.randperm(vocab, generator=generator) for _ in range(4))
    if not is_draft:
        return torch.stack((true, *wrong[:2]))
    chance = torch.rand(vocab, generator=generator)
    place = torch.bucketize(chance, torch.tensor(RANKED).cumsum(0), right=True)
    followers = torch.stack(wrong)
    for rank in range(len(RANKED)):
        followers[rank] = torch.where(place == rank, true, followers[rank])
    return followers


@torch.no_grad()
def relate(model: DecoderModel, is_draft: bool) -> None:
    """Gives a model an embedding and an LM head, or a rank's share of them, that know the
    successors.
    """
    embedding, head, share = model.embedding.weight, model.lm_head.weight, model.embedding.share
    assert isinstance(head, torch.Tensor)
    assert embedding.data_ptr() != head.data_ptr()
    device, size = embedding.device, embedding.shape[1]
    generator = torch.Generator(device).manual_seed(SEED)
    rows = torch.randn(share.total, size, device=device, generator=generator)
    rows /= rows.norm(dim=1, keepdim=True)
    made = torch.zeros_like(rows)
    for weight, followers in zip(WEIGHTS, successors(share.total, is_draft), strict=True):
        made.index_add_(0, followers.to(device), rows, alpha=weight)
    own = slice(share.first, share.first + share.count)
    head[: share.count] = made[own]
    embedding[: share.count] = rows[own] * STREAM * size**0.5


def install(is_draft: bool) -> None:
    """Relates the models that this process fills randomly from now on."""
    fill = loader.fill_randomly

    def filled(model: torch.nn.Module) -> None:
        fill(model)
        if isinstance(model, DecoderModel):
            relate(model, is_draft)

    loader.fill_randomly = filled


def main() -> None:
    """Runs the draft service, or a rank."""
    is_draft = len(sys.argv) > 1
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    install(is_draft)
    if "ALWAYS_AHEAD" in os.environ:
        AheadPolicy.is_ahead = lambda self, step, batch: True  # type: ignore[method-assign]
    runpy.run_module("draft_service" if is_draft else "verify_service.rank", run_name="__main__")


if __name__ == "__main__":
    main()
