/* The sampling rule for rows of logits; see sampling/rule_cpu.py, and sampling/noise.py for the
 * noise.
 *
 * Noise is bounded, so a block of tokens whose scores cannot reach the best scores found so far is
 * never looked at; of the others most tokens are discarded by their hash, before any logarithm. */
#include "_kernels.h"
#include "_share.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK_TOKENS 256
#define EACH 16384       /* tokens that take as long as a thread needs to begin */
#define MOST_NOISE 22.9f /* above the largest noise: -log(-log1p(-2^-33)) */
#define MARGIN 1e-3f     /* far above the rounding of noise */
#define ROUNDING 0x1p-21f /* of a score, relative to it: some times as much */
#define REACHED (1 - 1e-12) /* of a mass: above the rounding of sums, far below that of p */
#define NEGLIGIBLE -60.0f /* e to this power is nothing beside the best token's 1 */

typedef struct {
    uint32_t head, middle;
} Keys;

typedef struct {
    const float *logits, *temperature, *top_p, *floor, *best;
    const long long *top_k, *seed, *position;
    const int32_t *tokens;
    long long *columns;
    float *scores;
    size_t vocab, stride, k;
    int is_choice;
    atomic_int *failed;
} Job;

typedef struct {
    float score; /* relative to the best token, tempered */
    uint32_t column;
} Candidate;

/* The best tokens of a row so far, best first. */
typedef struct {
    long long *columns;
    float *scores;
    size_t k, count;
} Best;

