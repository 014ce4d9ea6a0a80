"""Copies to a draft on the same device, against torch's own indexing; on a GPU or interpreted."""

import pytest
import torch

from testing.triton_device import DEVICE, needs_triton
from verify_service.executor.kernels.hand_over import hand_over

pytestmark = [needs_triton, pytest.mark.gpu]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "path", "width"), [(1, 1, 96), (3, 4, 2048), (2, 6, 5000), (8, 5, 40)]
)
def test_rows_and_tokens(batch: int, path: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(batch * path)
    hidden = torch.randn(batch * 9, width + 8, device=DEVICE).to(dtype)[:, :width]
    index = torch.randint(0, batch * 9, (batch * path + 3,), device=DEVICE)
    accepted = torch.randint(-1, 9000, (batch, 1 + path), dtype=torch.int32, device=DEVICE)
    tokens = torch.full((batch + 2, 1 + path), -7, dtype=torch.int32, device=DEVICE)
    rows = torch.zeros(batch + 2, path, width, dtype=dtype, device=DEVICE)
    hand_over(accepted, index, hidden, tokens, rows)
    assert torch.equal(tokens[:batch], accepted)
    assert bool((tokens[batch:] == -7).all())
    assert torch.equal(rows[:batch].flatten(0, 1), hidden[index[: batch * path]])
    assert not rows[batch:].any(), "nobody's rows are left alone"


def test_tokens_alone() -> None:
    accepted = torch.tensor([[2, 5, 6]], dtype=torch.int32, device=DEVICE)
    tokens = torch.zeros(4, 3, dtype=torch.int32, device=DEVICE)
    hand_over(accepted, torch.zeros(2, dtype=torch.int64, device=DEVICE), None, tokens, None)
    assert tokens.tolist() == [[2, 5, 6], [0, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_sizes_that_do_not_fit() -> None:
    accepted = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    index = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    hidden, rows = torch.zeros(4, 8, device=DEVICE), torch.zeros(2, 2, 8, device=DEVICE)
    for broken in (
        (accepted, index, hidden, accepted[:1], rows),
        (accepted, index, hidden, accepted, rows[:, :1]),
        (accepted, index[:3], hidden, accepted, rows),
    ):
        with pytest.raises(ValueError, match="fit"):
            hand_over(*broken)
