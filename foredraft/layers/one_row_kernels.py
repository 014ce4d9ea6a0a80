"""A Triton kernel that streams a weight matrix once for a single row, by multiply-adds of the ordinary units."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def multiply(
    x_ptr, w_ptr, bias_ptr, out_ptr, outputs, inputs,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out = W x + bias; with GATED, silu of what the first half of W's rows gives times what the second half gives.

    Each thread keeps its part of the sums in registers from the first column to the last.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_n = n < outputs
    w = w_ptr + n.to(tl.int64)[:, None] * inputs + k[None, :]
    second = w + outputs.to(tl.int64) * inputs
    mask = in_n[:, None] & (k < inputs)[None, :]
    # Weights depend on nothing: their first tile is under way before the kernel before this one has ended.
    tile = tl.load(w, mask=mask, other=0.0)
    tile2 = tl.load(second, mask=mask, other=0.0) if GATED else tile
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + k, mask=k < inputs, other=0.0).to(tl.float32)[None, :]
    acc = tile.to(tl.float32) * x
    acc2 = tile2.to(tl.float32) * x if GATED else acc
    for start in range(BLOCK_K, inputs, BLOCK_K):
        if EVEN:
            x = tl.load(x_ptr + start + k).to(tl.float32)[None, :]
            wanted = in_n[:, None]
        else:
            x = tl.load(x_ptr + start + k, mask=start + k < inputs, other=0.0)
            x = x.to(tl.float32)[None, :]
            wanted = in_n[:, None] & (start + k < inputs)[None, :]
        acc += tl.load(w + start, mask=wanted, other=0.0).to(tl.float32) * x
        if GATED:
            acc2 += tl.load(second + start, mask=wanted, other=0.0).to(tl.float32) * x
    kind = out_ptr.dtype.element_ty
    result = tl.sum(acc, 1)
    if HAS_BIAS:
        result += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)
    if GATED:
        result2 = tl.sum(acc2, 1)
        if HAS_BIAS:
            result2 += tl.load(bias_ptr + outputs + n, mask=in_n, other=0.0).to(tl.float32)
        # Rounded where separate operations would round.
        gate = result.to(kind).to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
        result = gate * result2.to(kind).to(tl.float32)
    tl.store(out_ptr + n, result.to(kind), mask=in_n)
