/* Attention of lines over blocks of keys, for one width of vector; see _attention.c.
 *
 * SCORES products of a query and a key are computed at once, their sums in registers; SUMS vectors
 * of weighted values. Any tile of lines gives a line the same bits. */
#if LANES == 16
#define SCORES 16
#define SUMS 16
#define BY4(a, b, how) ((V)_mm512_shuffle_f32x4((__m512)(a), (__m512)(b), how))
#define BY1(a, b, how) ((V)_mm512_shuffle_ps((__m512)(a), (__m512)(b), how))

/* Adds up each of 16 sums as `sum` does; its total is in the lane of its index. */
INLINE void NAME(totals)(V sums[16][PARTS], float *result) {
    V by8[8], by4[4], by2[2];
    UNROLL
    for (int i = 0; i < 8; i++) { /* sums i / 2 % 4 + 8 (i % 2), and the one 4 after it */
        V a = sums[i / 2 + i % 2 * 8][0], b = sums[i / 2 + i % 2 * 8 + 4][0];
        by8[i] = BY4(a, b, 0x44) + BY4(a, b, 0xee);
    }
    UNROLL
    for (int i = 0; i < 4; i++)
        by4[i] = BY4(by8[2 * i], by8[2 * i + 1], 0x88) + BY4(by8[2 * i], by8[2 * i + 1], 0xdd);
    UNROLL
    for (int i = 0; i < 2; i++)
        by2[i] = BY1(by4[2 * i], by4[2 * i + 1], 0x44) + BY1(by4[2 * i], by4[2 * i + 1], 0xee);
    AT(result) = BY1(by2[0], by2[1], 0x88) + BY1(by2[0], by2[1], 0xdd);
}
#undef BY4
#undef BY1
#elif LANES == 8
#define SCORES 4
#define SUMS 8

INLINE void NAME(totals)(V sums[4][PARTS], float *result) {
    __m256 by8[4], by4[2];
    UNROLL
    for (int i = 0; i < 4; i++)
        by8[i] = (__m256)(sums[i][0] + sums[i][1]);
    UNROLL
    for (int i = 0; i < 2; i++)
        by4[i] = _mm256_permute2f128_ps(by8[i], by8[i + 2], 0x20)
                 + _mm256_permute2f128_ps(by8[i], by8[i + 2], 0x31);
    __m256 by2 = _mm256_shuffle_ps(by4[0], by4[1], 0x44) + _mm256_shuffle_ps(by4[0], by4[1], 0xee);
    __m256 by1 = _mm256_shuffle_ps(by2, by2, 0x88) + _mm256_shuffle_ps(by2, by2, 0xdd);
    _mm_storeu_ps(result, _mm_movelh_ps(_mm256_castps256_ps128(by1),
                                        _mm256_extractf128_ps(by1, 1)));
}
#else
#define SCORES 1
#define SUMS 8

INLINE void NAME(totals)(V sums[1][PARTS], float *result) {
    V by4 = (sums[0][0] + sums[0][2]) + (sums[0][1] + sums[0][3]);
    *result = (by4[0] + by4[2]) + (by4[1] + by4[3]);
}
#endif

/* LANES numbers of a head from `at` on; zeros after its last. */
INLINE V NAME(part)(const float *head, size_t at, size_t head_dim, const int is_whole) {
    if (is_whole)
        return FROM(head + at);
    return at < head_dim ? NAME(load)(head + at, head_dim - at) : (V){0};
}

/* Products of `lines` queries and the keys first .. end - 1 of a block; writes up to SCORES more
 * behind them. */
