/* The product for one width of vector; included once for each, with these defined, which it takes
 * back at its end:
 *
 * NAME(x)           x with the instruction set's name behind it
 * TARGET            attribute of functions that use its instructions
 * LANES             floats of a vector
 * FMA(a,b,c)        a * b + c by lane, rounded once (twice where the CPU has no such instruction)
 * QUARTER(wide,i)   lanes 4 i to 4 i + 3 of 16 lanes, which lie in 16 / LANES vectors
 * MOST_ROWS         most rows of a block
 * OUTPUTS(rows)     outputs of a block of so many rows, as many as registers hold sums of
 *
 * An output has 16 sums: the inputs k with k % 16 = lane make one chain sum = fma(x[k], weight[k],
 * sum) from the first to the last, zeros after the last input included. Then the upper half of the
 * sums is added to the lower until one is left, and the bias to that. So its bits depend neither on
 * the rows and outputs beside it nor on LANES nor on threads.
 */
#ifndef FOREDRAFT_CPU_PRODUCTS_QUARTER
#define FOREDRAFT_CPU_PRODUCTS_QUARTER
typedef float Quarter __attribute__((vector_size(16)));
#endif

typedef float NAME(floats) __attribute__((vector_size(4 * LANES)));
/* In memory, at any address that suits floats. */
typedef float NAME(stored) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define V NAME(floats)
#define AT(p) (*(const NAME(stored) *)(p))
#define VECTORS (WIDE / LANES)
#define INLINE static inline __attribute__((always_inline)) TARGET
#define UNROLL _Pragma("GCC unroll 16")

INLINE float NAME(total)(const V *sums) {
    Quarter four = (QUARTER(sums, 0) + QUARTER(sums, 2)) + (QUARTER(sums, 1) + QUARTER(sums, 3));
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* Adds 16 inputs to the sums of a block. Strides are in floats. */
INLINE void NAME(add)(V sums[][OUTPUTS(1)][VECTORS], const float *x, size_t x_stride,
                      const float *weight, size_t weight_stride, const int rows,
                      const int outputs) {
    UNROLL
    for (int v = 0; v < VECTORS; v++) {
        if (rows <= outputs) { /* the fewer vectors stay in registers, the others pass by */
            V own[MOST_ROWS];
            UNROLL
            for (int r = 0; r < rows; r++)
                own[r] = AT(x + r * x_stride + v * LANES);
            UNROLL
            for (int o = 0; o < outputs; o++) {
                V other = AT(weight + o * weight_stride + v * LANES);
                UNROLL
                for (int r = 0; r < rows; r++)
                    sums[r][o][v] = FMA(own[r], other, sums[r][o][v]);
            }
        } else {
            V own[OUTPUTS(1)];
            UNROLL
            for (int o = 0; o < outputs; o++)
                own[o] = AT(weight + o * weight_stride + v * LANES);
            UNROLL
            for (int r = 0; r < rows; r++) {
                V other = AT(x + r * x_stride + v * LANES);
                UNROLL
                for (int o = 0; o < outputs; o++)
                    sums[r][o][v] = FMA(other, own[o], sums[r][o][v]);
            }
        }
    }
}

/* `rows` rows times `outputs` outputs; both numbers are constants wherever this is called. */
INLINE void NAME(block)(const Job *job, size_t row, size_t output, const int rows,
                        const int outputs) {
    const size_t num_inputs = job->num_inputs;
    const float *x = job->x + row * num_inputs, *weight = job->weight + output * num_inputs;
    V sums[MOST_ROWS][OUTPUTS(1)][VECTORS];
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int o = 0; o < outputs; o++)
            UNROLL
            for (int v = 0; v < VECTORS; v++)
                sums[r][o][v] = (V){};
    size_t k = 0;
    for (; k + WIDE <= num_inputs; k += WIDE)
        NAME(add)(sums, x + k, num_inputs, weight + k, num_inputs, rows, outputs);
    if (k < num_inputs) {
        float last_x[MOST_ROWS * WIDE] = {0}, last_weight[OUTPUTS(1) * WIDE] = {0};
        for (int r = 0; r < rows; r++)
            memcpy(last_x + r * WIDE, x + r * num_inputs + k, (num_inputs - k) * sizeof(float));
        for (int o = 0; o < outputs; o++)
            memcpy(last_weight + o * WIDE, weight + o * num_inputs + k,
                   (num_inputs - k) * sizeof(float));
        NAME(add)(sums, last_x, WIDE, last_weight, WIDE, rows, outputs);
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int o = 0; o < outputs; o++) {
            float sum = NAME(total)(sums[r][o]);
            job->out[(row + r) * job->num_outputs + output + o] =
                job->bias ? sum + job->bias[output + o] : sum;
        }
}

/* A function for each number of rows: registers are allocated best so. */
#define BLOCK(rows)                                                                                \
    TARGET static __attribute__((noinline)) void NAME(block_##rows)(                               \
        const Job *job, size_t row, size_t output, size_t end) {                                   \
        for (; output + OUTPUTS(rows) <= end; output += OUTPUTS(rows))                             \
            NAME(block)(job, row, output, rows, OUTPUTS(rows));                                    \
        for (; output < end; output++)                                                             \
            NAME(block)(job, row, output, rows, 1);                                                \
    }
BLOCK(1) BLOCK(2) BLOCK(3)
#if MOST_ROWS > 3
BLOCK(4) BLOCK(5) BLOCK(6) BLOCK(7) BLOCK(8)
#endif
static void (*const NAME(blocks)[])(const Job *, size_t, size_t, size_t) = {
    NAME(block_1), NAME(block_2), NAME(block_3),
#if MOST_ROWS > 3
    NAME(block_4), NAME(block_5), NAME(block_6), NAME(block_7), NAME(block_8),
#endif
};

/* All rows times some outputs. Blocks share the rows as equally as they can. */
TARGET static void NAME(multiply)(const void *argument, size_t first, size_t end) {
    const Job *job = argument;
    size_t num_blocks = (job->num_rows + MOST_ROWS - 1) / MOST_ROWS;
    for (size_t row = 0, number = 0; number < num_blocks; number++) {
        size_t rows = job->num_rows / num_blocks + (number < job->num_rows % num_blocks);
        NAME(blocks)[rows - 1](job, row, first, end);
        row += rows;
    }
}

#undef V
#undef AT
#undef VECTORS
#undef INLINE
#undef UNROLL
#undef BLOCK
#undef NAME
#undef TARGET
#undef LANES
#undef FMA
#undef QUARTER
#undef MOST_ROWS
#undef OUTPUTS
