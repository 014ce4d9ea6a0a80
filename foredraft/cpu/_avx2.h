/* Names of _vector.h for AVX2. */
#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define FMA(a, b, c) ((NAME(Floats))_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define SPLAT(a) ((NAME(Floats))_mm256_set1_ps(a))
#define MAX(a, b) ((NAME(Floats))_mm256_max_ps((__m256)(a), (__m256)(b)))
#define MASK(n) \
    _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
#define LOAD_SOME(p, n) ((NAME(Floats))_mm256_maskload_ps(p, MASK(n)))
#define STORE_SOME(p, n, v) _mm256_maskstore_ps(p, MASK(n), (__m256)(v))
#include "_vector.h"
