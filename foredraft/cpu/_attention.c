/* Attention of a step's rows over the paged cache; see attention/cpu.py.
 *
 * A line is a query head of a row. It sees keys in an order of their own, numbered from the first
 * key of its sequence on: the keys before the tail by their index, then those of the tail that the
 * row's mask has, one after another. So a row of a tree and the same row decoded alone have the
 * same keys under the same numbers, wherever these lie.
 *
 * Blocks of keys begin at multiples of BLOCK. A line's largest score, sum of weights and weighted
 * sum of values go from block to block; a sum of weights has 16 parts, one of the products of a
 * query and a key too, and values are added up key by key. This order depends on nothing but the
 * line's own keys, so neither do its bits.
 */
#include "_attention.h"
#include "_kernels.h"
#include "_share.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define STRIDE (BLOCK + 16) /* of a line's scores; `multiply` writes beyond the last key */
#define LEAST_PRODUCTS 500000 /* of numbers: 20 us, for which a second thread is worth its start */

typedef struct {
    const Row *rows;
    const Piece *pieces;
    const long long *slots;
    const float *queries, *keys, *values;
    float *out;
    size_t query_stride, out_stride, kv_head_stride, num_kv_heads, group, head_dim;
    size_t width; /* head_dim rounded up to 16 */
    size_t floats_each; /* memory of a thread */
    float *memory;
    const struct Kernels *kernels;
    float scale;
} Job;

typedef struct {
    const float *keys, *values;
} Heads;

typedef struct {
    size_t first, end; /* in a block */
} Range;

/* What a thread keeps of a piece's lines. */
typedef struct {
    float *queries, *sums; /* [lines, width], zeros after a head's last number */
    float *totals;         /* [lines, 16] */
    float *largest;        /* [lines] */
    float *scores;         /* [4, STRIDE] */
} Lines;

typedef void (*Tile)(const Job *, const Heads *, const long long *slots, const Range *, Lines *,
                     size_t line);

typedef struct Kernels {
    const Tile (*tiles)[2]; /* by lines, and by whether heads are whole numbers of 16 */
    void (*finish)(const Job *, const Lines *, float *out, size_t num_rows);
} Kernels;

#define KERNEL "_attention_kernel.h"
#include "_each_isa.h"

static const Kernels *const kernels[NUM_ISAS] = BY_ISA(&kernels);

static size_t floats_of(size_t lines, size_t width) {
    return lines * (2 * width + 16 + 1) + 4 * STRIDE + 16;
}

static Lines lines_in(float *memory, size_t lines, size_t width) {
    float *sums = memory + lines * width, *totals = sums + lines * width;
    return (Lines){memory, sums, totals, totals + lines * 16, totals + lines * 17};
}

static void begin_lines(const Job *job, const Piece *piece, size_t kv_head, Lines *state) {
    const size_t lines = piece->num_rows * job->group, width = job->width;
    for (size_t line = 0; line < lines; line++) {
        const float *from = job->queries
                            + (piece->first_row + line / job->group) * job->query_stride
                            + (kv_head * job->group + line % job->group) * job->head_dim;
        float *to = state->queries + line * width;
        memcpy(to, from, job->head_dim * sizeof(float));
        memset(to + job->head_dim, 0, (width - job->head_dim) * sizeof(float));
        state->largest[line] = -INFINITY;
    }
    memset(state->sums, 0, lines * width * sizeof(float));
    memset(state->totals, 0, lines * 16 * sizeof(float));
}

static Range range_of(const Row *row, long long block) {
    long long first = row->begin - block, end = row->end - block;
    return (Range){first > 0 ? first : 0, end < 0 ? 0 : end < BLOCK ? end : BLOCK};
}

static const long long *slots_of(const Job *job, const Row *row, long long block) {
    return job->slots
           + (block < row->own_from ? row->shared + block : row->own + block - row->own_from);
}

/* The number of lines from `line` on that a tile takes: as many as see the block's keys in the
 * same slots, and have keys in common. */
static int lines_together(const Job *job, const Row *rows, size_t line, size_t num_lines,
                          long long block, Range *ranges) {
    int count = 0, lines = 1;
    size_t first = 0, end = BLOCK;
    const long long *slots = slots_of(job, rows + line / job->group, block);
    for (; count < 4 && line + count < num_lines; count++) {
        const Row *row = rows + (line + count) / job->group;
        ranges[count] = range_of(row, block);
        first = ranges[count].first > first ? ranges[count].first : first;
        end = ranges[count].end < end ? ranges[count].end : end;
        if (count && (slots_of(job, row, block) != slots || first >= end))
            break;
    }
    while (lines * 2 <= count && job->kernels->tiles[lines * 2][0])
        lines *= 2;
    return lines;
}

