/* The product for one width of vector; see _vector.h. It has beside its names:
 *
 * WIDE_BYTES(p), WIDE_HALVES(p)  LANES integers of 8 or 16 bits from p on, without a sign, as int32
 * LOOKUP(i,t) lane by lane, the float of the table t at the lowest 4 bits of i; may be absent
 * ROWS        most rows of x whose sums stay in registers beside a tile's vectors
 * PAIRED_ROWS most rows that are multiplied with two tiles at once, so that enough sums wait for
 *             their next product
 *
 * Every output is one chain: sum = fma(x[k], weight[k], sum) for k from 0 on, a weight being
 * fma(number - zero, scale, offset) in float32. So its bits depend neither on the rows beside it
 * nor on LANES nor on threads.
 */
#if LANES == 16
#define WIDE_BYTES(p) ((I)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define WIDE_HALVES(p) ((I)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))))
#define LOOKUP(i, t) ((V)_mm512_permutexvar_ps((__m512i)(i), (__m512)(t)))
#define ROWS 12
#define PAIRED_ROWS 2
#elif LANES == 8
#define WIDE_BYTES(p) ((I)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define WIDE_HALVES(p) ((I)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define ROWS 3
#define PAIRED_ROWS 0
#else
typedef uint8_t NAME(Bytes) __attribute__((vector_size(4), aligned(1), may_alias));
typedef uint16_t NAME(Halves) __attribute__((vector_size(8), aligned(2), may_alias));
#define WIDE_BYTES(p) __builtin_convertvector(*(const NAME(Bytes) *)(p), I)
#define WIDE_HALVES(p) __builtin_convertvector(*(const NAME(Halves) *)(p), I)
#if defined(__ARM_NEON)
#define ROWS 3
#else
#define ROWS 1
#endif
#define PAIRED_ROWS 0
#endif
#define VECTORS (TILE / LANES)
#define MOST_VECTORS (VECTORS * (PAIRED_ROWS ? 2 : 1))

INLINE V NAME(from_float16)(I half) {
    /* Exact for all finite numbers: the exponent's bias is brought over by a multiplication. */
    I magnitude = (half & 0x7fff) << 13, sign = (half & 0x8000) << 16;
    V value = (V)magnitude * 0x1p112f;
    return (V)((I)value | sign);
}

/* `at` and `unit` are the indices of a vector's first factor, and of the first unit of those. */
INLINE V NAME(load_factors)(const Factors *factors, size_t at, size_t unit) {
    if (factors->type == FLOAT32)
        return FROM((const float *)factors->values + at);
    if (factors->type == INT8) {
        I bytes = WIDE_BYTES((const uint8_t *)factors->values + at);
        V units = NAME(from_float16)(WIDE_HALVES(factors->units + unit));
        return __builtin_convertvector((bytes ^ 128) - 128, V) * units;
    }
    I bits = WIDE_HALVES((const uint16_t *)factors->values + at);
    return factors->type == BFLOAT16 ? (V)(bits << 16) : NAME(from_float16)(bits);
}

/* What turns a group's numbers of one vector into weights. */
typedef struct {
    V zero, scale, offset;
} NAME(group);

INLINE NAME(group) NAME(load_group)(const Matrix *m, size_t tile, size_t group, size_t unit,
                                    size_t lane) {
    NAME(group) found;
    size_t at = (tile * m->num_groups + group) * TILE + lane;
    unit = (tile * m->num_units + unit) * TILE + lane;
    /* Plus 2^23, as the numbers have it. */
    if (m->zeros) {
        I zeros = WIDE_BYTES(m->zeros + at);
        found.zero = (V)(zeros | MAGIC_BITS);
    } else {
        found.zero = SPLAT((float)(MAGIC + m->zero));
    }
    found.scale = NAME(load_factors)(&m->scales, at, unit);
    /* A sum with -0 changes nothing. */
    found.offset = m->offsets.values ? NAME(load_factors)(&m->offsets, at, unit) : SPLAT(-0.0f);
    return found;
}

/* The tile's vector `c` of numbers of one input, as floats plus 2^23: the float's lowest bits are
 * the number's. */
INLINE V NAME(load_numbers)(const uint8_t *numbers, int c, const int bits) {
    if (bits == 8) {
        I wide = WIDE_BYTES(numbers + c * LANES);
        return (V)(wide | MAGIC_BITS);
    }
    /* The lower halves of 16 bytes are outputs 0 to 15, the upper ones 16 to 31. */
    I wide = WIDE_BYTES(numbers + c * LANES % 16);
    I half = c * LANES < 16 ? (wide & 15) : (wide >> 4);
    return (V)(half | MAGIC_BITS);
}

