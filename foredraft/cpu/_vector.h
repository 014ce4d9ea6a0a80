/* Vectors of one instruction set. _each_isa.h includes _avx512.h, _avx2.h and _portable.h, which
 * include this file and define:
 *
 * NAME(x)       x with the instruction set's name behind it
 * TARGET        attribute of functions that use its instructions
 * LANES         floats of a vector: 4, 8 or 16
 * FMA(a,b,c)    a * b + c by lane, rounded once (twice where the CPU has no such instruction)
 * SPLAT(a)      a in each lane
 * MAX(a,b)      the larger by lane; b where one is NaN
 * LOAD_SOME(p,n), STORE_SOME(p,n,v)  the first n lanes only, n < LANES; loaded zeros in the others
 *
 * _vector_end.h takes all names back. Sums have 16 parts for every width of vector, and parts are
 * added up in one order, so all instruction sets with FMA give the same bits.
 */
#include <math.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

typedef float NAME(Floats) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(Ints) __attribute__((vector_size(4 * LANES)));
typedef uint32_t NAME(Words) __attribute__((vector_size(4 * LANES))); /* whose sums may overflow */
/* In memory, at any address that suits floats. */
typedef float NAME(Stored) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define V NAME(Floats)
#define I NAME(Ints)
#define AT(p) (*(NAME(Stored) *)(p))
#define FROM(p) ((V)(*(const NAME(Stored) *)(p)))
#define INLINE static inline __attribute__((always_inline)) TARGET
#define PARTS (16 / LANES) /* vectors of a sum */
#define UNROLL _Pragma("GCC unroll 16")

INLINE V NAME(select)(I condition, V yes, V no) {
    return (V)(((I)yes & condition) | ((I)no & ~condition));
}

#if LANES == 4
INLINE V NAME(load_some)(const float *p, size_t n) {
    float lanes[LANES] = {0};
    for (size_t i = 0; i < n; i++)
        lanes[i] = p[i];
    return FROM(lanes);
}

INLINE void NAME(store_some)(float *p, size_t n, V v) {
    for (size_t i = 0; i < n; i++)
        p[i] = v[i];
}
#endif

/* Up to LANES floats of the `left` that remain from p on. */
INLINE V NAME(load)(const float *p, size_t left) {
    return left >= LANES ? FROM(p) : LOAD_SOME(p, left);
}

INLINE void NAME(store)(float *p, size_t left, V v) {
    if (left >= LANES)
        AT(p) = v;
    else
        STORE_SOME(p, left, v);
}

/* The sum of 16 parts: parts i and i + 8, then i and i + 4, i and i + 2, i and i + 1. */
INLINE float NAME(sum)(const V parts[PARTS]) {
    float all[16];
    for (int i = 0; i < PARTS; i++)
        AT(all + i * LANES) = parts[i];
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++)
            all[i] += all[i + half];
    return all[0];
}

/* e^x within one unit of the last place; 0 below the least normal number, infinity from 2^127.5. */
INLINE V NAME(exp)(V x) {
    V magic = SPLAT(12582912.0f); /* 1.5 * 2^23: a float's lowest bits there are an integer's */
    V shifted = FMA(x, SPLAT(1.44269504f), magic);
    V power = shifted - magic;
    V r = FMA(power, SPLAT(-0.693359375f), x); /* exact: this number has 9 bits */
    r = FMA(power, SPLAT(2.12194440e-4f), r);
    V p = FMA(r, SPLAT(0.0013950601f), SPLAT(0.008368953f));
    p = FMA(p, r, SPLAT(0.041666206f));
    p = FMA(p, r, SPLAT(0.16666518f));
    p = FMA(p, r, SPLAT(0.5f));
    p = FMA(p * r, r, r) + SPLAT(1.0f);
    p = (V)((NAME(Words))p + ((NAME(Words))shifted << 23));
    p = NAME(select)((I)(x < SPLAT(-87.3365447f)), SPLAT(0.0f), p);
    return NAME(select)((I)(x > SPLAT(88.3762627f)), SPLAT(INFINITY), p);
}
