/* Which keys the rows of a forward see: _attention_plan.c writes it, _attention.c reads it. */
#ifndef FOREDRAFT_CPU_ATTENTION_H
#define FOREDRAFT_CPU_ATTENTION_H

#include "_kernels.h"

#define BLOCK 64 /* keys, for which the weights of a tile of lines are computed at once */

/* A row sees its keys begin .. end - 1. Key n lies in slots[shared + n] before `own_from`, which is
 * a multiple of BLOCK, and in slots[own + n - own_from] from there on. */
typedef struct {
    long long begin, end, own_from, shared, own;
} Row;

/* Rows of one sequence that are computed together. */
typedef struct {
    long long first_row, num_rows;
} Piece;

PyObject *plan_keys(PyObject *self, PyObject *const *args, Py_ssize_t count);

#endif
