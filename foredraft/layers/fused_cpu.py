"""Calls the kernels in `foredraft/cpu/_rows.c` for float32 tensors on a CPU.

Layers come here by `row_kernels.kernels_for`. Each function has the arguments of its namesake in
`fused`, and `kernel`, an index into `foredraft.cpu.products.KERNELS`. A row's bits depend on that
row alone: neither on the rows beside it nor on threads nor, where the CPU fuses products and sums,
on the kernel.

`kernels_for` has checked the tensors' types and that their last dimension lies in one piece. What
else does not fit raises ValueError here, or IndexError for rows and slots that are not there.
"""

import torch

from foredraft.cpu import _kernels
from foredraft.layers.heads import Heads
from foredraft.layers.linear import LinearMethod
from foredraft.layers.normed import Normed
from foredraft.parallel.group import SINGLE, SumGroup

_KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    full_precision: bool,
    out: torch.Tensor | None = None,
    kernel: int = 0,
) -> torch.Tensor:
    """Normalises rows, see `fused.rms_norm`; float32 rows have full precision anyway."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    result = rows.new_empty(rows.shape) if out is None else out
    num_rows, size = rows.shape
    if result.shape != rows.shape or weight.numel() != size:
        raise _misfit(rows, weight, result)
    _kernels.norm(
        rows.data_ptr(), 0, 0, weight.data_ptr(), result.data_ptr(), 0, 0, 0,
        rows.stride(0), 0, result.stride(0), 0, num_rows, size, kernel, eps, 0.0,
    )  # fmt: skip
    return result if out is not None else result.view(x.shape)


def norm_of_rows(
    table: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    full_precision: bool,
    out: torch.Tensor,
    copy: torch.Tensor | None = None,
    reader: LinearMethod | None = None,
    kernel: int = 0,
) -> None:
    """Normalises some rows of a table, see `fused.norm_of_rows`."""
    size, rows = table.shape[1], rows.contiguous()
    is_copy = copy is None or copy.shape == out.shape
    if out.shape != (*rows.shape, size) or not is_copy or weight.numel() != size:
        raise _misfit(table, rows, weight, out, copy)
    _check_type(rows)
    _kernels.norm(
        table.data_ptr(), 0, 0, weight.data_ptr(), out.data_ptr(),
        0 if copy is None else copy.data_ptr(), rows.data_ptr(), table.shape[0],
        table.stride(0), 0, out.stride(0), 0 if copy is None else copy.stride(0),
        rows.shape[0], size, kernel, eps, 0.0,
    )  # fmt: skip


def add_norm(
    stream: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    full_precision: bool,
    post: tuple[torch.Tensor, float] | None = None,
    copy: torch.Tensor | None = None,
    group: SumGroup = SINGLE,
    reader: LinearMethod | None = None,
    kernel: int = 0,
) -> Normed:
    """Adds delta [rows, size] to the stream in place, and normalises the sum; see
    `fused.add_norm`. Nothing is rounded.
    """
    if group.size > 1:
        delta = group.all_reduce(delta)
    num_rows, size = stream.shape
    out = stream.new_empty(num_rows, size)
    first, first_eps = (weight, 0.0) if post is None else post
    is_copy = copy is None or copy.shape == stream.shape
    if delta.shape != stream.shape or not is_copy or not first.numel() == weight.numel() == size:
        raise _misfit(stream, delta, first, weight, copy)
    _kernels.norm(
        stream.data_ptr(), delta.data_ptr(), 0 if post is None else first.data_ptr(),
        weight.data_ptr(), out.data_ptr(), 0 if copy is None else copy.data_ptr(), 0, 0,
        stream.stride(0), delta.stride(0), size, 0 if copy is None else copy.stride(0),
        num_rows, size, kernel, eps, first_eps,
    )  # fmt: skip
    return Normed(out)


def angles(
    positions: torch.Tensor, frequencies: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes cosines and signed sines, see `fused.angles`."""
    num_rows, half = positions.shape[0], frequencies.shape[0]
    _check_type(positions)
    positions = positions.contiguous()
    cos, sin = (frequencies.new_empty((num_rows, 1, 2 * half)) for _ in range(2))
    _kernels.angles(
        positions.data_ptr(), frequencies.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        num_rows, half, factor,
    )  # fmt: skip
    return cos, sin


def rotate_and_store(
    heads: torch.Tensor,
    place: Heads,
    norms: tuple[torch.Tensor, torch.Tensor, float, bool] | None,
    kernel: int = 0,
    *,
    queries: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalises and rotates queries and keys, and writes keys and values to a cache of float32,
    which has no scales; see `fused.rotate_and_store`. Heads are never parts.
    """
    num_rows, _, head_dim = heads.shape
    num_heads, (cos, sin), keys, values, slots, _ = place
    slots, (num_kv_heads, num_slots, _) = slots.contiguous(), keys.shape
    fits = (
        heads.is_contiguous()
        and cos.is_contiguous()
        and sin.is_contiguous()
        and cos.numel() == sin.numel() == num_rows * head_dim
        and heads.shape[1] == num_heads + 2 * num_kv_heads
        and keys.shape == values.shape
        and keys.stride(1) == values.stride(1) == head_dim
        and slots.numel() == num_rows
    )
    if not fits:
        raise _misfit(heads, cos, sin, keys, values, slots)
    _check_type(slots)
    q_weight, k_weight, eps = 0, 0, 0.0
    if norms is not None:
        if not norms[0].numel() == norms[1].numel() == head_dim:
            raise _misfit(heads, norms[0], norms[1])
        q_weight, k_weight, eps = norms[0].data_ptr(), norms[1].data_ptr(), norms[2]
    _kernels.rotate_and_store(
        heads.data_ptr(), keys.data_ptr(), values.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        q_weight, k_weight, slots.data_ptr(), num_slots, num_rows, num_heads, num_kv_heads,
        head_dim, keys.stride(0), kernel, eps,
    )  # fmt: skip
    return heads[:, :num_heads]


def gated(both: torch.Tensor, kind: str, kernel: int = 0) -> torch.Tensor:
    """Computes activation(first half) * second half, see `fused.gated`."""
    num_rows, size, both = both.shape[0], both.shape[1] // 2, both.contiguous()
    out = both.new_empty(num_rows, size)
    _kernels.gate(both.data_ptr(), out.data_ptr(), num_rows, size, _KINDS[kind], kernel)
    return out


def _misfit(*tensors: torch.Tensor | None) -> ValueError:
    found = [f"{tuple(t.shape)} by {t.stride()}" for t in tensors if t is not None]
    return ValueError(f"tensors do not fit each other: {', '.join(found)}")


def _check_type(indices: torch.Tensor) -> None:
    if indices.dtype is not torch.int64:
        raise ValueError(f"indices of {indices.dtype} instead of torch.int64")
