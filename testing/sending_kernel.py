"""A kernel whose programs each send a tile to the other ranks, as products of many rows do."""

# mypy: ignore-errors
import triton
import triton.language as tl

from foredraft.parallel.exchange_kernels import send_tile


@triton.jit
def send(
    x_ptr, rooms, flags, counts, length, BLOCK: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """Sends x [length]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sent = tl.load(counts)
    tile = tl.load(x_ptr + at, mask=at < length, other=0.0)
    send_tile(tile, at, at < length, sent, rooms, flags, counts, RANK, RANKS)
