/* The product for one width of vector; included once for each, with these defined, which it takes
 * back at its end:
 *
 * NAME(x)     x with the instruction set's name behind it
 * TARGET      attribute of functions that use its instructions
 * LANES       floats of a vector
 * FMA(a,b,c)  a * b + c by lane, rounded once (twice where the CPU has no such instruction)
 * SPLAT(a)    a in each lane
 * WIDE_BYTES(p), WIDE_HALVES(p)  LANES integers of 8 or 16 bits from p on, without a sign, as int32
 * ROWS        most rows of x whose sums stay in registers beside a tile's vectors
 *
 * Every output is one chain: sum = fma(x[k], weight[k], sum) for k from 0 on, a weight being
 * (number - zero) * scale in float32. So its bits depend neither on the rows beside it nor on
 * LANES nor on threads.
 */
typedef float NAME(floats) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(ints) __attribute__((vector_size(4 * LANES)));
/* In memory, at any address that suits floats. */
typedef float NAME(stored) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define V NAME(floats)
#define I NAME(ints)
#define AT(p) (*(NAME(stored) *)(p))
#define VECTORS (TILE / LANES)
#define INLINE static inline __attribute__((always_inline)) TARGET

INLINE V NAME(from_float16)(I half) {
    /* Exact for all finite numbers: the exponent's bias is brought over by a multiplication. */
    I magnitude = (half & 0x7fff) << 13, sign = (half & 0x8000) << 16;
    V value = (V)magnitude * 0x1p112f;
    return (V)((I)value | sign);
}

INLINE V NAME(load_scales)(const Matrix *m, size_t at) {
    if (m->scale_type == FLOAT32)
        return AT((const float *)m->scales + at);
    I bits = (I)WIDE_HALVES((const uint16_t *)m->scales + at);
    return m->scale_type == BFLOAT16 ? (V)(bits << 16) : NAME(from_float16)(bits);
}

/* Zero points plus 2^23, whose float's lowest bits are an integer's. */
INLINE V NAME(load_zeros)(const Matrix *m, size_t at) {
    if (!m->zeros)
        return (V)SPLAT(MAGIC + (1 << (m->bits - 1)));
    I zeros = (I)WIDE_BYTES(m->zeros + at);
    return (V)(zeros | MAGIC_BITS);
}

/* The tile's vector `c` of numbers of one input, as floats plus 2^23. */
INLINE V NAME(load_numbers)(const uint8_t *numbers, int c, const int bits) {
    if (bits == 8) {
        I wide = (I)WIDE_BYTES(numbers + c * LANES);
        return (V)(wide | MAGIC_BITS);
    }
    /* The lower halves of 16 bytes are outputs 0 to 15, the upper ones 16 to 31. */
    I wide = (I)WIDE_BYTES(numbers + c * LANES % 16);
    I half = c * LANES < 16 ? (wide & 15) : (wide >> 4);
    return (V)(half | MAGIC_BITS);
}

INLINE void NAME(store)(const Job *job, size_t row, size_t output, V sum) {
    size_t num_outputs = job->matrix.num_outputs;
    float *out = job->out + row * num_outputs + output;
    if (output + LANES <= num_outputs) {
        AT(out) = job->bias ? sum + AT(job->bias + output) : sum;
        return;
    }
    float lanes[LANES];
    AT(lanes) = sum;
    for (size_t lane = 0; output + lane < num_outputs; lane++)
        out[lane] = job->bias ? lanes[lane] + job->bias[output + lane] : lanes[lane];
}

/* `rows` rows of x, packed [inputs, rows], times one tile; `bits` is 32 where `plain` has the tile
 * dequantised. Both numbers are constants wherever this is called. */