INLINE void NAME(store_outputs)(const Job *job, size_t row, size_t output, V sum) {
    size_t num_outputs = job->matrix.num_outputs;
    float *out = job->out + row * num_outputs + output;
    if (output + LANES <= num_outputs) {
        AT(out) = job->bias ? sum + FROM(job->bias + output) : sum;
        return;
    }
    float lanes[LANES];
    AT(lanes) = sum;
    for (size_t lane = 0; output + lane < num_outputs; lane++)
        out[lane] = job->bias ? lanes[lane] + job->bias[output + lane] : lanes[lane];
}

INLINE V NAME(load_weights)(const uint8_t *numbers, int c, const int bits, NAME(group) group) {
    return FMA(NAME(load_numbers)(numbers, c, bits) - group.zero, group.scale, group.offset);
}

#ifdef LOOKUP
/* As `load_weights` for 4 bits, with a table of all numbers less their zero point. */
INLINE V NAME(look_up)(const uint8_t *numbers, int c, V table, NAME(group) group) {
    I wide = WIDE_BYTES(numbers + c * LANES % 16);
    V number = LOOKUP(c * LANES < 16 ? wide : wide >> 4, table);
    return FMA(number, group.scale, group.offset);
}
#endif

/* `rows` rows of x, packed [inputs, rows], times `tiles` tiles from `tile` on. The form is FLOATS
 * where `plain` has the tile dequantised, and CENTRED for 4 bits with one zero point for all. All
 * three numbers are constants wherever this is called. */
INLINE void NAME(block)(const Job *job, size_t tile, const float *plain, const float *x, size_t row,
                        const int rows, const int form, const int tiles) {
    const Matrix *m = &job->matrix;
    const int bits = form == CENTRED ? 4 : form;
    const size_t num_inputs = m->num_inputs, stride = TILE * bits / 8;
    const int vectors = tiles * VECTORS;
    V sums[ROWS][MOST_VECTORS];
    NAME(group) groups[MOST_VECTORS];
    const uint8_t *numbers = form == FLOATS ? (const uint8_t *)plain
                                            : m->numbers + tile * num_inputs * stride;
#ifdef LOOKUP
    V table = {};
    for (int i = 0; form == CENTRED && i < LANES; i++)
        table[i] = i - m->zero;
#endif
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int c = 0; c < vectors; c++)
            sums[r][c] = (V){};
    size_t k = 0, unit = 0, end_of_unit = m->groups_of_unit;
    for (size_t group = 0; k < num_inputs; group++) {
        size_t end = form == FLOATS ? num_inputs : least(k + m->group_size, num_inputs);
        if (group == end_of_unit) {
            unit++;
            end_of_unit += m->groups_of_unit;
        }
        if (form != FLOATS)
            UNROLL
            for (int c = 0; c < vectors; c++)
                groups[c] = NAME(load_group)(m, tile + c / VECTORS, group, unit,
                                             c % VECTORS * LANES);
        for (; k < end; k++) {
            V weights[MOST_VECTORS];
            UNROLL
            for (int c = 0; c < vectors; c++) {
                const uint8_t *from = numbers + (c / VECTORS * num_inputs + k) * stride;
                if (form != FLOATS && c % VECTORS == 0)
                    __builtin_prefetch(from + AHEAD);
                if (form == FLOATS)
                    weights[c] = FROM(from + c * LANES * 4);
#ifdef LOOKUP
                else if (form == CENTRED)
                    weights[c] = NAME(look_up)(from, c % VECTORS, table, groups[c]);
#endif
                else
                    weights[c] = NAME(load_weights)(from, c % VECTORS, bits, groups[c]);
            }
            UNROLL
            for (int r = 0; r < rows; r++) {
                V own = SPLAT(x[k * rows + r]);
                UNROLL
                for (int c = 0; c < vectors; c++)
                    sums[r][c] = FMA(own, weights[c], sums[r][c]);
            }
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int c = 0; c < vectors; c++)
            NAME(store_outputs)(job, row + r, tile * TILE + c * LANES, sums[r][c]);
}

/* The tile as float32 [inputs, TILE]. */
INLINE void NAME(dequantise)(const Matrix *m, size_t tile, float *plain, const int bits) {
    const uint8_t *numbers = m->numbers + tile * m->num_inputs * TILE * bits / 8;
    size_t unit = 0, end_of_unit = m->groups_of_unit;
    for (size_t k = 0, group = 0; k < m->num_inputs; group++) {
        size_t end = least(k + m->group_size, m->num_inputs);
        if (group == end_of_unit) {
            unit++;
            end_of_unit += m->groups_of_unit;
        }
        NAME(group) groups[VECTORS];
        for (int c = 0; c < VECTORS; c++)
            groups[c] = NAME(load_group)(m, tile, group, unit, c * LANES);
        for (; k < end; k++)
            UNROLL
            for (int c = 0; c < VECTORS; c++)
                AT(plain + k * TILE + c * LANES) =
                    NAME(load_weights)(numbers + k * TILE * bits / 8, c, bits, groups[c]);
    }
}

