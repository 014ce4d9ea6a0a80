"""Embeddings and their norm."""

import pytest
import torch

from foredraft.layers.embedding import Embedding
from foredraft.layers.linear import Linear
from foredraft.layers.norm import RMSNorm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_embeddings_and_their_norm(device: str, dtype: torch.dtype, scale: float) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    where, size = torch.device(device), 64
    generator = torch.Generator().manual_seed(0)
    table, weight = (torch.randn(*shape, generator=generator) for shape in ((30, size), (size,)))
    embedding = Embedding(30, size, scale, dtype, where)
    norm = RMSNorm(size, 1e-5, False, dtype, where)
    embedding.weight.data.copy_(table)
    norm.weight.data.copy_(weight)
    tokens = torch.tensor([29, 0, 7, 7])
    reader = Linear(size, size, False, dtype, where)
    with torch.inference_mode():
        rows, normed = embedding.normed(tokens.to(where), norm, reader)
    want = table.to(dtype)[tokens] * scale
    assert torch.equal(rows.cpu(), want)
    exact = want.double()
    exact = exact * (exact.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight.to(dtype)
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(normed.rows.cpu().double(), exact, rtol=bound, atol=bound)