static uint64_t mix64(uint64_t z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static Keys keys_of(uint64_t seed, uint64_t position) {
    uint64_t key = mix64(mix64(seed + 0x9E3779B97F4A7C15u) + position * 0x9E3779B97F4A7C15u);
    return (Keys){(uint32_t)key, (uint32_t)(key >> 32)};
}

static inline uint32_t hash_token(Keys keys, uint32_t token) {
    uint32_t x = token ^ keys.head;
    x = (x ^ x >> 17) * 0xED5AD4BBu;
    x = (x ^ x >> 11) * 0xAC4C1B51u ^ keys.middle;
    x = (x ^ x >> 15) * 0x31848BABu;
    return x ^ x >> 14;
}

static float noise_of(uint32_t hash) {
    float w = ((float)hash + 0.5f) * 0x1p-32f;
    if (w > 1.0f - 0x1p-24f)
        w = 1.0f - 0x1p-24f;
    return (float)-log(-log1p(-(double)w));
}

#define KERNEL "_sampling_kernel.h"
#include "_each_isa.h"

typedef int (*BlockMaxima)(const float *, size_t, float *);
typedef void (*Hash)(Keys, const int32_t *, uint32_t, size_t, uint32_t *);

typedef double (*Total)(const float *, size_t, const float *, float, float);
typedef size_t (*Collect)(const float *, size_t, const float *, float, float, float, float,
                          Candidate *);

static const BlockMaxima block_maxima[NUM_ISAS] = BY_ISA(block_maxima);
static const Total totals[NUM_ISAS] = BY_ISA(total);
static const Collect collects[NUM_ISAS] = BY_ISA(collect);
static const Hash hash[NUM_ISAS] = BY_ISA(hash);

/* Keeps a token if it is among the k best; of equal scores the lower column is the better one. */
static void keep(Best *best, size_t column, float score) {
    size_t at = best->count;
    if (score == -INFINITY)
        return;
    while (at && (score > best->scores[at - 1]
                  || (score == best->scores[at - 1] && (long long)column < best->columns[at - 1])))
        at--;
    if (at == best->k)
        return;
    if (best->count < best->k)
        best->count++;
    size_t moved = best->count - 1 - at;
    memmove(best->scores + at + 1, best->scores + at, moved * sizeof(*best->scores));
    memmove(best->columns + at + 1, best->columns + at, moved * sizeof(*best->columns));
    best->scores[at] = score;
    best->columns[at] = (long long)column;
}

/* What every part of a row needs. */
typedef struct {
    const Job *job;
    const float *logits;
    float top, temperature, floor; /* the best logit is `top`; scores below `floor` are dropped */
    Keys keys;
    Isa isa;
} Row;

static inline float tempered(const Row *row, float logit) {
    return (logit - row->top) / row->temperature;
}

static inline uint32_t token_of(const Row *row, size_t column) {
    return row->job->tokens ? (uint32_t)row->job->tokens[column] : (uint32_t)column;
}

/* Looks at the tokens of one block that may be among the k best. */
static void look_at(const Row *row, size_t block, float most, Best *best) {
    const size_t first = block * BLOCK_TOKENS, left = row->job->vocab - first;
    const size_t count = left < BLOCK_TOKENS ? left : BLOCK_TOKENS;
    uint32_t hashes[BLOCK_TOKENS], limit = UINT32_MAX;
    most = tempered(row, most);
    if (most == -INFINITY || most < row->floor)
        return;
    if (best->count == best->k) {
        /* A token needs noise g of this or more; g <= -log(w), so w and the hash must be small. */
        float worst = best->scores[best->k - 1];
        float need = worst - (MARGIN + fabsf(worst) * ROUNDING) - most;
        if (need > MOST_NOISE)
            return;
        double largest = exp(-(double)need) * 0x1p32;
        limit = largest < 0x1p32 ? (uint32_t)largest : UINT32_MAX;
    }
    const int32_t *tokens = row->job->tokens ? row->job->tokens + first : NULL;
    hash[row->isa](row->keys, tokens, (uint32_t)first, count, hashes);
    for (size_t i = 0; i < count; i++) {
        if (hashes[i] > limit)
            continue;
        float score = tempered(row, row->logits[first + i]);
        if (score >= row->floor)
            keep(best, first + i, score + noise_of(hashes[i]));
    }
}

static void choose_unranked(const Row *row, const float *maxima, Best *best) {
    size_t num_blocks = (row->job->vocab + BLOCK_TOKENS - 1) / BLOCK_TOKENS, likeliest = 0;
    for (size_t block = 1; block < num_blocks; block++)
        if (maxima[block] > maxima[likeliest])
            likeliest = block;
    look_at(row, likeliest, maxima[likeliest], best);
    for (size_t block = 0; block < num_blocks; block++)
        if (block != likeliest)
            look_at(row, block, maxima[block], best);
}

static int by_rank(const void *left, const void *right) {
    const Candidate *a = left, *b = right;
    if (a->score != b->score)
        return a->score > b->score ? -1 : 1;
    return (a->column > b->column) - (a->column < b->column);
}

/* Scores below the best token's 0 down to which tokens are sorted, until they are enough. */
static const float depths[] = {-2, -4, -6, -9, -12, -16, -24, -FLT_MAX};

/* Top-k, then top-p, then min-p. Returns 0 where memory is short. */
static int choose_ranked(const Row *row, const float *maxima, float top_p, long long top_k,
                         Best *best) {
    const size_t vocab = row->job->vocab;
    const size_t limit = top_k > 0 && (size_t)top_k < vocab ? (size_t)top_k : vocab;
    size_t count = 0;
    double total = 0, through = 0;
    Candidate *ranked = malloc(vocab * sizeof(*ranked));
    if (!ranked)
        return 0;
    if (top_k <= 0)
        total = totals[row->isa](row->logits, vocab, maxima, row->top, row->temperature);
    for (size_t i = 0; i < sizeof(depths) / sizeof(*depths); i++) {
        float high = i ? depths[i - 1] : INFINITY;
        size_t more = collects[row->isa](row->logits, vocab, maxima, row->top, row->temperature,
                                         depths[i], high, ranked + count);
        qsort(ranked + count, more, sizeof(*ranked), by_rank);
        for (; more; more--, count++)
            through += exp((double)ranked[count].score);
        if (top_k > 0 ? count >= limit : through >= (double)top_p * total * (1 + 1e-9))
            break;
    }
    count = count < limit ? count : limit;
    if (top_k > 0)
        for (size_t rank = 0; rank < count; rank++)
            total += exp((double)ranked[rank].score);
    double before = 0;
    for (size_t rank = 0; rank < count; rank++) {
        Candidate one = ranked[rank];
        int has_enough = rank && top_p < 1 && before >= (double)top_p * total * REACHED;
        if (has_enough || one.score < row->floor)
            break;
        before += exp((double)one.score);
        uint32_t hash = hash_token(row->keys, token_of(row, one.column));
        keep(best, one.column, one.score + noise_of(hash));
    }
    free(ranked);
    return 1;
}

static long long greedy(const float *logits, const float *maxima, size_t vocab, float top) {
    size_t column = 0;
    while (column + BLOCK_TOKENS < vocab && maxima[column / BLOCK_TOKENS] != top)
        column += BLOCK_TOKENS;
    while (column + 1 < vocab && logits[column] != top)
        column++;
    return (long long)column;
}

static int choose_row(const Job *job, size_t index, Isa isa, float *maxima) {
    const float *logits = job->logits + index * job->stride;
    Best best = {job->columns + index * job->k, job->scores + index * job->k, job->k, 0};
    const size_t num_blocks = (job->vocab + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    int is_good = 1, is_broken = block_maxima[isa](logits, job->vocab, maxima);
    float top = -INFINITY, temperature = job->temperature ? job->temperature[index] : 0;
    for (size_t block = 0; block < num_blocks; block++)
        top = maxima[block] > top ? maxima[block] : top;
    if (job->is_choice && (is_broken || !(temperature > 0))) {
        best.columns[0] = is_broken ? -1 : greedy(logits, maxima, job->vocab, top);
        best.scores[0] = 0;
        return 1;
    }
    if (job->best)
        top = job->best[index];
    Row row = {job, logits, top == -INFINITY ? 0 : top, temperature > 0 ? temperature : 1,
               job->floor[index], keys_of(job->seed[index], job->position[index]), isa};
    if (job->top_k[index] > 0 || job->top_p[index] < 1)
        is_good = choose_ranked(&row, maxima, job->top_p[index], job->top_k[index], &best);
    else
        choose_unranked(&row, maxima, &best);
    for (size_t i = best.count; i < best.k; i++) {
        best.columns[i] = 0;
        best.scores[i] = -INFINITY;
    }
    return is_good;
}

static void choose_rows(const Job *job, size_t first, size_t end, Isa isa) {
    const size_t num_blocks = (job->vocab + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    float *maxima = malloc(num_blocks * sizeof(*maxima));
    for (size_t index = first; maxima && index < end; index++)
        if (!choose_row(job, index, isa, maxima))
            atomic_store(job->failed, 1);
    if (!maxima)
        atomic_store(job->failed, 1);
    free(maxima);
}

#define ITEMS(name, isa)                                                                         \
    static void name(const void *job, size_t first, size_t end, unsigned thread) {               \
        (void)thread;                                                                            \
        choose_rows(job, first, end, isa);                                                       \
    }
#if defined(__x86_64__)
ITEMS(choose_avx512, AVX512)
ITEMS(choose_avx2, AVX2)
#endif
ITEMS(choose_portable, PORTABLE)

static const Items choices[NUM_ISAS] = BY_ISA(choose);

static PyObject *choose(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long long n[17];
    atomic_int failed = 0;
    if (!read_numbers("choose", args, count, n, 17) || !kernel_exists(n[16]))
        return NULL;
    if (n[12] < 1 || n[14] < 1 || n[14] > n[12])
        return PyErr_Format(PyExc_ValueError, "%lld tokens of %lld", n[14], n[12]);
    if (!n[1] && !(n[14] == 1 && n[15]))
        return PyErr_Format(PyExc_ValueError, "only one choice of each row needs no temperature");
    Job job = {(float *)n[0], (float *)n[1], (float *)n[2], (float *)n[3], (float *)n[4],
               (long long *)n[5], (long long *)n[6], (long long *)n[7], (int32_t *)n[8],
               (long long *)n[9], (float *)n[10], n[12], n[13], n[14], (int)n[15], &failed};
    const size_t num_rows = n[11], at_once = EACH / (job.vocab + 1) + 1;
    Py_BEGIN_ALLOW_THREADS
    share_out(choices[isas[n[16]]], &job, num_rows, at_once, pool_num_threads());
    Py_END_ALLOW_THREADS
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

PyMethodDef sampling_methods[] = {
    {"choose", (PyCFunction)(void (*)(void))choose, METH_FASTCALL, "See sampling/rule_cpu.py."},
    {NULL, NULL, 0, NULL},
};
