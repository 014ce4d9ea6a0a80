"""Triton kernels that grow beam trees: the best children of every beam, the best beams of a level,
the best nodes of all.

Candidates are compared as 64-bit keys: a score's bits, ordered as integers, above the complement of
an index, so that one maximum finds the best and of equals the first. With DEPENDENT, kernels wait
by themselves for the one before them.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from foredraft.sampling.sampling_kernels import gumbel_of, row_key, uniform

NO_KEY = tl.constexpr(-(2**63))
NO_SHORT_KEY = tl.constexpr(-(2**31))


@triton.jit
def _key(score, index):
    """Converts float32 scores to int64 keys of the same order."""
    bits = score.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - index.to(tl.int64))


@triton.jit
def _index(key):
    return (0xFFFFFFFF - (key & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def _score(key):
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _short_key(score, place):
    """Packs 16-bit scores without NaN into int32 keys, above the complements of indexes below
    65536.
    """
    bits = score.to(tl.int16, bitcast=True).to(tl.int32)
    ordered = tl.where(bits < 0, bits ^ 0x7FFF, bits)
    return (ordered << 16) | (0xFFFF - place)


@triton.jit
def _long_key(key, first, dtype: tl.constexpr):
    """Converts a short key to the int64 key of the same column; `first` is the part's first
    column.
    """
    ordered = key >> 16
    bits = tl.where(ordered < 0, ordered ^ 0x7FFF, ordered).to(tl.int16)
    score = tl.minimum(bits.to(dtype, bitcast=True).to(tl.float32), 3.4028234663852886e38)
    place = 0xFFFF - (key & 0xFFFF)
    return tl.where(key == NO_SHORT_KEY, NO_KEY, _key(score, first + place))


@triton.jit(do_not_specialize=["level"])
def best_of_parts(
    logits, keys, maxima, sums, token_map, temperature, min_p, seeds, positions,
    stride, vocab, level, PARTS: tl.constexpr, PAD_PARTS: tl.constexpr, COUNT: tl.constexpr,
    PAD_COUNT: tl.constexpr, BEAMS: tl.constexpr, BLOCK: tl.constexpr, SAMPLED: tl.constexpr, MAPPED: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Finds the COUNT best columns of each part of each row, and the part's terms of the
    softmax sum.

    Grid (rows, PARTS, levels): rows of `level` and of the levels after it. keys int64 [all rows,
    PARTS, COUNT]; maxima, sums float32 [all rows, PARTS]. With SAMPLED, rows whose temperature is
    above 0 are ordered by the sampling rule's scores, noise included; the maxima must have been
    computed then.
    """
    part, sequence = tl.program_id(1), tl.program_id(0) // BEAMS
    row = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    level += tl.program_id(2)
    column = part * BLOCK + tl.arange(0, BLOCK)
    is_column = column < vocab
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    read = tl.load(logits + row.to(tl.int64) * stride + column, is_column, other=float("-inf"))
    x = read.to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    clean = x.to(read.dtype)
    x = tl.minimum(x, 3.4028234663852886e38)
    place = row * PARTS + part
    if SAMPLED:
        heat = tl.load(temperature + sequence)
        is_sampled = heat > 0
        others = tl.arange(0, PAD_PARTS)
        best = tl.load(maxima + row * PARTS + others, others < PARTS, other=float("-inf"))
        best = tl.max(best, 0)
        best = tl.where(best == float("-inf"), 0.0, best)
        relative = tl.div_rn(x - best, tl.where(is_sampled, heat, 1.0))
        token = column
        if MAPPED:
            token = tl.load(token_map + column, is_column, other=0).to(tl.int32)
        k0, k1 = row_key(tl.load(seeds + sequence), tl.load(positions + sequence) + level)
        noise = gumbel_of(uniform(k0, k1, token))
        is_kept = relative >= tl.log(tl.load(min_p + sequence))
        x = tl.where(is_sampled, tl.where(is_kept, relative + noise, float("-inf")), x)
    else:
        largest = tl.max(x, 0)
        # A part without any token adds nothing; its maximum is minus infinity.
        total = tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - largest)), 0)
        tl.store(maxima + place, largest)
        tl.store(sums + place, total)
    # A 16-bit score and its index fit 32 bits, which compare several times as fast.
    SHORT: tl.constexpr = not SAMPLED and read.dtype.primitive_bitwidth == 16
    if SHORT:
        key = tl.where(is_column, _short_key(clean, column - part * BLOCK), NO_SHORT_KEY)
        none = NO_SHORT_KEY
    else:
        key = tl.where(is_column, _key(x, column), NO_KEY)
        none = NO_KEY
    count = tl.arange(0, PAD_COUNT)
    found = tl.full((PAD_COUNT,), none, key.dtype)
    for index in range(COUNT):
        best_key = tl.max(key, 0)
        found = tl.where(count == index, best_key, found)
        key = tl.where(key == best_key, none, key)
    if SHORT:
        found = _long_key(found, part * BLOCK, read.dtype)
    tl.store(keys + place * COUNT + count, found, count < COUNT)


