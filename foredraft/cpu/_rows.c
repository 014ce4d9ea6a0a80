/* Operations of a layer on the rows of a step, each in one pass; see layers/fused_cpu.py. */
#include "_kernels.h"
#include "_share.h"

#include <math.h>
#include <string.h>

/* Fewer numbers than this take less time than a thread needs to begin: EACH is a thread's share. */
#define EACH 16384
#define ANGLE 16 /* numbers that take as long as a sine and a cosine */

enum { SILU, GELU, GELU_TANH, NUM_KINDS };

typedef struct {
    float *x; /* what is normalised: the sum, where there is a delta */
    const float *delta, *post_weight, *weight;
    float *out, *copy;
    const long long *picked;
    size_t x_stride, delta_stride, out_stride, copy_stride, size;
    float eps, post_eps;
} Norm;

typedef struct {
    float *heads, *keys, *values;
    const float *cos, *sin, *q_weight, *k_weight;
    const long long *slots;
    size_t num_heads, num_kv_heads, head_dim, kv_head_stride;
    float eps;
} Rotation;

typedef struct {
    const float *both;
    float *out;
    size_t size;
    int kind;
} Gate;

typedef struct {
    const long long *positions;
    const float *frequencies;
    float *cos, *sin;
    size_t half;
    float factor;
} Angles;

#define KERNEL "_rows_kernel.h"
#include "_each_isa.h"

static const Items norms[NUM_ISAS] = BY_ISA(norm_rows);
static const Items rotations[NUM_ISAS] = BY_ISA(rotate_rows);
static const Items gates[NUM_ISAS] = BY_ISA(gate_rows);

/* Computes rows of `size` numbers. */
static PyObject *compute(Items items, const void *job, size_t num_rows, size_t size) {
    size_t at_once = EACH / (size + 1) + 1;
    if (num_rows <= at_once) {
        items(job, 0, num_rows, 0);
        Py_RETURN_NONE;
    }
    Py_BEGIN_ALLOW_THREADS
    share_out(items, job, num_rows, at_once, pool_num_threads());
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Whether all are 0 .. limit - 1; else an exception is set. */
static int are_below(const char *what, const long long *indices, long long count, long long limit) {
    for (long long i = 0; i < count; i++)
        if (indices[i] < 0 || indices[i] >= limit) {
            PyErr_Format(PyExc_IndexError, "%s %lld of %lld", what, indices[i], limit);
            return 0;
        }
    return 1;
}

static int read_float(PyObject *number, float *result) {
    double value = PyFloat_AsDouble(number);
    *result = (float)value;
    return value != -1.0 || !PyErr_Occurred();
}

static PyObject *norm(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long long n[15];
    Norm job;
    if (count != 17)
        return PyErr_Format(PyExc_TypeError, "norm takes 17 arguments, not %zd", count);
    if (!read_numbers("norm", args, 15, n, 15) || !read_float(args[15], &job.eps)
        || !read_float(args[16], &job.post_eps) || !kernel_exists(n[14]))
        return NULL;
    job = (Norm){(float *)n[0], (float *)n[1], (float *)n[2], (float *)n[3], (float *)n[4],
                 (float *)n[5], (long long *)n[6], n[8], n[9], n[10], n[11], n[13],
                 job.eps, job.post_eps};
    if (job.picked && !are_below("row", job.picked, n[12], n[7]))
        return NULL;
    return compute(norms[isas[n[14]]], &job, n[12], n[13]);
}

static PyObject *rotate_and_store(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long long n[15];
    Rotation job;
    if (count != 16)
        return PyErr_Format(PyExc_TypeError, "rotate_and_store takes 16 arguments, not %zd",
                            count);
    if (!read_numbers("rotate_and_store", args, 15, n, 15) || !read_float(args[15], &job.eps)
        || !kernel_exists(n[14]))
        return NULL;
    job = (Rotation){(float *)n[0], (float *)n[1], (float *)n[2], (float *)n[3], (float *)n[4],
                     (float *)n[5], (float *)n[6], (long long *)n[7], n[10], n[11], n[12], n[13],
                     job.eps};
    if (!are_below("slot", job.slots, n[9], n[8]))
        return NULL;
    return compute(rotations[isas[n[14]]], &job, n[9],
                   (job.num_heads + 2 * job.num_kv_heads) * job.head_dim);
}

static PyObject *gate(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long long n[6];
    if (!read_numbers("gate", args, count, n, 6) || !kernel_exists(n[5]))
        return NULL;
    if (n[4] < 0 || n[4] >= NUM_KINDS)
        return PyErr_Format(PyExc_ValueError, "kind %lld of %d", n[4], NUM_KINDS);
    Gate job = {(float *)n[0], (float *)n[1], n[3], (int)n[4]};
    return compute(gates[isas[n[5]]], &job, n[2], n[3]);
}

/* Cosines and signed sines [rows, 2 * half] of the angles position * frequency. */
static void angle_rows(const void *argument, size_t first, size_t end, unsigned thread) {
    const Angles *job = argument;
    const size_t half = job->half;
    (void)thread;
    for (size_t row = first; row < end; row++) {
        float *cos = job->cos + row * 2 * half, *sin = job->sin + row * 2 * half;
        for (size_t i = 0; i < half; i++) {
            float angle = (float)job->positions[row] * job->frequencies[i];
            cos[i] = cos[half + i] = cosf(angle) * job->factor;
            sin[half + i] = sinf(angle) * job->factor;
            sin[i] = -sin[half + i];
        }
    }
}

static PyObject *angles(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long long n[6];
    Angles job;
    if (count != 7)
        return PyErr_Format(PyExc_TypeError, "angles takes 7 arguments, not %zd", count);
    if (!read_numbers("angles", args, 6, n, 6) || !read_float(args[6], &job.factor))
        return NULL;
    job = (Angles){(long long *)n[0], (float *)n[1], (float *)n[2], (float *)n[3], n[5],
                   job.factor};
    return compute(angle_rows, &job, n[4], job.half * ANGLE);
}

PyMethodDef row_methods[] = {
    {"norm", (PyCFunction)(void (*)(void))norm, METH_FASTCALL, "See layers/fused_cpu.py."},
    {"rotate_and_store", (PyCFunction)(void (*)(void))rotate_and_store, METH_FASTCALL,
     "See layers/fused_cpu.py."},
    {"gate", (PyCFunction)(void (*)(void))gate, METH_FASTCALL, "See layers/fused_cpu.py."},
    {"angles", (PyCFunction)(void (*)(void))angles, METH_FASTCALL, "See layers/fused_cpu.py."},
    {NULL, NULL, 0, NULL},
};
