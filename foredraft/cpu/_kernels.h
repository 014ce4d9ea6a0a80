/* What the files of this extension share.
 *
 * A new file declares its table of methods here and has a line in `tables` of _kernels.c.
 */
#ifndef FOREDRAFT_CPU_KERNELS_H
#define FOREDRAFT_CPU_KERNELS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>

extern PyMethodDef pool_methods[];
extern PyMethodDef meeting_methods[];
extern PyMethodDef product_methods[];
extern PyMethodDef tile_methods[];
extern PyMethodDef row_methods[];
extern PyMethodDef attention_methods[];
extern PyMethodDef sampling_methods[];

#define MEETING_PLACE 64 /* bytes of a process; see _meeting.c */
#define TILE 32 /* outputs of a tile of quantised weights; see _tiles.c */

/* Instruction sets with kernels of their own. */
typedef enum { AVX512, AVX2, PORTABLE, NUM_ISAS } Isa;

/* Those that this CPU can run, the fastest first: KERNELS in Python, and an index into them is the
 * argument `kernel` of methods. */
extern Isa isas[NUM_ISAS];
extern int num_isas;

/* Reads a method's arguments, `wanted` integers (addresses are integers, too). Returns whether all
 * are there; else an exception is set. */
int read_numbers(const char *method, PyObject *const *args, Py_ssize_t count, long long *numbers,
                 Py_ssize_t wanted);

/* Whether this CPU has a kernel of that index; else an exception is set. */
int kernel_exists(long long kernel);

#endif