@triton.jit(do_not_specialize=["first", "level"])
def select_beams(
    keys, maxima, sums, token_map, temperature, values_in, nodes_in, mask_in,
    values_out, nodes_out, mask_out, tokens, sources, all_scores, all_tokens, all_parents,
    num_candidates, mask_stride, first, level, PARTS: tl.constexpr,
    TOPK: tl.constexpr, COUNT: tl.constexpr, BEAMS: tl.constexpr, PAD_TOPK: tl.constexpr,
    PAD_COUNT: tl.constexpr, PAD_PARTS: tl.constexpr, PAD_MASK: tl.constexpr,
    HAS_PARENTS: tl.constexpr, MAPPED: tl.constexpr, KEEP_FIRST: tl.constexpr,
    SAMPLED: tl.constexpr, SHARED: tl.constexpr = False, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Adds the children of a sequence's beams to the candidates, and selects the best as the
    next beams.

    Grid (B,). BEAMS is 1 at level 0, TOPK after it; `first` is the index of the level's first
    candidate. With SHARED, all beams of a sequence read its one row. With SAMPLED, the COUNT best scores of a row that is sampled share its probability,
    see `tree_building`.
    """
    sequence = tl.program_id(0)
    beam, child = tl.arange(0, PAD_TOPK), tl.arange(0, PAD_COUNT)
    is_beam, is_child = beam < BEAMS, child < TOPK
    row = sequence * BEAMS + beam
    if SHARED:
        row = tl.where(is_beam, sequence, 0)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Divisor of the softmax.
    part = tl.arange(0, PAD_PARTS)
    is_part = is_beam[:, None] & (part < PARTS)[None, :]
    at = row[:, None] * PARTS + part[None, :]
    largest = tl.load(maxima + at, is_part, other=float("-inf"))
    total = tl.load(sums + at, is_part, other=0.0)
    top = tl.max(largest, 1)
    scaled = tl.where(largest == float("-inf"), 0.0, total * tl.exp(largest - top[:, None]))
    normaliser = top + tl.log(tl.sum(scaled, 1))
    # The best children of each beam among its parts' best.
    entry = tl.arange(0, PAD_PARTS * PAD_COUNT)
    entry_part, entry_child = entry // PAD_COUNT, entry % PAD_COUNT
    is_entry = (entry_part < PARTS) & (entry_child < COUNT)
    key = tl.load(
        keys + (row[:, None] * PARTS + entry_part[None, :]) * COUNT + entry_child[None, :],
        is_beam[:, None] & is_entry[None, :],
        other=NO_KEY,
    )
    chosen = tl.full((PAD_TOPK, PAD_COUNT), NO_KEY, tl.int64)
    for index in range(COUNT):
        best = tl.max(key, 1)
        chosen = tl.where(child[None, :] == index, best[:, None], chosen)
        key = tl.where(key == best[:, None], NO_KEY, key)
    is_candidate = is_beam[:, None] & is_child[None, :] & (chosen != NO_KEY)
    column = tl.where(is_candidate, _index(chosen), 0)
    found = _score(chosen)
    if SAMPLED:
        heat = tl.load(temperature + sequence)
        if heat > 0:
            found = tl.where(chosen == NO_KEY, float("-inf"), found * heat)
            top = tl.max(found, 1)
            shares = tl.where(found == float("-inf"), 0.0, tl.exp(found - top[:, None]))
            normaliser = top + tl.log(tl.sum(shares, 1))
    value = found - normaliser[:, None]
    parent = tl.full((PAD_TOPK,), -1, tl.int32)
    if HAS_PARENTS:
        value += tl.load(values_in + sequence * TOPK + beam, is_beam, other=0.0)[:, None]
        parent = tl.load(nodes_in + sequence * TOPK + beam, is_beam, other=-1)
    value = tl.where(is_candidate & (value == value), value, float("-inf"))
    candidate = beam[:, None] * TOPK + child[None, :]
    score = value
    if KEEP_FIRST:  # the chain of first children always stays
        score = tl.where(candidate == 0, float("inf"), score)
    token = column
    if MAPPED:
        token = tl.load(token_map + column).to(tl.int32)
    is_place = is_beam[:, None] & is_child[None, :]
    place = sequence * num_candidates + first + candidate
    tl.store(all_scores + place, score, is_place)
    tl.store(all_tokens + place, token, is_place)
    tl.store(all_parents + place, tl.broadcast_to(parent[:, None], (PAD_TOPK, PAD_COUNT)), is_place)
    # The next beams, and the state that they copy from the beams that they continue.
    key = tl.where(is_place, _key(score, candidate), NO_KEY)
    index = tl.arange(0, PAD_TOPK)
    rank = tl.full((PAD_TOPK, PAD_COUNT), -1, tl.int32)
    old = tl.zeros((PAD_TOPK,), tl.int32)
    for place in range(TOPK):
        best = tl.max(tl.max(key, 1), 0)
        is_best = key == best
        rank = tl.where(is_best, place, rank)
        old = tl.where(index == place, _index(best) // TOPK, old)
        key = tl.where(is_best, NO_KEY, key)
    out = sequence * TOPK + rank
    is_next = rank >= 0
    tl.store(tokens + out, token.to(tl.int64), is_next)
    tl.store(values_out + out, value, is_next)
    tl.store(nodes_out + out, first + candidate, is_next)
    is_index = index < TOPK
    out = sequence * TOPK + index
    tl.store(sources + out, (sequence * BEAMS + old).to(tl.int64), is_index)
    bit = tl.arange(0, PAD_MASK)
    width = level * TOPK
    seen_at = mask_in + (sequence * TOPK + old)[:, None] * mask_stride + bit[None, :]
    seen = tl.load(seen_at, is_index[:, None] & (bit < width)[None, :], other=0)
    seen = tl.where(bit[None, :] == width + index[:, None], 1, seen).to(tl.uint8)
    is_bit = is_index[:, None] & (bit < width + TOPK)[None, :]
    tl.store(mask_out + out[:, None] * mask_stride + bit[None, :], seen, is_bit)


@triton.jit
def select_chain(
    keys, token_map, all_scores, all_tokens, all_parents, batch,
    PARTS: tl.constexpr, LEVELS: tl.constexpr, PAD_PARTS: tl.constexpr, PAD_LEVELS: tl.constexpr,
    MAPPED: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Selects the best column of each level of a chain whose levels do not depend on each other.

    Grid (B,). keys int64 [LEVELS, B, PARTS]. Scores fall from level to level.
    """
    sequence = tl.program_id(0)
    level, part = tl.arange(0, PAD_LEVELS), tl.arange(0, PAD_PARTS)
    is_level = level < LEVELS
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = (level[:, None] * batch + sequence) * PARTS + part[None, :]
    key = tl.load(keys + at, is_level[:, None] & (part < PARTS)[None, :], other=NO_KEY)
    best = tl.max(key, 1)
    token = tl.where(best == NO_KEY, 0, _index(best))
    if MAPPED:
        token = tl.load(token_map + token).to(tl.int32)
    place = sequence * LEVELS + level
    tl.store(all_scores + place, -level.to(tl.float32), is_level)
    tl.store(all_tokens + place, token, is_level)
    tl.store(all_parents + place, level - 1, is_level)


@triton.jit
def select_nodes(
    all_scores, all_tokens, all_parents, places, results, num_candidates, stride,
    NODES: tl.constexpr, PAD_CANDIDATES: tl.constexpr, PAD_NODES: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Selects the most valuable candidates of a sequence's tree, the best first.

    Grid (B,). results int32 [B, 2, NODES]: tokens (-1 after the last), parents; places int32 [B,
    candidates] is scratch.
    """
    sequence = tl.program_id(0)
    candidate = tl.arange(0, PAD_CANDIDATES)
    is_candidate = candidate < num_candidates
    base = sequence * num_candidates
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    score = tl.load(all_scores + base + candidate, is_candidate, other=float("-inf"))
    key = tl.where(score > float("-inf"), _key(score, candidate), NO_KEY)
    place = tl.full((PAD_CANDIDATES,), -1, tl.int32)
    for index in range(NODES):
        best = tl.max(key, 0)
        is_best = (key == best) & (key != NO_KEY)
        place = tl.where(is_best, index, place)
        key = tl.where(is_best, NO_KEY, key)
    is_node = place >= 0
    tl.store(places + base + candidate, place, is_candidate)
    node = tl.arange(0, PAD_NODES)
    out = results + sequence * stride
    count = tl.sum(is_node.to(tl.int32), 0)
    is_empty = (node >= count) & (node < NODES)
    for part in tl.static_range(2):
        tl.store(out + part * NODES + node, tl.full((PAD_NODES,), -1, tl.int32), is_empty)
    tl.debug_barrier()
    parent = tl.load(all_parents + base + candidate, is_candidate, other=-1)
    above = tl.load(places + base + parent, is_node & (parent >= 0), other=-1)
    tl.store(out + place, tl.load(all_tokens + base + candidate, is_candidate, other=-1), is_node)
    tl.store(out + NODES + place, above, is_node)
