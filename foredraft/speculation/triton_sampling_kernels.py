"""Triton kernels of the sampling rule and of the walk; `triton_sampling` says what they mean."""

# mypy: ignore-errors
import triton
import triton.language as tl

_NEVER = tl.constexpr(-3.0e38)


@triton.jit
def _xorshift64(z, SHIFT: tl.constexpr):
    return z ^ (z >> SHIFT)


@triton.jit
def _mix64(z):
    """SplitMix64's finalizer on uint64."""
    z = _xorshift64(z, 30) * 0xBF58476D1CE4E5B9
    z = _xorshift64(z, 27) * 0x94D049BB133111EB
    return _xorshift64(z, 31)


@triton.jit
def _row_key(seed, position):
    """`noise.row_keys`: two uint32 words."""
    key = _mix64(seed.to(tl.uint64) + 0x9E3779B97F4A7C15)
    key = _mix64(key + position.to(tl.uint64) * 0x9E3779B97F4A7C15)
    return (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def _gumbel(k0, k1, tokens):
    """`noise.gumbel` in float32."""
    x = tokens.to(tl.uint32) ^ k0
    x = (x ^ (x >> 17)) * 0xED5AD4BB
    x = ((x ^ (x >> 11)) * 0xAC4C1B51) ^ k1
    x = (x ^ (x >> 15)) * 0x31848BAB
    x = x ^ (x >> 14)
    w = (x.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    w = tl.minimum(w, 0.99999994)
    # log1p(-w) = log(u) * -w / (u - 1) with u = 1 - w rounded, which undoes the rounding (Kahan).
    u = 1.0 - w
    log1p = tl.where(u == 1.0, -w, tl.log(u) * (w / (1.0 - u)))
    return -tl.log(-log1p)


@triton.jit
def _tidy(logits):
    """NaN becomes the least number, infinities the ends of the range."""
    logits = tl.where(logits == logits, logits, _NEVER)
    return tl.minimum(tl.maximum(logits, _NEVER), 3.0e38)


@triton.jit
def row_best(
    logits_ptr, best_ptr, token_ptr, row_stride, vocab, num_splits, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest logit of one part of one row, and the first token that has it."""
    row, split = tl.program_id(0), tl.program_id(1)
    base = logits_ptr + row.to(tl.int64) * row_stride
    end = tl.minimum((split + 1) * width, vocab)
    offsets = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), _NEVER, tl.float32)
    where = tl.zeros((BLOCK,), tl.int32) + split * width
    for start in range(split * width, end, BLOCK):
        tokens = start + offsets
        logits = tl.load(base + tokens, mask=tokens < end, other=float("-inf")).to(tl.float32)
        logits = _tidy(logits)
        where = tl.where(logits > best, tokens, where)
        best = tl.maximum(best, logits)
    value, token = _first_best(best, where)
    tl.store(best_ptr + row * num_splits + split, value)
    tl.store(token_ptr + row * num_splits + split, token)


@triton.jit
def _first_best(values, tokens):
    """The largest value and the lowest token that has it."""
    value = tl.max(values, 0)
    return value, tl.min(tl.where(values == value, tokens, 0x7FFFFFFF), 0)


@triton.jit
def perturbed_best(
    logits_ptr, best_ptr, token_ptr, scores_ptr, chosen_ptr,
    temperature_ptr, seed_ptr, position_ptr,
    row_stride, vocab, num_splits, width,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The best perturbed score of one part of one row; a greedy row hands on what `row_best` found."""
    row, split = tl.program_id(0), tl.program_id(1)
    splits = tl.arange(0, SPLITS)
    bests = tl.load(best_ptr + row * num_splits + splits, mask=splits < num_splits, other=_NEVER)
    temperature = tl.load(temperature_ptr + row)
    out = row * num_splits + split
    if temperature > 0:
        best = tl.max(bests, 0)
        k0, k1 = _row_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        base = logits_ptr + row.to(tl.int64) * row_stride
        end = tl.minimum((split + 1) * width, vocab)
        offsets = tl.arange(0, BLOCK)
        top = tl.full((BLOCK,), float("-inf"), tl.float32)
        where = tl.zeros((BLOCK,), tl.int32) + split * width
        for start in range(split * width, end, BLOCK):
            tokens = start + offsets
            logits = tl.load(base + tokens, mask=tokens < end, other=float("-inf")).to(tl.float32)
            scores = (_tidy(logits) - best) / temperature + _gumbel(k0, k1, tokens)
            scores = tl.where(tokens < end, scores, float("-inf"))
            where = tl.where(scores > top, tokens, where)
            top = tl.maximum(top, scores)
        value, token = _first_best(top, where)
        tl.store(scores_ptr + out, value)
        tl.store(chosen_ptr + out, token)
    else:
        tl.store(scores_ptr + out, tl.load(best_ptr + out))
        tl.store(chosen_ptr + out, tl.load(token_ptr + out))


@triton.jit
def best_of_splits(scores_ptr, tokens_ptr, out_ptr, num_splits, SPLITS: tl.constexpr):
    """The token of a row: of equal scores the lowest."""
    row = tl.program_id(0)
    splits = tl.arange(0, SPLITS)
    inside = splits < num_splits
    scores = tl.load(scores_ptr + row * num_splits + splits, mask=inside, other=float("-inf"))
    tokens = tl.load(tokens_ptr + row * num_splits + splits, mask=inside, other=0x7FFFFFFF)
    _, token = _first_best(scores, tokens)
    tl.store(out_ptr + row, token.to(tl.int64))


@triton.jit
def walk(
    chosen_ptr, tokens_ptr, parents_ptr, path_ptr, length_ptr, emitted_ptr,
    chosen_stride, tokens_stride, parents_stride, rows,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Follows the rule from the root of one tree."""
    tree = tl.program_id(0)
    offsets = tl.arange(0, ROWS)
    inside = offsets < rows
    parents = tl.load(parents_ptr + tree * parents_stride + offsets, mask=inside, other=-2)
    tokens = tl.load(tokens_ptr + tree * tokens_stride + offsets, mask=inside, other=-1)
    chosen = tl.load(chosen_ptr + tree * chosen_stride + offsets, mask=inside, other=-1)
    path = tl.where(offsets == 0, 0, -1)
    row = 0
    token = tl.sum(tl.where(offsets == 0, chosen, 0), 0)
    emitted = tl.where(offsets == 0, token, -1)
    length = 1
    running = 1
    while running != 0:
        is_child = inside & (parents == row) & (tokens.to(tl.int64) == token) & (offsets > row)
        child = tl.min(tl.where(is_child, offsets, ROWS), 0)
        if child < ROWS:
            row = child
            token = tl.sum(tl.where(offsets == row, chosen, 0), 0)
            path = tl.where(offsets == length, row, path)
            emitted = tl.where(offsets == length, token, emitted)
            length += 1
        else:
            running = 0
    tl.store(path_ptr + tree * rows + offsets, path, mask=inside)
    tl.store(emitted_ptr + tree * rows + offsets, emitted, mask=inside)
    tl.store(length_ptr + tree, length)


@triton.jit
def commit(
    kv_ptr, tables_ptr, committed_ptr, path_ptr, length_ptr,
    layer_stride, head_stride, table_stride, rows, num_heads,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Moves the accepted rows of one tree in one layer. A row moves to where no later one is read from."""
    tree, layer = tl.program_id(0), tl.program_id(1)
    heads = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    mask = (heads < num_heads)[:, None] & (dims < HEAD_DIM)[None, :]
    base = kv_ptr + layer.to(tl.int64) * layer_stride
    base = base + heads.to(tl.int64)[:, None] * head_stride + dims[None, :]
    table = tables_ptr + tree * table_stride
    committed = tl.load(committed_ptr + tree)
    for index in range(1, tl.load(length_ptr + tree)):
        row = tl.load(path_ptr + tree * rows + index)
        if row != index:
            source, target = committed + row, committed + index
            from_slot = tl.load(table + source // PAGE_SIZE).to(tl.int64) * PAGE_SIZE
            to_slot = tl.load(table + target // PAGE_SIZE).to(tl.int64) * PAGE_SIZE
            values = tl.load(base + (from_slot + source % PAGE_SIZE) * HEAD_DIM, mask=mask)
            tl.store(base + (to_slot + target % PAGE_SIZE) * HEAD_DIM, values, mask=mask)


@triton.jit
def prepare(
    tokens_ptr, parents_ptr, committed_ptr, num_rows_ptr, tables_ptr,
    known_ptr, positions_ptr, slots_ptr, mask_ptr,
    tokens_stride, parents_stride, header_stride, table_stride, rows, vocab, no_slot,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Tokens in range, positions, slots and ancestor masks of one tree's rows."""
    tree = tl.program_id(0)
    offsets = tl.arange(0, ROWS)
    inside = offsets < rows
    parents = tl.load(parents_ptr + tree * parents_stride + offsets, mask=inside, other=-2)
    tokens = tl.load(tokens_ptr + tree * tokens_stride + offsets, mask=inside, other=0)
    committed = tl.load(committed_ptr + tree * header_stride)
    num_rows = tl.load(num_rows_ptr + tree * header_stride)
    is_own = offsets[:, None] == offsets[None, :]
    is_parent = (parents[:, None] == offsets[None, :]) & (offsets[None, :] < offsets[:, None])
    reach = (is_own | is_parent).to(tl.float16)
    for _ in range(ROUNDS):  # doubling: after k rounds everything within 2^k steps is known
        reach = (tl.dot(reach, reach) > 0).to(tl.float16)
    is_node = tl.sum(tl.where(offsets[None, :] == 0, reach, 0.0), 1) > 0
    seen = ((reach > 0) & is_node[:, None]) | is_own
    depth = tl.where(is_node, tl.sum(seen.to(tl.int32), 1) - 1, 0)
    out = tree * rows + offsets
    keys = committed + offsets
    pages = tl.load(tables_ptr + tree * table_stride + keys // PAGE_SIZE, mask=inside, other=0)
    slots = pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
    slots = tl.where(offsets < num_rows, slots, no_slot)
    tl.store(slots_ptr + out, slots, mask=inside)
    tl.store(
        known_ptr + out, tl.minimum(tl.maximum(tokens, 0), vocab - 1).to(tl.int64), mask=inside
    )
    tl.store(positions_ptr + out, (committed + depth).to(tl.int64), mask=inside)
    tl.store(
        mask_ptr + out[:, None] * rows + offsets[None, :],
        seen.to(tl.uint8),
        mask=inside[:, None] & inside[None, :],
    )
