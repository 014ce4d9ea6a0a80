"""The sampling rule under top-k, top-p and min-p in Triton, as `filters` defines them, without sorting the vocabulary.

What the filters keep is a prefix of the tokens ranked by score and id. A bound that is cheap to know (`bound`) leaves a
list of tokens that holds this prefix, mostly short (`collect`); where it ends is found by bisection (`choose_kept`). A
token's key is the bits of its score's magnitude: scores are at most 0, so the better token has the smaller key.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from foredraft.speculation.sampling_kernels import _tidy, gumbel_of, row_key, uniform

_LAST_KEY = tl.constexpr(0x7F800000)  # of minus infinity


@triton.jit
def _is_filtered(temperature, top_k, top_p, log_min_p):
    return (temperature > 0) & ((top_k > 0) | (top_p < 1) | (log_min_p > float("-inf")))


@triton.jit
def _score(logits, base, temperature):
    return tl.div_rn(logits - base, temperature)


@triton.jit
def _key(score):
    return tl.abs(score).to(tl.int32, bitcast=True)


@triton.jit
def tops(
    logits_ptr, tops_ptr, vocab, row_stride, num_blocks, SIZE: tl.constexpr, COUNT: tl.constexpr
):
    """The largest logit of COUNT blocks of SIZE tokens of one row."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    tokens = blocks[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(logits_ptr + row * row_stride + tokens, mask=tokens < vocab, other=float("-inf"))
    tl.store(tops_ptr + row * num_blocks + blocks, tl.max(_tidy(x), 1), mask=blocks < num_blocks)