static void compute_piece(const Job *job, const Piece *piece, size_t kv_head, Lines *state) {
    const Row *rows = job->rows + piece->first_row;
    const size_t lines = piece->num_rows * job->group, offset = kv_head * job->kv_head_stride;
    const Heads heads = {job->keys + offset, job->values + offset};
    const int is_whole = job->width == job->head_dim;
    long long begin = rows[0].begin, end = 0;
    for (long long row = 0; row < piece->num_rows; row++) {
        begin = rows[row].begin < begin ? rows[row].begin : begin;
        end = rows[row].end > end ? rows[row].end : end;
    }
    begin_lines(job, piece, kv_head, state);
    for (long long block = begin / BLOCK * BLOCK; block < end; block += BLOCK)
        for (size_t line = 0; line < lines;) {
            Range ranges[4];
            int count = lines_together(job, rows, line, lines, block, ranges);
            const long long *slots = slots_of(job, rows + line / job->group, block);
            if (ranges[0].first < ranges[0].end)
                job->kernels->tiles[count][is_whole](job, &heads, slots, ranges, state, line);
            line += count;
        }
    float *out = job->out + piece->first_row * job->out_stride;
    job->kernels->finish(job, state, out + kv_head * job->group * job->head_dim, piece->num_rows);
}

/* An item is a piece and a KV head. */
static void compute_items(const void *argument, size_t first, size_t end, unsigned thread) {
    const Job *job = argument;
    for (size_t item = first; item < end; item++) {
        const Piece *piece = job->pieces + item / job->num_kv_heads;
        Lines state = lines_in(job->memory + thread * job->floats_each,
                               piece->num_rows * job->group, job->width);
        compute_piece(job, piece, item % job->num_kv_heads, &state);
    }
}

static PyObject *attend(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    long long n[17];
    if (count != 18)
        return PyErr_Format(PyExc_TypeError, "attend takes 18 arguments, not %zd", count);
    double scale = PyFloat_AsDouble(args[17]);
    if ((scale == -1.0 && PyErr_Occurred()) || !read_numbers("attend", args, 17, n, 17)
        || !kernel_exists(n[16]))
        return NULL;
    Job job = {
        .rows = (const Row *)n[0],
        .pieces = (const Piece *)n[1],
        .slots = (const long long *)n[2],
        .queries = (const float *)n[3],
        .keys = (const float *)n[4],
        .values = (const float *)n[5],
        .out = (float *)n[6],
        .query_stride = n[8],
        .out_stride = n[9],
        .kv_head_stride = n[10],
        .num_kv_heads = n[11],
        .group = n[12],
        .head_dim = n[13],
        .width = (n[13] + 15) / 16 * 16,
        .kernels = kernels[isas[n[16]]],
        .scale = (float)scale,
    };
    const size_t num_items = n[7] * n[11], most_rows = n[14];
    /* A thread's share; fewer products take less time than it needs to begin. */
    const int is_little = n[15] * n[11] * n[12] * n[13] < LEAST_PRODUCTS;
    const unsigned num_threads = is_little ? 1 : pool_num_threads();
    job.floats_each = floats_of(most_rows * job.group, job.width);
    job.memory = PyMem_RawMalloc(num_threads * job.floats_each * sizeof(float));
    if (!job.memory)
        return PyErr_NoMemory();
    if (is_little) {
        compute_items(&job, 0, num_items, 0);
    } else { /* alone too it may take long, and other threads answer health checks meanwhile */
        Py_BEGIN_ALLOW_THREADS
        share_out(compute_items, &job, num_items, 1, num_threads);
        Py_END_ALLOW_THREADS
    }
    PyMem_RawFree(job.memory);
    Py_RETURN_NONE;
}

PyMethodDef attention_methods[] = {
    {"attend", (PyCFunction)(void (*)(void))attend, METH_FASTCALL, "See attention/cpu.py."},
    {"plan_keys", (PyCFunction)(void (*)(void))plan_keys, METH_FASTCALL, "See attention/cpu.py."},
    {NULL, NULL, 0, NULL},
};
