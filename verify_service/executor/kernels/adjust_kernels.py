"""Penalties, biases and masks over rows of logits in Triton; see `adjust`."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def adjust(
    logits_ptr, records_ptr, tokens_ptr, parents_ptr, positions_ptr,
    histories_ptr, biases_ptr, masks_ptr, out_ptr,
    vocab, rows, logits_stride, record_stride, mask_stride,
    SLOT: tl.constexpr, ADJUSTED: tl.constexpr, MASK: tl.constexpr, FIRST_END: tl.constexpr,
    REPETITION: tl.constexpr, FREQUENCY: tl.constexpr, PRESENCE: tl.constexpr,
    HISTORY: tl.constexpr, BIASED: tl.constexpr, IN_PROMPT: tl.constexpr, IS_END: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Adjusts one block of tokens of one row, in float32.

    Compiled without fused operations, since the reference rounds each one.
    """
    row = tl.program_id(0).to(tl.int64)
    sequence = row // rows
    at = (row % rows).to(tl.int32)
    record = records_ptr + sequence * record_stride
    slot = tl.load(record + SLOT).to(tl.int64)
    how = tl.load(record + ADJUSTED)
    mask = tl.load(record + MASK).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    x = tl.load(logits_ptr + row * logits_stride + ids, mask=inside, other=0.0).to(tl.float32)
    is_broken = (x != x) | (x == float("inf"))  # no mask may hide a broken logit
    if how & HISTORY != 0:
        history = tl.load(histories_ptr + slot * vocab + ids, mask=inside, other=0)
        count = history & (IN_PROMPT - 1)
        above = at
        while above > 0:  # the tokens of the tree on the way to this row, its own included
            token = tl.load(tokens_ptr + sequence * rows + above)
            count += (ids == token).to(tl.int32)
            parent = tl.load(parents_ptr + sequence * rows + above)
            above = tl.where(parent < above, parent, 0)
        repetition = tl.load(record + REPETITION).to(tl.float32, bitcast=True)
        frequency = tl.load(record + FREQUENCY).to(tl.float32, bitcast=True)
        presence = tl.load(record + PRESENCE).to(tl.float32, bitcast=True)
        is_known = (count > 0) | ((history & IN_PROMPT) != 0)
        punished = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(is_known, punished, x)
        x = x - count.to(tl.float32) * frequency
        x = x - tl.where(count > 0, presence, 0.0)
    if how & BIASED != 0:
        x = x + tl.load(biases_ptr + slot * vocab + ids, mask=inside, other=0.0)
    if how & HISTORY != 0:
        is_early = tl.load(positions_ptr + row) + 1 < tl.load(record + FIRST_END)
        ends = tl.load(histories_ptr + slot * vocab + ids, mask=inside, other=0) & IS_END
        x = tl.where(is_early & (ends != 0), float("-inf"), x)
    if mask > 0:
        bits = tl.load(masks_ptr + (mask - 1 + at) * mask_stride + ids // 32, mask=inside, other=0)
        x = tl.where(((bits >> (ids % 32)) & 1) != 0, x, float("-inf"))
    x = tl.where(is_broken, float("nan"), x)
    tl.store(out_ptr + row * vocab + ids, x, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def count(
    records_ptr, emitted_ptr, length_ptr, histories_ptr,
    vocab, rows, record_stride,
    SLOT: tl.constexpr, ADJUSTED: tl.constexpr, HISTORY: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Adds the emitted tokens of one sequence to its history."""
    sequence = tl.program_id(0)
    record = records_ptr + sequence * record_stride
    if tl.load(record + ADJUSTED) & HISTORY != 0:
        offsets = tl.arange(0, ROWS)
        emitted = offsets < tl.load(length_ptr + sequence)
        tokens = tl.load(emitted_ptr + sequence * rows + offsets, mask=emitted, other=0)
        slot = tl.load(record + SLOT).to(tl.int64)
        counted = emitted & (tokens >= 0)  # NO_TOKEN where logits are broken
        tl.atomic_add(histories_ptr + slot * vocab + tokens, 1, mask=counted, sem="relaxed")
