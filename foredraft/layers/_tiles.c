/* Products of float32 rows with weights of 8 or 4 bits on a CPU; see quantized_cpu.py.
 *
 * A matrix lies in tiles of 32 outputs, each [inputs, 32], so that a vector has one input of
 * several outputs, and weights are read from the first byte to the last. Tiles are shared out to
 * the threads of foredraft.cpu._kernels.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "../cpu/_pool.h"

#define TILE 32
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

typedef struct Job Job;
struct Job {
    Matrix matrix;
    const float *x; /* blocks of rows, each [inputs, rows of the block] */
    const float *bias;
    float *out; /* [num_rows, num_outputs] */
    size_t num_rows, num_blocks, num_tiles, tiles_at_once;
    void (*tiles)(const Job *, size_t, size_t, float *);
    int dequantises;
    atomic_size_t next;
};

typedef void (*Block)(const Job *, size_t tile, const float *plain, const float *x, size_t row);

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* Blocks share the rows as equally as they can. */
static inline size_t rows_of_block(const Job *job, size_t number) {
    return job->num_rows / job->num_blocks + (number < job->num_rows % job->num_blocks);
}

#if defined(__x86_64__)
#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma")))
#define LANES 16
#define FMA(a, b, c) ((NAME(floats))_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define SPLAT(a) _mm512_set1_ps(a)
#define WIDE_BYTES(p) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define WIDE_HALVES(p) _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p)))
#define LOOKUP(i, t) ((NAME(floats))_mm512_permutexvar_ps((__m512i)(i), (__m512)(t)))
#define ROWS 12
#define PAIRED_ROWS 2
#include "_tiles_kernel.h"

#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define FMA(a, b, c) ((NAME(floats))_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define SPLAT(a) _mm256_set1_ps(a)
#define WIDE_BYTES(p) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p)))
#define WIDE_HALVES(p) _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define ROWS 3
#define PAIRED_ROWS 0
#include "_tiles_kernel.h"
#endif

typedef uint8_t Bytes __attribute__((vector_size(4), aligned(1), may_alias));
typedef uint16_t Halves __attribute__((vector_size(8), aligned(2), may_alias));
typedef int32_t Words __attribute__((vector_size(16)));

#define NAME(x) x##_portable
#define TARGET
#define LANES 4
#define SPLAT(a) ((NAME(floats)){a, a, a, a})
#define WIDE_BYTES(p) __builtin_convertvector(*(const Bytes *)(p), Words)
#define WIDE_HALVES(p) __builtin_convertvector(*(const Halves *)(p), Words)
#if defined(__ARM_NEON)
#define FMA(a, b, c) ((NAME(floats))vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#define ROWS 3
#else
#define FMA(a, b, c) ((c) + (a) * (b))
#define ROWS 1
#endif
#define PAIRED_ROWS 0
enum { PORTABLE_ROWS = ROWS };
#include "_tiles_kernel.h"

typedef struct {
    const char *name;
    void (*tiles)(const Job *, size_t, size_t, float *);
    size_t most_rows;
} Kernel;

static Kernel kernels[3]; /* those that this CPU can run, the fastest first */
static int num_kernels;

static void find_kernels(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl"))
        kernels[num_kernels++] = (Kernel){"avx512", multiply_avx512, 12};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        kernels[num_kernels++] = (Kernel){"avx2", multiply_avx2, 3};
#endif
    kernels[num_kernels++] = (Kernel){"portable", multiply_portable, PORTABLE_ROWS};
}

static void work(void *argument) {
    Job *job = argument;
    float *plain = NULL;
    if (job->dequantises) /* without memory for it each block of rows does so in registers */
        plain = malloc(job->matrix.num_inputs * TILE * sizeof(float));
    for (;;) {
        size_t first = atomic_fetch_add(&job->next, job->tiles_at_once);
        if (first >= job->num_tiles)
            break;
        job->tiles(job, first, least(first + job->tiles_at_once, job->num_tiles), plain);
    }
    free(plain);
}

typedef void (*Run)(void (*)(void *), void *, unsigned);
static Run run; /* pool_run */

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

