/* Names of _vector.h for AVX-512. */
#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#define LANES 16
#define FMA(a, b, c) ((NAME(Floats))_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define SPLAT(a) ((NAME(Floats))_mm512_set1_ps(a))
#define MAX(a, b) ((NAME(Floats))_mm512_max_ps((__m512)(a), (__m512)(b)))
#define LOAD_SOME(p, n) ((NAME(Floats))_mm512_maskz_loadu_ps((__mmask16)((1u << (n)) - 1), p))
#define STORE_SOME(p, n, v) _mm512_mask_storeu_ps(p, (__mmask16)((1u << (n)) - 1), (__m512)(v))
#include "_vector.h"