@triton.jit
def bound(
    tops_ptr, temperatures, top_ks, top_ps, log_min_ps, bases, cuts, counts, vocab, num_blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The best logit of one row and a score below which nothing matters; the row's list becomes empty.

    With k at most the number of blocks, the k-th best token is at least as good as the k-th best block's best. Without
    top-k, the tokens below ln((1 - p) / V) have less than 1 - p of the mass together, as the best token's mass is 1.
    """
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    top_k, top_p = tl.load(top_ks + row).to(tl.int32), tl.load(top_ps + row)
    log_min_p = tl.load(log_min_ps + row)
    blocks = tl.arange(0, BLOCK)
    at = tops_ptr + row.to(tl.int64) * num_blocks + blocks
    top = tl.load(at, mask=blocks < num_blocks, other=float("-inf"))
    base = tl.max(top, 0)
    base = tl.where(base == float("-inf"), 0.0, base)
    cut = tl.full([], float("-inf"), tl.float32)
    if _is_filtered(temperature, top_k, top_p, log_min_p):
        if top_k > 0:
            if top_k <= num_blocks:
                keys = _key(_score(top, base, temperature))
                low, high = tl.full([], 0, tl.int32), tl.full([], _LAST_KEY, tl.int32)
                while low < high:
                    middle = low + (high - low) // 2
                    enough = tl.sum((keys <= middle).to(tl.int32), 0) >= top_k
                    high = tl.where(enough, middle, high)
                    low = tl.where(enough, low, middle + 1)
                cut = -high.to(tl.float32, bitcast=True)
        else:
            if top_p < 1:
                cut = tl.log((1 - top_p) / vocab) - 0.01
            cut = tl.maximum(cut, log_min_p)
    tl.store(bases + row, base)
    tl.store(cuts + row, cut)
    tl.store(counts + row, 0)


@triton.jit
def collect(
    logits_ptr, temperatures, top_ks, top_ps, log_min_ps, bases, cuts, counts, keys_ptr, tokens_ptr,
    sums, vocab, row_stride, BLOCK: tl.constexpr, TILES: tl.constexpr, NUM_PARTS: tl.constexpr,
):  # fmt: skip
    """Lists one part's tokens that reach the cut, in any order, and sums the mass of all its tokens."""
    row, part = tl.program_id(0), tl.program_id(1)
    temperature, log_min_p = tl.load(temperatures + row), tl.load(log_min_ps + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    if _is_filtered(temperature, top_k, top_p, log_min_p):
        base, cut = tl.load(bases + row), tl.load(cuts + row)
        line = row.to(tl.int64) * vocab
        mass = tl.full([], 0.0, tl.float64)
        for tile in range(TILES):
            tokens = (part * TILES + tile) * BLOCK + tl.arange(0, BLOCK)
            at = logits_ptr + row.to(tl.int64) * row_stride + tokens
            x = _tidy(tl.load(at, mask=tokens < vocab, other=float("-inf")))
            scores = _score(x, base, temperature)
            mass += tl.sum(tl.exp(scores), 0).to(tl.float64)
            wanted = (scores >= cut) & (scores > float("-inf"))
            ones = wanted.to(tl.int32)
            found = tl.sum(ones, 0)
            if found > 0:
                first = tl.atomic_add(counts + row, found, sem="relaxed")
                place = line + first + tl.cumsum(ones, 0) - ones
                tl.store(keys_ptr + place, _key(scores), mask=wanted)
                tl.store(tokens_ptr + place, tokens, mask=wanted)
        tl.store(sums + row * NUM_PARTS + part, mass)


@triton.jit
def _up_to(keys_ptr, count, limit, BLOCK: tl.constexpr):
    """How many keys are at most `limit`, and their mass."""
    number = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keys = tl.load(keys_ptr + at, mask=at < count, other=0x7FFFFFFF)
        is_in = keys <= limit
        number += tl.sum(is_in.to(tl.int32), 0)
        each = tl.where(is_in, tl.exp(-keys.to(tl.float32, bitcast=True)), 0.0)
        mass += tl.sum(each.to(tl.float64), 0)
    return number, mass


@triton.jit
def _ties_up_to(keys_ptr, tokens_ptr, count, key, limit, BLOCK: tl.constexpr):
    """How many tokens with this key have an id of at most `limit`."""
    number = tl.full([], 0, tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keys = tl.load(keys_ptr + at, mask=at < count, other=0x7FFFFFFF)
        tokens = tl.load(tokens_ptr + at, mask=at < count, other=0x7FFFFFFF)
        number += tl.sum(((keys == key) & (tokens <= limit)).to(tl.int32), 0)
    return number


@triton.jit
def choose_kept(
    temperatures, seeds, positions, top_ks, top_ps, log_min_ps, counts, keys_ptr, tokens_ptr, sums,
    chosen, vocab,
    BLOCK: tl.constexpr, NUM_PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr,
):  # fmt: skip
    """Overwrites what was chosen for one row, if it has filters, by the best of what they keep."""
    row = tl.program_id(0)
    temperature, log_min_p = tl.load(temperatures + row), tl.load(log_min_ps + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    if _is_filtered(temperature, top_k, top_p, log_min_p):
        count = tl.load(counts + row)
        keys_ptr += row.to(tl.int64) * vocab
        tokens_ptr += row.to(tl.int64) * vocab
        # The prefix ends in the group of tokens with key `last`, of which it has the first `ties`.
        last = tl.full([], _LAST_KEY, tl.int32)
        ties = tl.full([], 0x7FFFFFFF, tl.int32)
        if top_k > 0:
            low = tl.full([], 0, tl.int32)
            while low < last:
                middle = low + (last - low) // 2
                number, _ = _up_to(keys_ptr, count, middle, BLOCK)
                last = tl.where(number >= top_k, middle, last)
                low = tl.where(number >= top_k, low, middle + 1)
            above, total = _up_to(keys_ptr, count, last - 1, BLOCK)
            number, _ = _up_to(keys_ptr, count, last, BLOCK)
            ties = (tl.minimum(top_k, number) - above).to(tl.int32)
            total += ties.to(tl.float64) * tl.exp(-last.to(tl.float32, bitcast=True))
        else:
            parts = tl.arange(0, PADDED_PARTS)
            at = sums + row * NUM_PARTS + parts
            total = tl.sum(tl.load(at, mask=parts < NUM_PARTS, other=0.0), 0)
        if top_p < 1:
            wanted = top_p.to(tl.float64) * total
            low, high = tl.full([], 0, tl.int32), tl.full([], _LAST_KEY, tl.int32)
            while low < high:
                middle = low + (high - low) // 2
                _, mass = _up_to(keys_ptr, count, middle, BLOCK)
                high = tl.where(mass >= wanted, middle, high)
                low = tl.where(mass >= wanted, low, middle + 1)
            if (high <= last) & (high < _LAST_KEY):
                _, before = _up_to(keys_ptr, count, high - 1, BLOCK)
                each = tl.exp(-high.to(tl.float32, bitcast=True)).to(tl.float64)
                fit = ((wanted - before) / each).to(tl.int32)
                fit += (before + fit.to(tl.float64) * each < wanted).to(tl.int32)
                ties = tl.where(high < last, fit, tl.minimum(fit, ties))
                last = high
        highest = tl.full([], 0x7FFFFFFF, tl.int32)
        if _ties_up_to(keys_ptr, tokens_ptr, count, last, highest, BLOCK) > ties:
            low, highest = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32) + vocab
            while low < highest:
                middle = low + (highest - low) // 2
                enough = _ties_up_to(keys_ptr, tokens_ptr, count, last, middle, BLOCK) >= ties
                highest = tl.where(enough, middle, highest)
                low = tl.where(enough, low, middle + 1)
        k0, k1 = row_key(tl.load(seeds + row), tl.load(positions + row))
        best = tl.full([], float("-inf"), tl.float32)
        token = tl.full([], 0, tl.int32)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            keys = tl.load(keys_ptr + at, mask=at < count, other=0x7FFFFFFF)
            tokens = tl.load(tokens_ptr + at, mask=at < count, other=0)
            scores = -keys.to(tl.float32, bitcast=True)
            kept = (keys < last) | ((keys == last) & (tokens <= highest))
            kept = kept & (scores >= log_min_p)
            noisy = tl.where(kept, scores + gumbel_of(uniform(k0, k1, tokens)), float("-inf"))
            top = tl.max(noisy, 0)
            first = tl.min(tl.where(noisy == top, tokens, 0x7FFFFFFF), 0)
            is_better = (top > best) | ((top == best) & (first < token))
            token = tl.where(is_better, first, token)
            best = tl.maximum(top, best)
        tl.store(chosen + row, token.to(tl.int64))
