/* Includes KERNEL once for each instruction set, with the names of _vector.h. */
#if defined(__x86_64__)
#include "_avx512.h"
#include KERNEL
#include "_vector_end.h"

#include "_avx2.h"
#include KERNEL
#include "_vector_end.h"
#endif

#include "_portable.h"
#include KERNEL
#include "_vector_end.h"

#undef KERNEL

/* A table, by Isa, of what NAME(x) is there. */
#if defined(__x86_64__)
#define BY_ISA(x) {[AVX512] = x##_avx512, [AVX2] = x##_avx2, [PORTABLE] = x##_portable}
#else
#define BY_ISA(x) {[PORTABLE] = x##_portable}
#endif
