/* What the sampling rule does with every token of a row, for one width of vector. */

/* The largest of up to BLOCK logits; *broken where one is NaN or plus infinity. */
INLINE float NAME(largest)(const float *logits, size_t count, int *broken) {
    V most = SPLAT(-INFINITY);
    I good = ~(I){0};
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        V own = FROM(logits + i);
        good &= (I)(own < SPLAT(INFINITY));
        most = MAX(own, most);
    }
    float found = -INFINITY;
    int is_good = 1;
    for (int lane = 0; lane < LANES; lane++) {
        found = most[lane] > found ? most[lane] : found;
        is_good &= good[lane] != 0;
    }
    for (; i < count; i++) {
        is_good &= logits[i] < INFINITY;
        found = logits[i] > found ? logits[i] : found;
    }
    *broken |= !is_good;
    return found;
}

/* Finds the largest logit of each block; returns whether a logit is NaN or plus infinity. */
TARGET static int NAME(block_maxima)(const float *logits, size_t vocab, float *maxima) {
    int broken = 0;
    for (size_t first = 0; first < vocab; first += BLOCK_TOKENS) {
        size_t left = vocab - first;
        maxima[first / BLOCK_TOKENS] =
            NAME(largest)(logits + first, left < BLOCK_TOKENS ? left : BLOCK_TOKENS, &broken);
    }
    return broken;
}

/* Hashes `count` tokens, those of `tokens` or from `first` on. */
TARGET static void NAME(hash)(Keys keys, const int32_t *tokens, uint32_t first, size_t count,
                              uint32_t *hashes) {
    for (size_t i = 0; i < count; i++)
        hashes[i] = hash_token(keys, tokens ? (uint32_t)tokens[i] : first + (uint32_t)i);
}

typedef double NAME(Doubles) __attribute__((vector_size(4 * LANES)));
typedef int64_t NAME(Longs) __attribute__((vector_size(4 * LANES)));
typedef uint64_t NAME(Bits) __attribute__((vector_size(4 * LANES))); /* whose sums may overflow */

/* e^x for x from -60 to 0, within a few units of the last place. */
INLINE NAME(Doubles) NAME(exp_double)(NAME(Doubles) x) {
    static const double factors[] = {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                                     1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24,
                                     1.0 / 6, 0.5, 1.0, 1.0};
    NAME(Doubles) shifted = x * 1.4426950408889634 + 0x1.8p52; /* lowest bits: an integer's */
    NAME(Doubles) power = shifted - 0x1.8p52;
    NAME(Doubles) r = x - power * 0.693147180369123816490; /* 33 bits, so the product is exact */
    r -= power * 1.90821492927058770002e-10;
    NAME(Doubles) sum = r * (1.0 / 479001600) + factors[0];
    UNROLL
    for (int i = 1; i < 12; i++)
        sum = sum * r + factors[i];
    return (NAME(Doubles))((NAME(Bits))sum + ((NAME(Bits))shifted << 52));
}

/* Tempers up to BLOCK_TOKENS logits; scores behind the last are minus infinity. */
INLINE void NAME(temper)(const float *logits, size_t count, float top, float temperature,
                         float *scores) {
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        AT(scores + i) = (FROM(logits + i) - SPLAT(top)) / SPLAT(temperature);
    for (; i < count; i++)
        scores[i] = (logits[i] - top) / temperature;
    for (; i < BLOCK_TOKENS; i++)
        scores[i] = -INFINITY;
}

/* The sum of e^score over a row, but for scores below NEGLIGIBLE. It has 8 parts for every width of
 * vector, so all instruction sets give the same bits. */
TARGET static double NAME(total)(const float *logits, size_t vocab, const float *maxima, float top,
                                 float temperature) {
    NAME(Doubles) sums[PARTS] = {{0}};
    double total = 0;
    for (size_t first = 0; first < vocab; first += BLOCK_TOKENS) {
        const size_t left = vocab - first;
        float scores[BLOCK_TOKENS];
        if (!((maxima[first / BLOCK_TOKENS] - top) / temperature > NEGLIGIBLE))
            continue;
        NAME(temper)(logits + first, left < BLOCK_TOKENS ? left : BLOCK_TOKENS, top, temperature,
                     scores);
        for (size_t i = 0; i < BLOCK_TOKENS; i += LANES / 2) {
            NAME(Doubles) x;
            for (int lane = 0; lane < LANES / 2; lane++)
                x[lane] = scores[i + lane];
            NAME(Longs) is_small = x < NEGLIGIBLE;
            NAME(Doubles) mass = NAME(exp_double)((NAME(Doubles))((NAME(Longs))x & ~is_small));
            sums[i / (LANES / 2) % PARTS] += (NAME(Doubles))((NAME(Longs))mass & ~is_small);
        }
    }
    for (int part = 0; part < PARTS; part++)
        for (int lane = 0; lane < LANES / 2; lane++)
            total += sums[part][lane];
    return total;
}

/* Adds the tokens with scores from `low` on and below `high` to `found`; returns their number. */
TARGET static size_t NAME(collect)(const float *logits, size_t vocab, const float *maxima, float top,
                                   float temperature, float low, float high, Candidate *found) {
    size_t count = 0;
    for (size_t first = 0; first < vocab; first += BLOCK_TOKENS) {
        const size_t left = vocab - first;
        float scores[BLOCK_TOKENS];
        if ((maxima[first / BLOCK_TOKENS] - top) / temperature < low)
            continue;
        NAME(temper)(logits + first, left < BLOCK_TOKENS ? left : BLOCK_TOKENS, top, temperature,
                     scores);
        for (size_t i = 0; i < BLOCK_TOKENS; i++)
            if (scores[i] >= low && scores[i] < high)
                found[count++] = (Candidate){scores[i], (uint32_t)(first + i)};
    }
    return count;
}
