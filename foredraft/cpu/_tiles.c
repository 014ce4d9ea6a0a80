/* Products of float32 rows with weights of 8 or 4 bits on a CPU; see layers/quantized_cpu.py.
 *
 * A matrix lies in tiles of TILE outputs, each [inputs, TILE], so that a vector has one input of
 * several outputs, and weights are read from the first byte to the last.
 */
/* As fast as with -O3, which takes over three times as long to compile the blocks, into over three
 * times as many bytes. */
#ifdef __OPTIMIZE__
#pragma GCC optimize("O2")
#endif
#include "_kernels.h"
#include "_share.h"

#include <stdlib.h>

#define LEAST_WEIGHTS 50000 /* for fewer a second thread comes too late, as in _products.c */
#define AHEAD 4096 /* bytes of numbers that are asked for early; the best of 1, 4 and 16 KiB */
#define MAGIC 8388608 /* 2^23 */
#define MAGIC_BITS 0x4b000000

/* Forms of a tile: 4 bits, 4 bits with one zero point for all, 8 bits, dequantised. */
#define NIBBLES 4
#define CENTRED 5
#define BYTES 8
#define FLOATS 32

enum { FLOAT32, FLOAT16, BFLOAT16, INT8 };

/* A float for each group of inputs of an output. */
typedef struct {
    const void *values;    /* [tiles, groups, 32] of the type */
    const uint16_t *units; /* float16 [tiles, unit groups, 32] that INT8 is multiplied by */
    int type;
} Factors;

typedef struct {
    const uint8_t *numbers; /* [tiles, inputs, 32 * bits / 8] */
    const uint8_t *zeros;   /* [tiles, groups, 32]; NULL where all are `zero` */
    Factors scales, offsets; /* offsets.values is NULL where all are zero */
    size_t num_outputs, num_inputs, num_groups, group_size, groups_of_unit, num_units;
    int bits, zero;
} Matrix;

typedef struct {
    Matrix matrix;
    const float *x; /* blocks of rows, each [inputs, rows of the block] */
    const float *bias;
    float *out; /* [num_rows, num_outputs] */
    float *plain; /* [threads, inputs, TILE], dequantised tiles; NULL for weights in registers */
    size_t num_rows, num_blocks;
} Job;

typedef struct {
    Items multiply; /* an item is a tile */
    size_t most_rows; /* of a block */
} Kernel;

typedef void (*Block)(const Job *, size_t tile, const float *plain, const float *x, size_t row);

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* Blocks share the rows as equally as they can. */
static inline size_t rows_of_block(const Job *job, size_t number) {
    return job->num_rows / job->num_blocks + (number < job->num_rows % job->num_blocks);
}

#define KERNEL "_tiles_kernel.h"
#include "_each_isa.h"

static const Kernel *const kernels[NUM_ISAS] = BY_ISA(&kernel);

static void pack_rows(const Job *job, const float *x, float *packed) {
    size_t num_inputs = job->matrix.num_inputs;
    for (size_t number = 0; number < job->num_blocks; number++) {
        size_t rows = rows_of_block(job, number);
        for (size_t k = 0; k < num_inputs; k++)
            for (size_t r = 0; r < rows; r++)
                packed[k * rows + r] = x[r * num_inputs + k];
        x += rows * num_inputs;
        packed += rows * num_inputs;
    }
}

static PyObject *multiply_tiles(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    long long n[19];
    if (!read_numbers("multiply_tiles", args, count, n, 19) || !kernel_exists(n[18]))
        return NULL;
    const long long num_rows = n[11], num_inputs = n[12], num_outputs = n[13];
    const long long group_size = n[14], unit_size = n[15], bits = n[16];
    if ((bits != 4 && bits != 8) || group_size < 1 || unit_size < 0 || unit_size % group_size
        || num_rows < 1 || num_inputs < 1 || num_outputs < 1)
        return PyErr_Format(PyExc_ValueError, "multiply_tiles: a number is out of its range");
    Job job = {
        .matrix = {
            .numbers = (const uint8_t *)(uintptr_t)n[3],
            .zeros = (const uint8_t *)(uintptr_t)n[4],
            .scales = {(const void *)(uintptr_t)n[5], (const uint16_t *)(uintptr_t)n[6], (int)n[7]},
            .offsets = {(const void *)(uintptr_t)n[8], (const uint16_t *)(uintptr_t)n[9],
                        (int)n[10]},
            .num_outputs = num_outputs,
            .num_inputs = num_inputs,
            .num_groups = (num_inputs + group_size - 1) / group_size,
            .group_size = group_size,
            .groups_of_unit = unit_size / group_size,
            .num_units = unit_size ? (num_inputs + unit_size - 1) / unit_size : 0,
            .bits = (int)bits,
            .zero = (int)n[17],
        },
        .x = (const float *)(uintptr_t)n[0],
        .bias = (const float *)(uintptr_t)n[2],
        .out = (float *)(uintptr_t)n[1],
        .num_rows = num_rows,
    };
    const Kernel *kernel = kernels[isas[n[18]]];
    const size_t num_tiles = (num_outputs + TILE - 1) / TILE, tile_size = num_inputs * TILE;
    const int is_little = num_tiles * tile_size < LEAST_WEIGHTS;
    const unsigned num_threads = is_little ? 1 : pool_num_threads();
    const size_t share = num_tiles / (num_threads * 8);
    job.num_blocks = (job.num_rows + kernel->most_rows - 1) / kernel->most_rows;
    float *packed = NULL;
    Py_BEGIN_ALLOW_THREADS
    if (job.num_blocks > 2) /* where there is no memory, weights are computed in registers */
        job.plain = malloc(num_threads * tile_size * sizeof(float));
    if (num_rows > 1 && kernel->most_rows > 1) {
        packed = malloc(job.num_rows * num_inputs * sizeof(float));
        if (packed) {
            pack_rows(&job, job.x, packed);
            job.x = packed;
        } else { /* one row at a time, which has the same bits */
            job.num_blocks = job.num_rows;
        }
    }
    share_out(kernel->multiply, &job, num_tiles, share ? share : 1, num_threads);
    free(packed);
    free(job.plain);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyMethodDef tile_methods[] = {
    {"multiply_tiles", (PyCFunction)(void (*)(void))multiply_tiles, METH_FASTCALL,
     "See layers/quantized_cpu.py; addresses and sizes are trusted."},
    {NULL, NULL, 0, NULL},
};
