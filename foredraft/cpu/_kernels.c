/* The module: tables of methods, and the instruction sets of this CPU. */
#include "_kernels.h"

#include "_attention.h"
#include "_pool.h"

static PyMethodDef *const tables[] = {
    pool_methods,
    meeting_methods,
    product_methods,
    tile_methods,
    row_methods,
    attention_methods,
    sampling_methods,
};

static const struct {
    const char *name;
    long value;
} constants[] = {
    {"ATTENTION_BLOCK", BLOCK},
    {"MEETING_PLACE", MEETING_PLACE},
    {"MOST_THREADS", MOST_THREADS},
    {"TILE", TILE},
};

static const char *const names[NUM_ISAS] = {"avx512", "avx2", "portable"};
Isa isas[NUM_ISAS];
int num_isas;

static void find_isas(void) {
    num_isas = 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        isas[num_isas++] = AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        isas[num_isas++] = AVX2;
#endif
    isas[num_isas++] = PORTABLE;
}

int read_numbers(const char *method, PyObject *const *args, Py_ssize_t count, long long *numbers,
                 Py_ssize_t wanted) {
    if (count != wanted) {
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", method, wanted, count);
        return 0;
    }
    for (Py_ssize_t i = 0; i < wanted; i++) {
        numbers[i] = PyLong_AsLongLong(args[i]);
        if (numbers[i] == -1 && PyErr_Occurred())
            return 0;
    }
    return 1;
}

int kernel_exists(long long kernel) {
    if (kernel >= 0 && kernel < num_isas)
        return 1;
    PyErr_Format(PyExc_ValueError, "kernel %lld of %d", kernel, num_isas);
    return 0;
}

/* Adds KERNELS, the names of this CPU's instruction sets. */
static int add_names(PyObject *self) {
    PyObject *found = PyTuple_New(num_isas);
    int is_good = found != NULL;
    for (int i = 0; is_good && i < num_isas; i++) {
        PyObject *name = PyUnicode_FromString(names[isas[i]]);
        is_good = name && PyTuple_SetItem(found, i, name) == 0;
    }
    is_good = is_good && PyModule_AddObjectRef(self, "KERNELS", found) == 0;
    Py_XDECREF(found);
    return is_good;
}

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_kernels", "Kernels for few rows on a CPU.", -1, NULL,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernels(void) {
    PyObject *self = PyModule_Create(&module);
    if (!self)
        return NULL;
    find_isas();
    int is_good = pool_init() == 0;
    if (!is_good)
        PyErr_NoMemory();
    for (size_t i = 0; is_good && i < sizeof(tables) / sizeof(*tables); i++)
        is_good = PyModule_AddFunctions(self, tables[i]) == 0;
    for (size_t i = 0; is_good && i < sizeof(constants) / sizeof(*constants); i++)
        is_good = PyModule_AddIntConstant(self, constants[i].name, constants[i].value) == 0;
    if (is_good && add_names(self))
        return self;
    Py_DECREF(self);
    return NULL;
}