INLINE void NAME(multiply)(const Job *job, const float *keys, const long long *slots, size_t first,
                           size_t end, const float *queries, float *scores, const int lines,
                           const int is_whole) {
    const size_t width = job->width, head_dim = job->head_dim;
    const int at_once = SCORES / lines;
    for (size_t key = first; key < end; key += at_once) {
        V sums[SCORES][PARTS];
        const float *from[SCORES];
        float found[SCORES];
        UNROLL
        for (int i = 0; i < at_once; i++)
            from[i] = keys + (size_t)slots[key + i < end ? key + i : end - 1] * head_dim;
        UNROLL
        for (int i = 0; i < SCORES * PARTS; i++)
            sums[i / PARTS][i % PARTS] = (V){0};
        for (size_t dim = 0; dim < width; dim += 16)
            UNROLL
            for (int part = 0; part < PARTS; part++) {
                V own[4];
                UNROLL
                for (int line = 0; line < lines; line++)
                    own[line] = FROM(queries + line * width + dim + part * LANES);
                UNROLL
                for (int i = 0; i < at_once; i++) {
                    V other = NAME(part)(from[i], dim + part * LANES, head_dim, is_whole);
                    UNROLL
                    for (int line = 0; line < lines; line++) {
                        V *sum = &sums[line * at_once + i][part];
                        *sum = FMA(own[line], other, *sum);
                    }
                }
            }
        NAME(totals)(sums, found);
        UNROLL
        for (int line = 0; line < lines; line++)
            memcpy(scores + line * STRIDE + key, found + line * at_once, at_once * sizeof(float));
    }
}

/* The weights of a block's keys first .. end - 1 in place of their scores, relative to the largest
 * so far; other keys get 0. Returns what earlier weights are to be multiplied with. */
INLINE float NAME(weigh)(const Job *job, float *scores, size_t first, size_t end, float *largest,
                         float *total) {
    V scale = SPLAT(job->scale), most = SPLAT(*largest);
    for (size_t key = 0; key < first; key++)
        scores[key] = -INFINITY;
    for (size_t key = end; key < BLOCK; key++)
        scores[key] = -INFINITY;
    for (size_t key = 0; key < BLOCK; key += LANES) {
        V scaled = FROM(scores + key) * scale;
        AT(scores + key) = scaled;
        most = MAX(most, scaled);
    }
    float lanes[LANES], new = *largest;
    AT(lanes) = most;
    for (int lane = 0; lane < LANES; lane++)
        new = lanes[lane] > new ? lanes[lane] : new;
    V base = SPLAT(new), factor = NAME(exp)(SPLAT(*largest) - base);
    for (int part = 0; part < PARTS; part++) {
        V sum = FROM(total + part * LANES) * factor;
        for (size_t key = part * LANES; key < BLOCK; key += 16) {
            V weight = NAME(exp)(FROM(scores + key) - base);
            AT(scores + key) = weight;
            sum = sum + weight;
        }
        AT(total + part * LANES) = sum;
    }
    *largest = new;
    return factor[0];
}

/* sums = sums * factor + the weighted values of the keys first .. end - 1, for `count` vectors of
 * them from `at` on. */
INLINE void NAME(add_columns)(const Job *job, const float *values, const long long *slots,
                              size_t first, size_t end, const float *weights,
                              const float *factors, float *sums, size_t at, const int lines,
                              const int count, const int is_whole) {
    const size_t width = job->width, head_dim = job->head_dim;
    V own[4][8];
    UNROLL
    for (int line = 0; line < lines; line++)
        UNROLL
        for (int i = 0; i < count; i++)
            own[line][i] = FROM(sums + line * width + at + i * LANES) * SPLAT(factors[line]);
    for (size_t key = first; key < end; key++) {
        const float *from = values + (size_t)slots[key] * head_dim;
        V weight[4];
        UNROLL
        for (int line = 0; line < lines; line++)
            weight[line] = SPLAT(weights[line * STRIDE + key]);
        UNROLL
        for (int i = 0; i < count; i++) {
            V value = NAME(part)(from, at + i * LANES, head_dim, is_whole);
            UNROLL
            for (int line = 0; line < lines; line++)
                own[line][i] = FMA(weight[line], value, own[line][i]);
        }
    }
    UNROLL
    for (int line = 0; line < lines; line++)
        UNROLL
        for (int i = 0; i < count; i++)
            AT(sums + line * width + at + i * LANES) = own[line][i];
}

INLINE void NAME(add)(const Job *job, const float *values, const long long *slots, size_t first,
                      size_t end, const float *weights, const float *factors, float *sums,
                      const int lines, const int is_whole) {
    const size_t width = job->width;
    size_t at = 0;
#define COLUMNS(count)                                                                             \
    if (lines * count <= SUMS)                                                                     \
        for (; at + count * LANES <= width; at += count * LANES)                                   \
            NAME(add_columns)(job, values, slots, first, end, weights, factors, sums, at, lines,   \
                              count, is_whole);
    COLUMNS(4) COLUMNS(2) COLUMNS(1)
#undef COLUMNS
}

