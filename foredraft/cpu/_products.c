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

typedef struct {
    const float *x, *weight, *bias; /* bias may be NULL */
    float *out;
    size_t num_rows, num_inputs, num_outputs, outputs_at_once;
    void (*multiply)(const void *, size_t, size_t);
    atomic_size_t next;
} Job;

#if defined(__x86_64__)
#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#define LANES 16
#define FMA(a, b, c) ((NAME(floats))_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define QUARTER(wide, i) ((Quarter)_mm512_extractf32x4_ps((__m512)(wide)[0], i))
#define MOST_ROWS 8
#define OUTPUTS(rows)                                                                              \
    ((rows) <= 3 ? 8 : (rows) == 4 ? 6 : (rows) == 5 ? 5 : (rows) == 6 ? 4 : 3)
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

static void (*const kernels[NUM_ISAS])(const void *, size_t, size_t) = {
#if defined(__x86_64__)
    multiply_avx512,
    multiply_avx2,
#else
    NULL,
    NULL,
#endif
    multiply_portable,
};

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
    Job job = {
        .x = (const float *)(uintptr_t)numbers[0],
        .weight = (const float *)(uintptr_t)numbers[1],
        .bias = (const float *)(uintptr_t)numbers[2],
        .out = (float *)(uintptr_t)numbers[3],
        .num_rows = num_rows,
        .num_inputs = num_inputs,
        .num_outputs = num_outputs,
        .multiply = kernels[isas[kernel]],
    };
    size_t row_bytes = job.num_inputs * sizeof(float);
    if (!num_threads)
        num_threads = job.num_outputs * row_bytes < LEAST_BYTES ? 1 : pool_num_threads();
    /* A multiple of every number of outputs that a block has. */
    job.outputs_at_once = (CHUNK_BYTES / row_bytes / 24 + 1) * 24;
    Py_BEGIN_ALLOW_THREADS
    pool_run(work, &job, (unsigned)num_threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyMethodDef product_methods[] = {
    {"multiply", (PyCFunction)(void (*)(void))multiply, METH_FASTCALL,
     "See products.py; addresses and sizes are trusted."},
    {NULL, NULL, 0, NULL},
};