/* A function for each number of rows: registers are allocated best so. */
#define BLOCK(rows, form, tiles)                                                                   \
    TARGET static __attribute__((noinline)) void NAME(block_##form##_##rows##_##tiles)(            \
        const Job *job, size_t tile, const float *plain, const float *x, size_t row) {             \
        NAME(block)(job, tile, plain, x, row, rows, form, tiles);                                  \
    }
#ifdef LOOKUP
#define BLOCKS(rows, tiles)                                                                        \
    BLOCK(rows, NIBBLES, tiles) BLOCK(rows, CENTRED, tiles)                                        \
    BLOCK(rows, BYTES, tiles) BLOCK(rows, FLOATS, tiles)
#define ENTRY(rows, tiles)                                                                         \
    {NAME(block_NIBBLES_##rows##_##tiles), NAME(block_CENTRED_##rows##_##tiles),                   \
     NAME(block_BYTES_##rows##_##tiles), NAME(block_FLOATS_##rows##_##tiles)}
#else
#define BLOCKS(rows, tiles)                                                                        \
    BLOCK(rows, NIBBLES, tiles) BLOCK(rows, BYTES, tiles) BLOCK(rows, FLOATS, tiles)
#define ENTRY(rows, tiles)                                                                         \
    {NAME(block_NIBBLES_##rows##_##tiles), NAME(block_NIBBLES_##rows##_##tiles),                   \
     NAME(block_BYTES_##rows##_##tiles), NAME(block_FLOATS_##rows##_##tiles)}
#endif
BLOCKS(1, 1)
#if ROWS > 1
BLOCKS(2, 1) BLOCKS(3, 1)
#endif
#if ROWS > 3
BLOCKS(4, 1) BLOCKS(5, 1) BLOCKS(6, 1) BLOCKS(7, 1) BLOCKS(8, 1)
BLOCKS(9, 1) BLOCKS(10, 1) BLOCKS(11, 1) BLOCKS(12, 1)
#endif
static const Block NAME(blocks)[ROWS][4] = {
    ENTRY(1, 1),
#if ROWS > 1
    ENTRY(2, 1), ENTRY(3, 1),
#endif
#if ROWS > 3
    ENTRY(4, 1), ENTRY(5, 1), ENTRY(6, 1), ENTRY(7, 1), ENTRY(8, 1),
    ENTRY(9, 1), ENTRY(10, 1), ENTRY(11, 1), ENTRY(12, 1),
#endif
};
#if PAIRED_ROWS
BLOCKS(1, 2) BLOCKS(2, 2)
static const Block NAME(pairs)[PAIRED_ROWS][4] = {ENTRY(1, 2), ENTRY(2, 2)};
#endif

/* All rows times the tiles from `tile` to `end`. */
TARGET static void NAME(multiply)(const void *argument, size_t tile, size_t end, unsigned thread) {
    const Job *job = argument;
    const Matrix *m = &job->matrix;
    float *plain = job->plain ? job->plain + thread * m->num_inputs * TILE : NULL;
    const int form = plain ? 3 : m->bits == 8 ? 2 : !m->zeros; /* in the order of ENTRY */
#if PAIRED_ROWS
    if (job->num_rows <= PAIRED_ROWS && job->num_blocks == 1)
        for (; tile + 1 < end; tile += 2)
            NAME(pairs)[job->num_rows - 1][form](job, tile, NULL, job->x, 0);
#endif
    for (; tile < end; tile++) {
        if (plain && m->bits == 8)
            NAME(dequantise)(m, tile, plain, 8);
        else if (plain)
            NAME(dequantise)(m, tile, plain, 4);
        const float *x = job->x;
        for (size_t row = 0, number = 0; row < job->num_rows; number++) {
            size_t rows = rows_of_block(job, number);
            NAME(blocks)[rows - 1][form](job, tile, plain, x, row);
            x += rows * m->num_inputs;
            row += rows;
        }
    }
}

static const Kernel NAME(kernel) = {NAME(multiply), ROWS};

#undef VECTORS
#undef MOST_VECTORS
#undef BLOCK
#undef BLOCKS
#undef ENTRY
#undef WIDE_BYTES
#undef WIDE_HALVES
#undef LOOKUP
#undef ROWS
#undef PAIRED_ROWS
