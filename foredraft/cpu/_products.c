/* Products x W^T + b of float32 rows with plain weights [outputs, inputs]; see products.py. */
#include "_kernels.h"
#include "_pool.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define WIDE 16 /* chains of sums of an output */
#define CHUNK_BYTES 32768 /* of weights that a thread takes at once */
#define LEAST_BYTES 200000 /* of weights; for fewer a second thread comes too late */

typedef struct Job Job;
struct Job {
    const float *weight, *bias; /* bias may be NULL */
    const float *packed; /* blocks of rows, each [num_wide, rows of the block, 16] */
    float *out;
    size_t num_rows, num_inputs, num_outputs, num_wide, num_blocks, outputs_at_once;
    void (*multiply)(const Job *, size_t first, size_t end);
    atomic_size_t next;
};

/* Blocks share the rows as equally as they can. */
static inline size_t rows_of_block(const Job *job, size_t number) {
    return job->num_rows / job->num_blocks + (number < job->num_rows % job->num_blocks);
}

typedef float Quarter __attribute__((vector_size(16)));
typedef float StoredQuarter __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t Places __attribute__((vector_size(16)));

#if defined(__clang__) || __GNUC__ >= 12
#define CHOOSE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define CHOOSE(a, b, i, j, k, l) __builtin_shuffle(a, b, (Places){i, j, k, l})
#endif

/* (a[0] + a[2]) + (a[1] + a[3]), and so for b, c, d. */
static inline Quarter add_across(Quarter a, Quarter b, Quarter c, Quarter d) {
    Quarter ab = CHOOSE(a, b, 0, 1, 4, 5) + CHOOSE(a, b, 2, 3, 6, 7);
    Quarter cd = CHOOSE(c, d, 0, 1, 4, 5) + CHOOSE(c, d, 2, 3, 6, 7);
    return CHOOSE(ab, cd, 0, 2, 4, 6) + CHOOSE(ab, cd, 1, 3, 5, 7);
}

#if defined(__x86_64__)
#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#define LANES 16
#define FMA(a, b, c) ((NAME(floats))_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define QUARTER(wide, i) ((Quarter)_mm512_extractf32x4_ps((__m512)(wide)[0], i))
#define MOST_ROWS 6
#define OUTPUTS(rows) ((rows) <= 3 ? 8 : (rows) == 4 ? 6 : 4)
#include "_products_kernel.h"

#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define FMA(a, b, c) ((NAME(floats))_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define QUARTER(wide, i) ((Quarter)_mm256_extractf128_ps((__m256)(wide)[(i) / 2], (i) % 2))
#define MOST_ROWS 3
#define OUTPUTS(rows) ((rows) == 1 ? 4 : (rows) == 2 ? 3 : 2)
#include "_products_kernel.h"
#endif

#define NAME(x) x##_portable
#define TARGET
#define LANES 4
#if defined(__ARM_NEON)
#define FMA(a, b, c) ((NAME(floats))vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#else
#define FMA(a, b, c) ((c) + (a) * (b))
#endif
#define QUARTER(wide, i) ((wide)[i])
#define MOST_ROWS 3
#define OUTPUTS(rows) ((rows) == 1 ? 4 : (rows) == 2 ? 3 : 2)
#include "_products_kernel.h"

static const struct {
    void (*multiply)(const Job *, size_t, size_t);
    size_t most_rows;
} kernels[NUM_ISAS] = {
#if defined(__x86_64__)
    [AVX512] = {multiply_avx512, 6},
    [AVX2] = {multiply_avx2, 3},
#endif
    [PORTABLE] = {multiply_portable, 3},
};

/* Rows of a block side by side, in steps of 16 inputs: at strides of powers of two they would push
 * each other out of the cache. */
static void pack(const Job *job, const float *x, float *packed) {
    const size_t num_inputs = job->num_inputs;
    for (size_t number = 0; number < job->num_blocks; number++) {
        size_t rows = rows_of_block(job, number);
        for (size_t r = 0; r < rows; r++) {
            float *to = packed + r * WIDE;
            size_t k = 0;
            for (; k + WIDE <= num_inputs; k += WIDE, to += rows * WIDE)
                memcpy(to, x + k, WIDE * sizeof(float));
            if (k < num_inputs) {
                memset(to, 0, WIDE * sizeof(float));
                memcpy(to, x + k, (num_inputs - k) * sizeof(float));
            }
            x += num_inputs;
        }
        packed += rows * job->num_wide * WIDE;
    }
}

static void work(void *argument) {
    Job *job = argument;
    for (;;) {
        size_t first = atomic_fetch_add(&job->next, job->outputs_at_once);
        if (first >= job->num_outputs)
            break;
        size_t end = first + job->outputs_at_once;
        job->multiply(job, first, end < job->num_outputs ? end : job->num_outputs);
    }
}

static PyObject *multiply(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    long long numbers[9];
    if (!read_numbers("multiply", args, count, numbers, 9))
        return NULL;
    long long num_rows = numbers[4], num_inputs = numbers[5], num_outputs = numbers[6];
    long long num_threads = numbers[7], kernel = numbers[8];
    if (num_rows < 0 || num_inputs < 1 || num_outputs < 1 || num_threads < 0 || kernel < 0
        || kernel >= num_isas)
        return PyErr_Format(PyExc_ValueError, "multiply: a number is out of its range");
    const float *x = (const float *)(uintptr_t)numbers[0];
    Job job = {
        .weight = (const float *)(uintptr_t)numbers[1],
        .bias = (const float *)(uintptr_t)numbers[2],
        .out = (float *)(uintptr_t)numbers[3],
        .num_rows = num_rows,
        .num_inputs = num_inputs,
        .num_outputs = num_outputs,
        .num_wide = (num_inputs + WIDE - 1) / WIDE,
        .multiply = kernels[isas[kernel]].multiply,
    };
    size_t row_bytes = job.num_inputs * sizeof(float), most_rows = kernels[isas[kernel]].most_rows;
    if (!num_threads)
        num_threads = job.num_outputs * row_bytes < LEAST_BYTES ? 1 : pool_num_threads();
    job.num_blocks = (job.num_rows + most_rows - 1) / most_rows;
    /* A multiple of every number of outputs that a block has. */
    job.outputs_at_once = (CHUNK_BYTES / row_bytes / 24 + 1) * 24;
    float *packed = malloc(job.num_rows * job.num_wide * WIDE * sizeof(float) + 1);
    if (!packed)
        return PyErr_NoMemory();
    job.packed = packed;
    Py_BEGIN_ALLOW_THREADS
    pack(&job, x, packed);
    pool_run(work, &job, (unsigned)num_threads);
    free(packed);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyMethodDef product_methods[] = {
    {"multiply", (PyCFunction)(void (*)(void))multiply, METH_FASTCALL,
     "See products.py; addresses and sizes are trusted."},
    {NULL, NULL, 0, NULL},
};
