"""Launches the kernels in `triton_kernels` for tensors on NVIDIA GPUs.

The layers come here by `row_kernels.kernels_for`; nothing else decides.

Triton is imported on first use. No call reads a value of the device, so that all can be captured.
"""

import functools
from typing import NamedTuple

import torch

from foredraft.kernel_launch import VARIANTS, overlapped, power_of_two
from foredraft.layers.heads import Heads
from foredraft.layers.linear import LinearMethod
from foredraft.layers.normed import Normed, RoundedRows
from foredraft.layers.padded_rows import new_rows
from foredraft.parallel.group import SINGLE, Group, SumGroup
from foredraft.parallel.peer_memory import PeerMemory, constants_of


class _Norm(NamedTuple):
    """The norm of a row, and the one of what is added to the row before; see `add_norm`."""

    weight: torch.Tensor
    eps: float
    full_precision: bool
    post: tuple[torch.Tensor, float] | None = None


def on_gpu(x: torch.Tensor) -> bool:
    """Returns whether layers use these kernels for a tensor."""
    return x.is_cuda


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    full_precision: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalises rows.

    Args:
        x: [..., size], the last dimension contiguous; more than two dimensions must be contiguous.
        out: Result [rows, size] with contiguous rows; may be a part of wider rows. None allocates
            it.
    """
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    result = new_rows(rows, *rows.shape) if out is None else out
    _norm(rows, _Norm(weight, eps, full_precision), result)
    return result if out is not None or x.dim() == 2 else result.view(x.shape)


def norm_of_rows(
    table: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    full_precision: bool,
    out: torch.Tensor,
    copy: torch.Tensor | None = None,
    reader: LinearMethod | None = None,
) -> RoundedRows | None:
    """Normalises some rows of a table.

    Args:
        table: [n, size], rows contiguous.
        rows: int64 [m], which ones.
        out: [m, size], written; may be a part of wider rows.
        copy: [m, size], where the rows themselves go; may be a part of wider rows.
        reader: See `add_norm`.
    """
    return _norm(table, _Norm(weight, eps, full_precision), out, copy, reader, picked=rows)


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
) -> Normed:
    """Adds delta to the stream in place, and normalises the sum.

    Args:
        stream: [rows, size], changed.
        delta: [rows, size], or float32 [parts, rows, size] whose sum it is.
        group: Ranks whose deltas are added up.
        post: Weight and eps of a norm of delta before it is added.
        copy: [rows, size], where the sum goes too; may be a part of wider rows.
        reader: Method of the layer that reads the result first, None if there is none. Rows are
            rounded for it, but not where ranks exchange them in the kernel.
    """
    out, num_rows = new_rows(stream, *stream.shape), stream.shape[0]
    norm = _Norm(weight, eps, full_precision, post)
    gathered: torch.Tensor | None = None
    if group.size > 1 and num_rows:
        memory = group.memory_for(num_rows, stream.shape[1], stream.dtype)
        if memory is not None:
            _norm_of_ranks(stream, norm, out, copy, reader, delta, memory)
            return Normed(out)
        delta = sum_of_parts(delta, stream.dtype)
        gathered = group.gathered(delta)
    rounded = _norm(stream, norm, out, copy, reader, delta, gathered=gathered, rank=group.rank)
    return Normed(out, rounded)


def sum_of_parts(delta: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Adds up the parts of a product as the kernels do it.

    Args:
        delta: [rows, size], returned as it is, or float32 [parts, rows, size].
        dtype: Type of the result.
    """
    if delta.dim() == 2:
        return delta
    *first, last = delta
    if not first:
        return last.to(dtype)
    out = torch.empty_like(last, dtype=dtype)
    return torch.add(functools.reduce(torch.add, first), last, out=out)