INLINE void NAME(block)(const Job *job, size_t tile, const float *plain, const float *x, size_t row,
                        const int rows, const int bits) {
    const Matrix *m = &job->matrix;
    const size_t num_inputs = m->num_inputs, stride = TILE * bits / 8;
    V sums[ROWS][VECTORS], scales[VECTORS], zeros[VECTORS];
    const uint8_t *numbers = bits == 32 ? (const uint8_t *)plain
                                        : m->numbers + tile * num_inputs * stride;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int c = 0; c < VECTORS; c++)
            sums[r][c] = (V){};
    size_t k = 0;
    for (size_t group = 0; k < num_inputs; group++) {
        size_t end = bits == 32 ? num_inputs : k + m->group_size;
        if (end > num_inputs)
            end = num_inputs;
        if (bits != 32)
#pragma GCC unroll 16
            for (int c = 0; c < VECTORS; c++) {
                size_t at = (tile * m->num_groups + group) * TILE + c * LANES;
                scales[c] = NAME(load_scales)(m, at);
                zeros[c] = NAME(load_zeros)(m, at);
            }
        for (; k < end; k++) {
            V weights[VECTORS];
#pragma GCC unroll 16
            for (int c = 0; c < VECTORS; c++) {
                const uint8_t *from = numbers + k * stride;
                if (bits == 32)
                    weights[c] = AT(from + c * LANES * 4);
                else
                    weights[c] = (NAME(load_numbers)(from, c, bits) - zeros[c]) * scales[c];
            }
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                V own = SPLAT(x[k * rows + r]);
#pragma GCC unroll 16
                for (int c = 0; c < VECTORS; c++)
                    sums[r][c] = FMA(own, weights[c], sums[r][c]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int c = 0; c < VECTORS; c++)
            NAME(store)(job, row + r, tile * TILE + c * LANES, sums[r][c]);
}

/* The tile as float32 [inputs, TILE]. */
INLINE void NAME(dequantise)(const Matrix *m, size_t tile, float *plain, const int bits) {
    const uint8_t *numbers = m->numbers + tile * m->num_inputs * TILE * bits / 8;
    for (size_t k = 0, group = 0; k < m->num_inputs; group++) {
        size_t end = k + m->group_size < m->num_inputs ? k + m->group_size : m->num_inputs;
        V scales[VECTORS], zeros[VECTORS];
        for (int c = 0; c < VECTORS; c++) {
            size_t at = (tile * m->num_groups + group) * TILE + c * LANES;
            scales[c] = NAME(load_scales)(m, at);
            zeros[c] = NAME(load_zeros)(m, at);
        }
        for (; k < end; k++)
#pragma GCC unroll 16
            for (int c = 0; c < VECTORS; c++)
                AT(plain + k * TILE + c * LANES) =
                    (NAME(load_numbers)(numbers + k * TILE * bits / 8, c, bits) - zeros[c])
                    * scales[c];
    }
}

/* A function for each number of rows: registers are allocated best so. */
#define BLOCK(rows, bits)                                                                          \
    TARGET static __attribute__((noinline)) void NAME(block_##bits##_##rows)(                      \
        const Job *job, size_t tile, const float *plain, const float *x, size_t row) {             \
        NAME(block)(job, tile, plain, x, row, rows, bits);                                      \
    }
#define BLOCKS(rows) BLOCK(rows, 4) BLOCK(rows, 8) BLOCK(rows, 32)
#define ENTRY(rows) {NAME(block_4_##rows), NAME(block_8_##rows), NAME(block_32_##rows)}
BLOCKS(1)
#if ROWS > 1
BLOCKS(2) BLOCKS(3)
#endif
#if ROWS > 3
BLOCKS(4) BLOCKS(5) BLOCKS(6) BLOCKS(7) BLOCKS(8) BLOCKS(9) BLOCKS(10) BLOCKS(11) BLOCKS(12)
#endif
static const Block NAME(blocks)[ROWS][3] = {
    ENTRY(1),
#if ROWS > 1
    ENTRY(2), ENTRY(3),
#endif
#if ROWS > 3
    ENTRY(4), ENTRY(5), ENTRY(6), ENTRY(7), ENTRY(8), ENTRY(9), ENTRY(10), ENTRY(11), ENTRY(12),
#endif
};

/* All rows times one tile. */
TARGET static void NAME(multiply)(const Job *job, size_t tile, float *plain) {
    const Matrix *m = &job->matrix;
    if (plain && m->bits == 8)
        NAME(dequantise)(m, tile, plain, 8);
    else if (plain)
        NAME(dequantise)(m, tile, plain, 4);
    int kind = plain ? 2 : m->bits == 8;
    const float *x = job->x;
    for (size_t row = 0, number = 0; row < job->num_rows; number++) {
        size_t rows = rows_of_block(job, number);
        NAME(blocks)[rows - 1][kind](job, tile, plain, x, row);
        x += rows * m->num_inputs;
        row += rows;
    }
}

#undef V
#undef AT
#undef I
#undef VECTORS
#undef INLINE
#undef BLOCK
#undef BLOCKS
#undef ENTRY
#undef NAME
#undef TARGET
#undef LANES
#undef FMA
#undef SPLAT
#undef WIDE_BYTES
#undef WIDE_HALVES
#undef ROWS
