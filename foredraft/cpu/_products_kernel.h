/* The product for one width of vector; see _vector.h. It has beside its names:
 *
 * QUARTER(wide,i)   lanes 4 i to 4 i + 3 of 16 lanes, which lie in PARTS vectors
 * MOST_ROWS         most rows of a block
 * OUTPUTS(rows)     outputs of a block of so many rows, as many as registers hold sums of
 *
 * An output has 16 sums: the inputs k with k % 16 = lane make one chain sum = fma(x[k], weight[k],
 * sum) from the first to the last, zeros after the last input included. Then the upper half of the
 * sums is added to the lower until one is left, and the bias to that. So its bits depend neither on
 * the rows and outputs beside it nor on LANES nor on threads.
 */
#if LANES == 16
#define QUARTER(wide, i) ((Quarter)_mm512_extractf32x4_ps((__m512)(wide)[0], i))
#define MOST_ROWS 6
#define OUTPUTS(rows) ((rows) <= 3 ? 8 : (rows) == 4 ? 6 : 4)
#else
#if LANES == 8
#define QUARTER(wide, i) ((Quarter)_mm256_extractf128_ps((__m256)(wide)[(i) / 2], (i) % 2))
#else
#define QUARTER(wide, i) ((wide)[i])
#endif
#define MOST_ROWS 3
#define OUTPUTS(rows) ((rows) == 1 ? 4 : (rows) == 2 ? 3 : 2)
#endif

/* The four sums that 16 come to in two steps. */
INLINE Quarter NAME(four)(const V *sums) {
    return (QUARTER(sums, 0) + QUARTER(sums, 2)) + (QUARTER(sums, 1) + QUARTER(sums, 3));
}

/* Adds 16 inputs to the sums of a block: x is [rows, 16], of weights each output's are `stride`
 * floats after the last one's. */
INLINE void NAME(add)(V sums[][OUTPUTS(1)][PARTS], const float *x, const float *weight,
                      size_t stride, const int rows, const int outputs) {
    UNROLL
    for (int v = 0; v < PARTS; v++) {
        V own[MOST_ROWS];
        UNROLL
        for (int r = 0; r < rows; r++)
            own[r] = FROM(x + r * WIDE + v * LANES);
        UNROLL
        for (int o = 0; o < outputs; o++) {
            V other = FROM(weight + o * stride + v * LANES);
            UNROLL
            for (int r = 0; r < rows; r++)
                sums[r][o][v] = FMA(own[r], other, sums[r][o][v]);
        }
    }
}

/* `rows` rows, packed [inputs / 16, rows, 16], times `outputs` outputs; both numbers are constants
 * wherever this is called. */
INLINE void NAME(block)(const Job *job, const float *x, size_t row, size_t output, const int rows,
                        const int outputs) {
    const size_t num_inputs = job->num_inputs;
    const float *weight = job->weight + output * num_inputs;
    V sums[MOST_ROWS][OUTPUTS(1)][PARTS];
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int o = 0; o < outputs; o++)
            UNROLL
            for (int v = 0; v < PARTS; v++)
                sums[r][o][v] = (V){};
    size_t k = 0;
    for (; k + WIDE <= num_inputs; k += WIDE) {
        /* The next block: while sums are added up nothing else would be read. */
        UNROLL
        for (int o = 0; o < outputs; o++)
            __builtin_prefetch(weight + (outputs + o) * num_inputs + k, 0, 2);
        NAME(add)(sums, x + k * rows, weight + k, num_inputs, rows, outputs);
    }
    if (k < num_inputs) {
        float last[OUTPUTS(1) * WIDE] = {0};
        for (int o = 0; o < outputs; o++)
            memcpy(last + o * WIDE, weight + o * num_inputs + k,
                   (num_inputs - k) * sizeof(float));
        NAME(add)(sums, x + k * rows, last, WIDE, rows, outputs);
    }
    const float *bias = job->bias ? job->bias + output : NULL;
    UNROLL
    for (int r = 0; r < rows; r++) {
        float *out = job->out + (row + r) * job->num_outputs + output;
        int o = 0;
        UNROLL
        for (; o + 4 <= outputs; o += 4) {
            Quarter four = add_across(NAME(four)(sums[r][o]), NAME(four)(sums[r][o + 1]),
                                      NAME(four)(sums[r][o + 2]), NAME(four)(sums[r][o + 3]));
            *(StoredQuarter *)(out + o) = bias ? four + *(const StoredQuarter *)(bias + o) : four;
        }
        UNROLL
        for (; o < outputs; o++) {
            Quarter four = NAME(four)(sums[r][o]);
            float sum = (four[0] + four[2]) + (four[1] + four[3]);
            out[o] = bias ? sum + bias[o] : sum;
        }
    }
}

/* A function for each number of rows: registers are allocated best so. */
#define BLOCK(rows)                                                                                \
    TARGET static __attribute__((noinline)) void NAME(block_##rows)(                               \
        const Job *job, const float *x, size_t row, size_t output, size_t end) {                   \
        for (; output + OUTPUTS(rows) <= end; output += OUTPUTS(rows))                             \
            NAME(block)(job, x, row, output, rows, OUTPUTS(rows));                                 \
        for (; output < end; output++)                                                             \
            NAME(block)(job, x, row, output, rows, 1);                                             \
    }
BLOCK(1) BLOCK(2) BLOCK(3)
#if MOST_ROWS > 3
BLOCK(4) BLOCK(5) BLOCK(6)
#endif
static void (*const NAME(blocks)[])(const Job *, const float *, size_t, size_t,
                                          size_t) = {
    NAME(block_1), NAME(block_2), NAME(block_3),
#if MOST_ROWS > 3
    NAME(block_4), NAME(block_5), NAME(block_6),
#endif
};

/* All rows times some outputs. */
TARGET static void NAME(multiply)(const void *argument, size_t first, size_t end, unsigned thread) {
    const Job *job = argument;
    const float *x = job->packed;
    (void)thread;
    for (size_t row = 0, number = 0; number < job->num_blocks; number++) {
        size_t rows = rows_of_block(job, number);
        NAME(blocks)[rows - 1](job, x, row, first, end);
        x += rows * job->num_wide * WIDE;
        row += rows;
    }
}

static const Kernel NAME(kernel) = {NAME(multiply), MOST_ROWS};

#undef QUARTER
#undef MOST_ROWS
#undef OUTPUTS
#undef BLOCK