/* One block of keys for one, two or four lines that find its keys in the same slots. */
INLINE void NAME(tile)(const Job *job, const Heads *heads, const long long *slots,
                       const Range *ranges, Lines *state, size_t line, const int lines,
                       const int is_whole) {
    const size_t width = job->width;
    const float *queries = state->queries + line * width;
    float *sums = state->sums + line * width, *scores = state->scores;
    float factors[4];
    size_t first = 0, end = BLOCK; /* what all lines see */
    for (int i = 0; i < lines; i++) {
        first = ranges[i].first > first ? ranges[i].first : first;
        end = ranges[i].end < end ? ranges[i].end : end;
    }
    for (int i = 0; i < lines; i++)
        if (ranges[i].first < first)
            NAME(multiply)(job, heads->keys, slots, ranges[i].first, first, queries + i * width,
                           scores + i * STRIDE, 1, is_whole);
    NAME(multiply)(job, heads->keys, slots, first, end, queries, scores, lines, is_whole);
    for (int i = 0; i < lines; i++) {
        if (end < ranges[i].end)
            NAME(multiply)(job, heads->keys, slots, end, ranges[i].end, queries + i * width,
                           scores + i * STRIDE, 1, is_whole);
        factors[i] = NAME(weigh)(job, scores + i * STRIDE, ranges[i].first, ranges[i].end,
                                 state->largest + line + i, state->totals + (line + i) * 16);
        if (ranges[i].first < first) {
            NAME(add)(job, heads->values, slots, ranges[i].first, first, scores + i * STRIDE,
                      factors + i, sums + i * width, 1, is_whole);
            factors[i] = 1.0f;
        }
    }
    NAME(add)(job, heads->values, slots, first, end, scores, factors, sums, lines, is_whole);
    for (int i = 0; i < lines; i++)
        if (end < ranges[i].end) {
            factors[i] = 1.0f;
            NAME(add)(job, heads->values, slots, end, ranges[i].end, scores + i * STRIDE,
                      factors + i, sums + i * width, 1, is_whole);
        }
}

#define VARIANT(lines, is_whole)                                                                   \
    TARGET static __attribute__((noinline)) void NAME(tile_##lines##_##is_whole)(                  \
        const Job *job, const Heads *heads, const long long *slots, const Range *ranges,           \
        Lines *state, size_t line) {                                                               \
        NAME(tile)(job, heads, slots, ranges, state, line, lines, is_whole);                       \
    }
VARIANT(1, 0) VARIANT(1, 1)
#if SCORES > 1
VARIANT(2, 0) VARIANT(2, 1) VARIANT(4, 0) VARIANT(4, 1)
#endif
#undef VARIANT

static const Tile NAME(tiles)[5][2] = {
    [1] = {NAME(tile_1_0), NAME(tile_1_1)},
#if SCORES > 1
    [2] = {NAME(tile_2_0), NAME(tile_2_1)},
    [4] = {NAME(tile_4_0), NAME(tile_4_1)},
#endif
};

/* Writes the results of a piece's lines of one KV head. */
TARGET static void NAME(finish)(const Job *job, const Lines *state, float *out, size_t num_rows) {
    const size_t width = job->width, head_dim = job->head_dim;
    for (size_t line = 0; line < num_rows * job->group; line++) {
        float *to = out + line / job->group * job->out_stride + line % job->group * head_dim;
        V totals[PARTS];
        for (int part = 0; part < PARTS; part++)
            totals[part] = FROM(state->totals + line * 16 + part * LANES);
        V total = SPLAT(NAME(sum)(totals));
        for (size_t at = 0; at < head_dim; at += LANES)
            NAME(store)(to + at, head_dim - at, FROM(state->sums + line * width + at) / total);
    }
}

static const Kernels NAME(kernels) = {NAME(tiles), NAME(finish)};

#undef SCORES
#undef SUMS
