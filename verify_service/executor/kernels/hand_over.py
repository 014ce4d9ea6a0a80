"""Copies a step's committed tokens and their hidden states to a draft on the same device."""

import torch

from foredraft.kernel_launch import power_of_two

BLOCK = 2048  # elements of a hidden state that one program copies


def hand_over(
    accepted: torch.Tensor,
    index: torch.Tensor,
    hidden: torch.Tensor | None,
    to_accepted: torch.Tensor,
    to_rows: torch.Tensor | None,
) -> None:
    """Copies both by one kernel, since a draft waits for it while nothing else runs.

    Args:
        accepted: int32 [B, 1 + P], contiguous.
        index: int64 [B * P], rows of `hidden`.
        hidden: [T, width], contiguous in the last dimension; None for a draft that reads none.
        to_accepted: int32 [n, 1 + P] with n >= B, contiguous, changed.
        to_rows: [n, P, width] of hidden's dtype, contiguous, changed; None as `hidden` is.

    Raises:
        ValueError: The sizes do not go together.
    """
    batch, width = accepted.shape
    num_rows = batch * (width - 1)
    if to_accepted.shape[0] < batch or to_accepted.shape[1] != width:
        raise ValueError(f"{tuple(accepted.shape)} does not fit {tuple(to_accepted.shape)}")
    if hidden is None or to_rows is None:
        to_accepted[:batch].copy_(accepted)
        return
    if to_rows.shape[1:] != (width - 1, hidden.shape[1]) or len(index) < num_rows:
        raise ValueError(f"{tuple(hidden.shape)} rows do not fit {tuple(to_rows.shape)}")
    from verify_service.executor.kernels import step_kernels  # needs triton

    num_blocks = -(-hidden.shape[1] // BLOCK)
    step_kernels.hand_over[(num_rows, num_blocks)](
        accepted, index, hidden, to_accepted, to_rows,
        hidden.stride(0), hidden.shape[1], width - 1,
        WORDS=power_of_two(width), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