static PyObject *multiply(PyObject *self, PyObject *args) {
    unsigned long long x, out, bias, numbers, zeros, scales, scale_units, offsets, offset_units;
    Py_ssize_t num_rows, num_inputs, num_outputs, group_size, unit_size;
    int bits, zero, scale_type, offset_type, kernel;
    unsigned num_threads;
    if (!PyArg_ParseTuple(args, "KKKKK(KKi)(KKi)nnnnniiIi:multiply", &x, &out, &bias, &numbers,
                          &zeros, &scales, &scale_units, &scale_type, &offsets, &offset_units,
                          &offset_type, &num_rows, &num_inputs, &num_outputs, &group_size,
                          &unit_size, &bits, &zero, &num_threads, &kernel))
        return NULL;
    if (kernel < 0 || kernel >= num_kernels || (bits != 4 && bits != 8) || group_size < 1
        || unit_size % group_size || num_rows < 1 || num_inputs < 1 || num_outputs < 1)
        return PyErr_Format(PyExc_ValueError, "multiply: a number is out of its range");
    Job job = {
        .matrix = {
            .numbers = (const uint8_t *)numbers,
            .zeros = (const uint8_t *)zeros,
            .scales = {(const void *)scales, (const uint16_t *)scale_units, scale_type},
            .offsets = {(const void *)offsets, (const uint16_t *)offset_units, offset_type},
            .num_outputs = num_outputs,
            .num_inputs = num_inputs,
            .num_groups = (num_inputs + group_size - 1) / group_size,
            .group_size = group_size,
            .groups_of_unit = unit_size / group_size,
            .num_units = unit_size ? (num_inputs + unit_size - 1) / unit_size : 0,
            .bits = bits,
            .zero = zero,
        },
        .x = (const float *)x,
        .bias = (const float *)bias,
        .out = (float *)out,
        .num_rows = num_rows,
        .num_tiles = (num_outputs + TILE - 1) / TILE,
        .tiles = kernels[kernel].tiles,
    };
    size_t most_rows = kernels[kernel].most_rows;
    job.num_blocks = (job.num_rows + most_rows - 1) / most_rows;
    job.dequantises = job.num_blocks > 2;
    if (job.num_tiles * TILE * job.matrix.num_inputs < LEAST_WEIGHTS)
        num_threads = 1;
    size_t share = job.num_tiles / (num_threads * 8);
    job.tiles_at_once = share ? share : 1;
    Py_BEGIN_ALLOW_THREADS
    float *packed = NULL;
    if (num_rows > 1 && most_rows > 1) {
        packed = malloc(job.num_rows * job.matrix.num_inputs * sizeof(float));
        if (packed) {
            pack_rows(&job, job.x, packed);
            job.x = packed;
        } else { /* one row at a time, which has the same bits */
            job.num_blocks = job.num_rows;
        }
    }
    run(work, &job, num_threads);
    free(packed);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"multiply", multiply, METH_VARARGS, "See quantized_cpu.py; addresses and sizes are trusted."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_tiles", "Products with weights of 8 or 4 bits.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__tiles(void) {
    PyObject *self = PyModule_Create(&module);
    if (!self)
        return NULL;
    find_kernels();
    /* PyCapsule_Import finds a module in a package only after it was imported. */
    PyObject *pool = PyImport_ImportModule(POOL_MODULE);
    run = pool ? (Run)PyCapsule_Import(POOL_RUN, 0) : NULL;
    Py_XDECREF(pool);
    if (!run) {
        Py_DECREF(self);
        return NULL;
    }
    PyObject *names = PyTuple_New(num_kernels);
    for (int i = 0; names && i < num_kernels; i++)
        PyTuple_SET_ITEM(names, i, PyUnicode_FromString(kernels[i].name));
    if (!names || PyModule_AddObject(self, "KERNELS", names) < 0
        || PyModule_AddIntConstant(self, "TILE", TILE) < 0) {
        Py_XDECREF(names);
        Py_DECREF(self);
        return NULL;
    }
    return self;
}