def _norm_of_ranks(
    x: torch.Tensor,
    norm: _Norm,
    out: torch.Tensor,
    copy: torch.Tensor | None,
    reader: LinearMethod | None,
    delta: torch.Tensor,
    memory: PeerMemory,
) -> None:
    from foredraft.layers import triton_kernels

    post_weight, post_eps = norm.post or (norm.weight, 0.0)
    num_rows, size = out.shape
    block, programs = power_of_two(size), min(num_rows, memory.num_programs)
    parts = delta if delta.dim() == 3 else delta[None]
    exchange = memory.exchange(size, out.nbytes, x.dtype)
    # For four programs of 8 warps on a multiprocessor.
    registers = 64 if num_rows > programs else None
    triton_kernels.norm_of_ranks[(programs,)](
        x, parts, post_weight, norm.weight, out,
        x if copy is None else copy, *exchange.exchange_arguments,
        x.stride(0), parts.stride(1), parts.stride(0), out.stride(0),
        0 if copy is None else copy.stride(0), num_rows, size, norm.eps, post_eps,
        BLOCK=block, PARTS=len(parts), POST=norm.post is not None, COPIES=copy is not None,
        FULL=norm.full_precision, num_warps=min(16, max(1, block // 512)), maxnreg=registers,
        EARLY=_is_early(reader, num_rows), **constants_of(exchange), **overlapped(x.device),
    )  # fmt: skip


def rows_of_ranks(
    table: torch.Tensor, tokens: torch.Tensor, first: int, count: int, group: Group
) -> torch.Tensor | None:
    """Looks up rows of a table whose rows ranks share; None where they cannot exchange them.

    Args:
        table: [at least count, size] contiguous, this rank's rows.
        tokens: int64 [rows], indices of rows among those of all ranks.
        first, count: Index of this rank's first row, and how many it has.
    """
    from foredraft.layers import triton_kernels

    num_rows, size = tokens.shape[0], table.shape[1]
    memory = group.memory_for(num_rows, size, table.dtype)
    if memory is None:
        return None
    out, programs = table.new_empty(num_rows, size), min(num_rows, memory.num_programs)
    exchange, block = memory.exchange(size, out.nbytes, table.dtype), power_of_two(size)
    triton_kernels.rows_of_ranks[(programs,)](
        table, tokens, out, *exchange.exchange_arguments, first, count, num_rows, size,
        BLOCK=block, num_warps=min(16, max(1, block // 512)), **constants_of(exchange),
        **overlapped(table.device),
    )  # fmt: skip
    return out


def _norm(
    x: torch.Tensor,
    norm: _Norm,
    out: torch.Tensor,
    copy: torch.Tensor | None = None,
    reader: LinearMethod | None = None,
    delta: torch.Tensor | None = None,
    picked: torch.Tensor | None = None,
    gathered: torch.Tensor | None = None,
    rank: int = 0,
) -> RoundedRows | None:
    from foredraft.layers import triton_kernels

    post_weight, post_eps = norm.post or (norm.weight, 0.0)
    num_rows, size = out.shape
    if not num_rows:
        return None
    block = power_of_two(size)
    rounds, rounded = None if reader is None else reader.rounds, None
    if rounds is not None:
        rounded = RoundedRows.empty(num_rows, size, rounds, x.device)
    numbers, scales = (out, out) if rounded is None else rounded
    parts, part_stride = 1, 0
    if delta is not None and delta.dim() == 3:
        parts, part_stride, delta = delta.shape[0], delta.stride(0), delta[0]
    ranks, rank_stride = (1, 0) if gathered is None else (len(gathered), gathered.stride(0))
    triton_kernels.norm[(num_rows,)](
        x, x if delta is None else delta, x if gathered is None else gathered,
        post_weight, norm.weight, out, x if copy is None else copy,
        x if picked is None else picked, numbers, scales,
        x.stride(0), 0 if delta is None else delta.stride(0), part_stride, rank_stride,
        out.stride(0), 0 if copy is None else copy.stride(0), size, norm.eps, post_eps,
        BLOCK=block, ADDS=delta is not None, PARTS=parts, RANK=rank, RANKS=ranks,
        POST=norm.post is not None, COPIES=copy is not None, PICKS=picked is not None,
        FULL=norm.full_precision, ROUNDS=0 if rounds is None else rounds or 1,
        EARLY=_is_early(reader, num_rows), num_warps=min(16, max(1, block // 512)),
        **overlapped(x.device),
    )  # fmt: skip
    return rounded


def _is_early(reader: LinearMethod | None, num_rows: int) -> bool:
    """Returns whether the kernel behind a norm should start before the norm has waited."""
    return reader is not None and num_rows <= reader.early_rows


def angles(
    positions: torch.Tensor, frequencies: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes cosines and signed sines, float32 [rows, 1, head_dim] each, for positions int64
    [rows] and frequencies [head_dim / 2].
    """
    from foredraft.layers import triton_kernels

    num_rows, half = positions.shape[0], frequencies.shape[0]
    both = torch.empty((2, num_rows, 1, 2 * half), dtype=torch.float32, device=frequencies.device)
    if num_rows:
        triton_kernels.angles[(num_rows,)](
            positions, frequencies, both[0], both[1], half, factor, BLOCK=power_of_two(half),
            **overlapped(frequencies.device),
        )  # fmt: skip
    return both[0], both[1]


def rotate_and_store(
    heads: torch.Tensor,
    place: Heads,
    norms: tuple[torch.Tensor, torch.Tensor, float, bool] | None,
    *,
    queries: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalises and rotates queries and keys, and writes keys and values to the cache.

    Args:
        heads: [rows, num_heads + 2 * num_kv_heads, head_dim] contiguous; the queries are changed in
            place. With `queries`, float32 [parts, rows, ...] whose sum they are.
        place: Where they go.
        norms: Weights of the queries' and the keys' norm, their eps, and whether they use full
            precision.
        queries: [rows, num_heads, head_dim] contiguous, written; the sums of the parts are rounded
            to its type.

    Returns:
        The queries: `queries`, or a view of `heads`.
    """
    from foredraft.layers import triton_kernels

    num_rows, all_heads, head_dim = heads.shape[-3:]
    num_heads, (cos, sin), keys, values, slots, scales = place
    out = heads if queries is None else queries
    q_weight, k_weight, eps, full_precision = norms or (cos, cos, 0.0, False)
    # Many rows fill the device by themselves; with few rows each program takes one head.
    block_h = 1 if num_rows <= 4 else 4 if num_rows <= 64 else 16
    if VARIANTS.are_few or norms is not None:
        block_h = max(block_h, 4)
    if num_rows:
        triton_kernels.rotate_and_store[(num_rows, -(-all_heads // block_h))](
            heads, out, cos, sin, q_weight, k_weight, keys, values, slots,
            heads.stride(-3), out.stride(0), heads.stride(0), keys.stride(0), eps,
            1 / scales[0], 1 / scales[1],
            Q_HEADS=num_heads, KV_HEADS=keys.shape[0], HEAD_DIM=head_dim, BLOCK_H=block_h,
            BLOCK_D=power_of_two(head_dim // 2), NORMS=norms is not None, FULL=full_precision,
            LIMIT=torch.finfo(keys.dtype).max if keys.element_size() == 1 else 0.0,
            PARTS=1 if queries is None else heads.shape[0],
            num_warps=max(1, block_h // 2),  # the order of a norm's sum follows the heads of a warp
            **overlapped(heads.device),
        )  # fmt: skip
    return out[:, :num_heads]


def gated(both: torch.Tensor, kind: str) -> torch.Tensor:
    """Computes activation(first half) * second half of contiguous rows [rows, 2 * size]; kind
    is a key of `mlp.ACTIVATIONS`.
    """
    from foredraft.layers import triton_kernels

    num_rows, size = both.shape[0], both.shape[1] // 2
    out = new_rows(both, num_rows, size)
    if num_rows:
        triton_kernels.gate[(num_rows, -(-size // 1024))](
            both, out, size, KIND=kind, BLOCK=1024, **overlapped(both.device)
        )
    return out
