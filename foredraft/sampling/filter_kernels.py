"""The sampling rule under top-k, top-p and min-p in Triton, as `filters` defines them, without
sorting the vocabulary.

What the filters keep is a prefix of the tokens ranked by score and id. A bound that is cheap to
know (`bound`) leaves a list of tokens that holds this prefix, mostly short (`collect`), in which
`choose_kept` looks for the rule's choice.

A token's key is the bits of its score's magnitude: scores are at most 0, so the better token has
the smaller key. Its rank is key * 2^32 + id. Masses are counted in units of 2^-44 of the best
token's, as integers: their sums are the same in any order, and stay below 2^63 for 500,000 tokens.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from foredraft.sampling.sampling_kernels import _log, _tidy, gumbel_of, row_key, uniform

_UNITS = tl.constexpr(2.0**44)
_LAST_RANK = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_LAST_KEY = tl.constexpr(0x7F800000)  # key of minus infinity


@triton.jit
def _is_filtered(temperature, top_k, top_p, min_p):
    return (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))


@triton.jit
def _least(min_p):
    """Returns the lowest score that min-p keeps."""
    return tl.where(min_p > 0, _log(min_p), float("-inf"))


@triton.jit
def _score(logits, base, temperature):
    return tl.div_rn(logits - base, temperature)


@triton.jit
def _key(score):
    return tl.abs(score).to(tl.int32, bitcast=True)


@triton.jit
def _mass(score):
    return (tl.exp(score) * _UNITS).to(tl.int64)


@triton.jit
def _rank(key, token):
    return (key.to(tl.int64) << 32) | token.to(tl.int64)


@triton.jit
def _score_of(rank):
    return -(rank >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def tops(
    logits_ptr, temperatures, top_ks, top_ps, min_ps, tops_ptr, vocab, row_stride, num_blocks,
    SIZE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Finds the largest logit of COUNT blocks of SIZE tokens of one row."""
    row = tl.program_id(0).to(tl.int64)
    temperature, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    if _is_filtered(temperature, top_k, top_p, min_p):
        blocks = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
        tokens = blocks[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        at = logits_ptr + row * row_stride + tokens
        x = _tidy(tl.load(at, mask=tokens < vocab, other=float("-inf")))
        tl.store(tops_ptr + row * num_blocks + blocks, tl.max(x, 1), mask=blocks < num_blocks)


@triton.jit(do_not_specialize=["vocab", "num_blocks"])
def bound(
    tops_ptr, temperatures, top_ks, top_ps, min_ps, bases, cuts, counts, totals, vocab, num_blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds the best logit of one row and a score below which nothing matters; empties the row's
    list.

    With k at most the number of blocks, the k-th best token is at least as good as the k-th best
    block's best. Without top-k, the tokens below ln((1 - p) / V) have less than 1 - p of the mass
    together, as the best token's mass is 1.
    """
    row = tl.program_id(0)
    temperature, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
    top_k, top_p = tl.load(top_ks + row).to(tl.int32), tl.load(top_ps + row)
    if _is_filtered(temperature, top_k, top_p, min_p):
        blocks = tl.arange(0, BLOCK)
        at = tops_ptr + row.to(tl.int64) * num_blocks + blocks
        top = tl.load(at, mask=blocks < num_blocks, other=float("-inf"))
        base = tl.max(top, 0)
        base = tl.where(base == float("-inf"), 0.0, base)
        cut = tl.full([], float("-inf"), tl.float32)
        if (top_k > 0) & (top_k < vocab):
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
            cut = tl.maximum(cut, _least(min_p))
        tl.store(bases + row, base)
        tl.store(cuts + row, cut)
        tl.store(counts + row, 0)
        tl.store(totals + row, tl.full([], 0, tl.int64))


@triton.jit(do_not_specialize=["tiles"])
def collect(
    logits_ptr, temperatures, top_ks, top_ps, min_ps, bases, cuts, counts, totals, ranks_ptr,
    vocab, row_stride, tiles, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lists the ranks of one part's tokens that reach the cut, in any order, and adds the mass of
    all its tokens.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    temperature, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    if _is_filtered(temperature, top_k, top_p, min_p):
        base, cut = tl.load(bases + row), tl.load(cuts + row)
        line = row.to(tl.int64) * vocab
        mass = tl.zeros([BLOCK], tl.int64)
        for tile in range(tiles):
            tokens = (part * tiles + tile) * BLOCK + tl.arange(0, BLOCK)
            at = logits_ptr + row.to(tl.int64) * row_stride + tokens
            x = _tidy(tl.load(at, mask=tokens < vocab, other=float("-inf")))
            scores = _score(x, base, temperature)
            mass += _mass(scores)
            wanted = (scores >= cut) & (scores > float("-inf"))
            ones = wanted.to(tl.int32)
            found = tl.sum(ones, 0)
            if found > 0:
                first = tl.atomic_add(counts + row, found, sem="relaxed")
                place = line + first + tl.cumsum(ones, 0) - ones
                tl.store(ranks_ptr + place, _rank(_key(scores), tokens), mask=wanted)
        tl.atomic_add(totals + row, tl.sum(mass, 0), sem="relaxed")


@triton.jit
def _kth(ranks_ptr, count, k, turns, BLOCK: tl.constexpr):
    """Finds the k-th lowest of at least k ranks, four bits per turn: eight turns for the key and
    the others for the id.
    """
    digits = tl.arange(0, 16).to(tl.int64)
    rank = tl.full([], 0, tl.int64)
    for turn in range(turns):
        shift = tl.where(turn < 8, 60 - 4 * turn, 4 * (turns - 1 - turn)).to(tl.int64)
        limits = rank + (digits << shift) + ((1 << shift) - 1)
        numbers = tl.zeros([16], tl.int32)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            ranks = tl.load(ranks_ptr + at, mask=at < count, other=_LAST_RANK)
            is_in = (ranks[None, :] <= limits[:, None]) & (at < count)[None, :]
            numbers += tl.sum(is_in.to(tl.int32), 1)
        rank += tl.min(tl.where(numbers >= k, digits, 15), 0) << shift
    return rank


@triton.jit
def _before(ranks_ptr, count, limit, BLOCK: tl.constexpr):
    """Returns the number of ranks below `limit`, and their mass."""
    numbers, masses = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ranks = tl.load(ranks_ptr + at, mask=at < count, other=_LAST_RANK)
        is_before = ranks < limit
        numbers += is_before.to(tl.int32)
        masses += tl.where(is_before, _mass(_score_of(ranks)), 0)
    return tl.sum(numbers, 0), tl.sum(masses, 0)


@triton.jit
def _best_before(ranks_ptr, count, limit, least, k0, k1, BLOCK: tl.constexpr):
    """Returns the rank that the rule prefers among those below `limit` that min-p keeps.

    Returns -1 where there is none.

    Noise is computed only where some token can win, see `sampling_kernels.choose_parts`.
    """
    best = tl.full([], float("-inf"), tl.float32)
    best_rank = tl.full([], -1, tl.int64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ranks = tl.load(ranks_ptr + at, mask=at < count, other=_LAST_RANK)
        scores, tokens = _score_of(ranks), ranks.to(tl.int32)
        is_in = (ranks < limit) & (scores >= least)
        w = uniform(k0, k1, tokens)
        can_win = is_in & (w < tl.exp(scores - best) * 1.001)
        if tl.max(can_win.to(tl.int32), 0) > 0:
            noisy = tl.where(is_in, scores + gumbel_of(w), float("-inf"))
            top = tl.max(noisy, 0)
            token = tl.min(tl.where(noisy == top, tokens, 0x7FFFFFFF), 0)
            rank = tl.max(tl.where(is_in & (tokens == token), ranks, -1), 0)
            is_lower = token < (best_rank & 0xFFFFFFFF)
            best_rank = tl.where((top > best) | ((top == best) & is_lower), rank, best_rank)
            best = tl.maximum(top, best)
    return best_rank


@triton.jit(do_not_specialize=["vocab", "row_stride", "turns"])
def choose_kept(
    logits_ptr, seeds, positions, temperatures, top_ks, top_ps, min_ps, bases, counts, totals,
    ranks_ptr, chosen, vocab, row_stride, turns, BLOCK: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Replaces the token of one row by the best token that the row's filters keep.

    Changes nothing where no token was chosen, or where the filters keep the chosen one: the best of
    all tokens is then the best of the kept ones. A token that top-k or top-p drops excludes all
    that are ranked after it, so the next candidate is the best token before it. Mostly there is no
    such turn, seldom more than three.
    """
    row = tl.program_id(0)
    temperature, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
    top_k, top_p = tl.load(top_ks + row).to(tl.int32), tl.load(top_ps + row)
    first = tl.load(chosen + row)
    if (first >= 0) & _is_filtered(temperature, top_k, top_p, min_p):
        ranks_ptr += row.to(tl.int64) * vocab
        count, total = tl.load(counts + row), tl.load(totals + row)
        end = tl.full([], _LAST_RANK, tl.int64)
        if (top_k > 0) & (top_k <= count) & (top_p < 1):
            end = _kth(ranks_ptr, count, top_k, turns, SHORT) + 1
            _, total = _before(ranks_ptr, count, end, BLOCK)
        # The filters keep tokens with fewer tokens, and less mass, before them: the first always.
        many = tl.where(top_k > 0, top_k, 0x7FFFFFFF)
        much = tl.maximum(top_p.to(tl.float64) * total.to(tl.float64), 1.0)
        much = tl.where(top_p < 1, much, float("inf"))
        least = _least(min_p)
        k0, k1 = row_key(tl.load(seeds + row), tl.load(positions + row))
        token = first.to(tl.int32)
        x = _tidy(tl.load(logits_ptr + row.to(tl.int64) * row_stride + token))
        score = _score(x, tl.load(bases + row), temperature)
        rank = _rank(_key(score), token)
        number, mass = _before(ranks_ptr, count, rank, BLOCK)
        rejected = (number >= many) | (mass.to(tl.float64) >= much) | (score < least)
        while rejected:
            limit = tl.minimum(rank, end)
            rank = _best_before(ranks_ptr, count, limit, least, k0, k1, BLOCK)
            number, mass = _before(ranks_ptr, count, rank, BLOCK)
            rejected = (rank >= 0) & ((number >= many) | (mass.to(tl.float64) >= much))
        # The id, or 0 where nothing is kept, as in a row of minus infinities.
        tl.store(chosen + row, tl.where(rank < 0, 0, rank & 0xFFFFFFFF))
