/* Operations on rows for one width of vector. Each row by itself, so that its bits depend neither
 * on the rows beside it nor on threads. */

INLINE float NAME(inverse_rms)(const float *x, size_t size, float eps) {
    V sums[4][PARTS] = {0};
    size_t i = 0;
    for (; i + 64 <= size; i += 64)
        for (int chain = 0; chain < 4; chain++)
            for (int part = 0; part < PARTS; part++) {
                V own = FROM(x + i + chain * 16 + part * LANES);
                sums[chain][part] = FMA(own, own, sums[chain][part]);
            }
    for (int chain = 0; i < size; chain++)
        for (int part = 0; part < PARTS && i < size; part++, i += LANES) {
            V own = NAME(load)(x + i, size - i);
            sums[chain][part] = FMA(own, own, sums[chain][part]);
        }
    for (int part = 0; part < PARTS; part++)
        sums[0][part] = (sums[0][part] + sums[1][part]) + (sums[2][part] + sums[3][part]);
    return 1.0f / sqrtf(NAME(sum)(sums[0]) / (float)size + eps);
}

TARGET static void NAME(norm_rows)(const void *argument, size_t first, size_t end,
                                   unsigned thread) {
    const Norm *job = argument;
    const size_t size = job->size;
    (void)thread;
    for (size_t row = first; row < end; row++) {
        size_t from = job->picked ? (size_t)job->picked[row] : row;
        float *x = job->x + from * job->x_stride, *out = job->out + row * job->out_stride;
        float *copy = job->copy ? job->copy + row * job->copy_stride : NULL;
        if (job->delta) {
            const float *delta = job->delta + row * job->delta_stride;
            const float *weight = job->post_weight;
            V factor = SPLAT(weight ? NAME(inverse_rms)(delta, size, job->post_eps) : 1.0f);
            for (size_t i = 0; i < size; i += LANES) {
                size_t left = size - i;
                V add = NAME(load)(delta + i, left);
                if (weight)
                    add = add * factor * NAME(load)(weight + i, left);
                NAME(store)(x + i, left, NAME(load)(x + i, left) + add);
            }
        }
        V factor = SPLAT(NAME(inverse_rms)(x, size, job->eps));
        for (size_t i = 0; i < size; i += LANES) {
            size_t left = size - i;
            V own = NAME(load)(x + i, left);
            NAME(store)(out + i, left, own * factor * NAME(load)(job->weight + i, left));
            if (copy)
                NAME(store)(copy + i, left, own);
        }
    }
}

/* Rotates the pairs (i, i + half) of a head, after its norm where it has one. */
INLINE void NAME(rotate_head)(const Rotation *job, const float *x, float *out, const float *weight,
                              const float *cos, const float *sin) {
    const size_t half = job->head_dim / 2;
    V factor = SPLAT(weight ? NAME(inverse_rms)(x, job->head_dim, job->eps) : 1.0f);
    for (size_t i = 0; i < half; i += LANES) {
        size_t left = half - i;
        V one = NAME(load)(x + i, left), other = NAME(load)(x + half + i, left);
        if (weight) {
            one = one * factor * NAME(load)(weight + i, left);
            other = other * factor * NAME(load)(weight + half + i, left);
        }
        V turned = other * NAME(load)(sin + i, left) + one * NAME(load)(cos + i, left);
        NAME(store)(out + half + i, left, one * NAME(load)(sin + half + i, left)
                                          + other * NAME(load)(cos + half + i, left));
        NAME(store)(out + i, left, turned);
    }
}

TARGET static void NAME(rotate_rows)(const void *argument, size_t first, size_t end,
                                     unsigned thread) {
    const Rotation *job = argument;
    const size_t head_dim = job->head_dim;
    (void)thread;
    for (size_t row = first; row < end; row++) {
        float *heads = job->heads + row * (job->num_heads + 2 * job->num_kv_heads) * head_dim;
        const float *cos = job->cos + row * head_dim, *sin = job->sin + row * head_dim;
        for (size_t head = 0; head < job->num_heads; head++, heads += head_dim)
            NAME(rotate_head)(job, heads, heads, job->q_weight, cos, sin);
        for (size_t head = 0; head < job->num_kv_heads; head++, heads += head_dim) {
            size_t at = head * job->kv_head_stride + (size_t)job->slots[row] * head_dim;
            const float *value = heads + job->num_kv_heads * head_dim;
            NAME(rotate_head)(job, heads, job->keys + at, job->k_weight, cos, sin);
            memcpy(job->values + at, value, head_dim * sizeof(float));
        }
    }
}

/* The normal distribution function; its tail by Mills' ratio, which has no cancellation. */
INLINE V NAME(normal)(V x) {
    V size = (V)((I)x & 0x7fffffff), square = x * x;
    V rest = FMA(x, x, -square);
    V t = SPLAT(1.0f) / FMA(size, SPLAT(0.3f), SPLAT(1.0f));
    V p = SPLAT(-0.0206128326f);
    p = FMA(p, t, SPLAT(0.112375794f));
    p = FMA(p, t, SPLAT(-0.228067548f));
    p = FMA(p, t, SPLAT(0.191581736f));
    p = FMA(p, t, SPLAT(-0.0792473704f));
    p = FMA(p, t, SPLAT(0.0960578436f));
    p = FMA(p, t, SPLAT(0.0784255755f));
    p = FMA(p, t, SPLAT(0.110227325f));
    p = FMA(p, t, SPLAT(0.119572841f));
    p = FMA(p, t, SPLAT(0.119686634f));
    V half = SPLAT(-0.5f), upper = NAME(exp)(half * square) * p * t;
    upper = FMA(upper * half, rest, upper);
    return NAME(select)((I)(x > SPLAT(0.0f)), SPLAT(1.0f) - upper, upper);
}

INLINE V NAME(sigmoid)(V x) {
    return SPLAT(1.0f) / (SPLAT(1.0f) + NAME(exp)(-x));
}

INLINE V NAME(activated)(V x, int kind) {
    if (kind == SILU)
        return x / (SPLAT(1.0f) + NAME(exp)(-x));
    if (kind == GELU)
        return x * NAME(normal)(x);
    /* 1 + tanh(u) is twice the sigmoid of 2 u. */
    V cube = x * x * x;
    return x * NAME(sigmoid)(SPLAT(1.59576912f) * FMA(cube, SPLAT(0.044715f), x));
}

TARGET static void NAME(gate_rows)(const void *argument, size_t first, size_t end,
                                   unsigned thread) {
    const Gate *job = argument;
    const size_t size = job->size;
    (void)thread;
    for (size_t row = first; row < end; row++) {
        const float *gate = job->both + row * 2 * size, *up = gate + size;
        float *out = job->out + row * size;
        for (size_t i = 0; i < size; i += LANES) {
            size_t left = size - i;
            V x = NAME(load)(gate + i, left);
            NAME(store)(out + i, left, NAME(activated)(x, job->kind) * NAME(load)(up + i, left));
        }
    }
}
