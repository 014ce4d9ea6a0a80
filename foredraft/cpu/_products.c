/* Products x W^T + b of float32 rows with plain weights [outputs, inputs]; see products.py. */
#include "_kernels.h"
#include "_share.h"

#include <stdlib.h>
#include <string.h>

#define WIDE 16 /* chains of sums of an output */
#define CHUNK_BYTES 32768 /* of weights that a thread takes at once */
#define LEAST_BYTES 200000 /* of weights; for fewer a second thread comes too late */

typedef struct {
    const float *weight, *bias; /* bias may be NULL */
    const float *packed; /* blocks of rows, each [num_wide, rows of the block, 16] */
    float *out;
    size_t num_rows, num_inputs, num_outputs, num_wide, num_blocks;
} Job;

typedef struct {
    Items multiply; /* an item is an output */
    size_t most_rows; /* of a block */
} Kernel;

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

#define KERNEL "_products_kernel.h"
#include "_each_isa.h"

static const Kernel *const kernels[NUM_ISAS] = BY_ISA(&kernel);

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

static PyObject *multiply(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    long long numbers[9];
    if (!read_numbers("multiply", args, count, numbers, 9) || !kernel_exists(numbers[8]))
        return NULL;
    long long num_rows = numbers[4], num_inputs = numbers[5], num_outputs = numbers[6];
    long long num_threads = numbers[7];
    if (num_rows < 0 || num_inputs < 1 || num_outputs < 1 || num_threads < 0)
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
    };
    const Kernel *kernel = kernels[isas[numbers[8]]];
    size_t row_bytes = job.num_inputs * sizeof(float);
    if (!num_threads)
        num_threads = job.num_outputs * row_bytes < LEAST_BYTES ? 1 : pool_num_threads();
    job.num_blocks = (job.num_rows + kernel->most_rows - 1) / kernel->most_rows;
    /* A multiple of every number of outputs that a block has. */
    size_t at_once = (CHUNK_BYTES / row_bytes / 24 + 1) * 24;
    float *packed = malloc(job.num_rows * job.num_wide * WIDE * sizeof(float) + 1);
    if (!packed)
        return PyErr_NoMemory();
    job.packed = packed;
    Py_BEGIN_ALLOW_THREADS
    pack(&job, x, packed);
    share_out(kernel->multiply, &job, job.num_outputs, at_once, (unsigned)num_threads);
    free(packed);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyMethodDef product_methods[] = {
    {"multiply", (PyCFunction)(void (*)(void))multiply, METH_FASTCALL,
     "See products.py; addresses and sizes are trusted."},
    {NULL, NULL, 0, NULL},
};
