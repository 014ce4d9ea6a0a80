/* Names of _vector.h for any CPU. */
#define NAME(x) x##_portable
#define TARGET
#define LANES 4
#define SPLAT(a) ((NAME(Floats)){a, a, a, a})
#if defined(__ARM_NEON)
#define FMA(a, b, c) ((NAME(Floats))vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#else
#define FMA(a, b, c) ((c) + (a) * (b))
#endif
#define MAX(a, b) NAME(select)((a) > (b), a, b)
#define LOAD_SOME(p, n) NAME(load_some)(p, n)
#define STORE_SOME(p, n, v) NAME(store_some)(p, n, v)
#include "_vector.h"
