"""The sampling rule under top-k, top-p and min-p in Triton, as `filters` defines them, without sorting the vocabulary.

What the filters keep is a prefix of the tokens ranked by score and id. A bound that is cheap to know (`bound`) leaves a
list of tokens that holds this prefix, mostly short (`collect`), in which it is found out whether a token is kept
(`choose_kept`). A token's key is the bits of its score's magnitude: scores are at most 0, so the better token has the smaller key.
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
def _kth_key(keys_ptr, count, k, BLOCK: tl.constexpr):
    """The k-th smallest key, three bits in each pass from the highest on; the largest number where there are fewer."""
    digits = tl.arange(0, 8)
    key = tl.full([], 0, tl.int32)
    for turn in range(11):
        shift = tl.maximum(28 - 3 * turn, 0)
        limits = key + (digits << shift) + ((1 << shift) - 1)
        numbers = tl.zeros([8], tl.int32)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            keys = tl.load(keys_ptr + at, mask=at < count, other=0x7FFFFFFF)
            is_in = (keys[None, :] <= limits[:, None]) & (at < count)[None, :]
            numbers += tl.sum(is_in.to(tl.int32), 1)
        key += tl.min(tl.where(numbers >= k, digits, 7), 0) << shift
    return key


@triton.jit
def _before(keys_ptr, tokens_ptr, count, key, token, BLOCK: tl.constexpr):
    """How many tokens are ranked before one, and their mass."""
    number = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keys = tl.load(keys_ptr + at, mask=at < count, other=0x7FFFFFFF)
        tokens = tl.load(tokens_ptr + at, mask=at < count, other=0x7FFFFFFF)
        is_before = (keys < key) | ((keys == key) & (tokens < token))
        number += tl.sum(is_before.to(tl.int32), 0)
        each = tl.where(is_before, tl.exp(-keys.to(tl.float32, bitcast=True)), 0.0)
        mass += tl.sum(each.to(tl.float64), 0)
    return number, mass


@triton.jit
def _best(keys_ptr, tokens_ptr, count, key, token, log_min_p, k0, k1, BLOCK: tl.constexpr):
    """The token that the rule prefers among those ranked before one that min-p keeps, and its key; or -1 for none."""
    best = tl.full([], float("-inf"), tl.float32)
    best_token = tl.full([], -1, tl.int32)
    best_key = tl.full([], 0, tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keys = tl.load(keys_ptr + at, mask=at < count, other=0x7FFFFFFF)
        tokens = tl.load(tokens_ptr + at, mask=at < count, other=0x7FFFFFFF)
        scores = -keys.to(tl.float32, bitcast=True)
        kept = (keys < key) | ((keys == key) & (tokens < token))
        kept = kept & (scores >= log_min_p)
        noisy = tl.where(kept, scores + gumbel_of(uniform(k0, k1, tokens)), float("-inf"))
        top = tl.max(noisy, 0)
        first = tl.min(tl.where(noisy == top, tokens, 0x7FFFFFFF), 0)
        if (top > best) | ((top == best) & (top > float("-inf")) & (first < best_token)):
            best, best_token = top, first
            best_key = tl.max(tl.where(kept & (tokens == first), keys, 0), 0)
    return best_token, best_key


@triton.jit
def _tied(keys_ptr, tokens_ptr, count, key, limit, BLOCK: tl.constexpr):
    """How many tokens with this key have an id below `limit`."""
    number = tl.full([], 0, tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keys = tl.load(keys_ptr + at, mask=at < count, other=0x7FFFFFFF)
        tokens = tl.load(tokens_ptr + at, mask=at < count, other=0x7FFFFFFF)
        number += tl.sum(((keys == key) & (tokens < limit)).to(tl.int32), 0)
    return number


@triton.jit
def choose_kept(
    logits_ptr, temperatures, seeds, positions, top_ks, top_ps, log_min_ps, bases, counts, keys_ptr,
    tokens_ptr, sums, chosen, vocab, row_stride,
    BLOCK: tl.constexpr, NUM_PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr,
):  # fmt: skip
    """Overwrites what was chosen for one row, if it has filters and they do not keep it, by the best of what they keep.

    What is best of all and kept is best of what is kept. A token that top-p does not keep takes all that are ranked after
    it along, so the next one to look at is the best of those before it: a few turns, mostly none.
    """
    row = tl.program_id(0)
    temperature, log_min_p = tl.load(temperatures + row), tl.load(log_min_ps + row)
    top_k, top_p = tl.load(top_ks + row).to(tl.int32), tl.load(top_ps + row)
    if _is_filtered(temperature, top_k, top_p, log_min_p):
        count = tl.load(counts + row)
        keys_ptr += row.to(tl.int64) * vocab
        tokens_ptr += row.to(tl.int64) * vocab
        # What may be kept is ranked before (last, end).
        last = tl.full([], _LAST_KEY, tl.int32)
        end = tl.full([], 0, tl.int32)
        parts = tl.arange(0, PADDED_PARTS)
        at = sums + row * NUM_PARTS + parts
        total = tl.sum(tl.load(at, mask=parts < NUM_PARTS, other=0.0), 0)
        if (top_k > 0) & (top_k <= count):
            last = _kth_key(keys_ptr, count, top_k, BLOCK)
            above, total = _before(keys_ptr, tokens_ptr, count, last, 0, BLOCK)
            ties = top_k - above
            total += ties.to(tl.float64) * tl.exp(-last.to(tl.float32, bitcast=True))
            end += vocab
            if _tied(keys_ptr, tokens_ptr, count, last, vocab, BLOCK) > ties:
                low = tl.full([], 0, tl.int32)
                while low < end:
                    middle = low + (end - low) // 2
                    enough = _tied(keys_ptr, tokens_ptr, count, last, middle, BLOCK) >= ties
                    end = tl.where(enough, middle, end)
                    low = tl.where(enough, low, middle + 1)
        wanted = top_p.to(tl.float64) * total
        k0, k1 = row_key(tl.load(seeds + row), tl.load(positions + row))
        token = tl.load(chosen + row).to(tl.int32)
        x = _tidy(tl.load(logits_ptr + row.to(tl.int64) * row_stride + token))
        score = _score(x, tl.load(bases + row), temperature)
        key = _key(score)
        is_ahead = (key < last) | ((key == last) & (token < end))
        if (not is_ahead) | (score < log_min_p):
            token, key = _best(keys_ptr, tokens_ptr, count, last, end, log_min_p, k0, k1, BLOCK)
        found = token
        while found >= 0:
            token = found
            found = tl.full([], -1, tl.int32)
            if top_p < 1:
                _, mass = _before(keys_ptr, tokens_ptr, count, key, token, BLOCK)
                if mass >= wanted:
                    found, key = _best(
                        keys_ptr, tokens_ptr, count, key, token, log_min_p, k0, k1, BLOCK
                    )
        tl.store(chosen + row, tl.maximum(token, 0).to(tl.int64))
