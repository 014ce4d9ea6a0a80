// Products of few rows of x with plain weights or 8-bit floats; `skinny_native` launches them.
//
// A block has OWN outputs, all columns of them (or those of one of PARTS), and one row of tiles of 64
// outputs for each of its groups of four warps. One thread more copies weights and x to shared memory,
// STAGES pieces ahead: weights do not depend on the kernel ahead of this one, so the first ones
// are under way before it has ended. Each group adds up its columns in their order, so that a row has
// the bits of the Triton kernels, beside any number of others.
//
// Macros: INPUTS, columns of a part; ITEM, bytes of a number; LINES, outputs of a tile that are used, a
// multiple of 8; GROUPS; GATED, whether another tile of each group has the outputs that silu of the
// first is multiplied by; LOTS, 128 bytes of columns each, of a piece; STAGES; PARTS, 1, or more to
// write their sums as float32; HAS_BIAS; HEAD_DIM, 0 or the width of heads, Q_HEADS and KV_HEADS, see
// `heads.Heads`.
#define ROWS 8  // room for rows of x
#define HALVES (1 + GATED)
#define OWN (GROUPS * LINES)
#define LOT 128
#define COLUMNS (LOT / ITEM)  // of a lot
#define TILE_BYTES (LINES * LOT)
#define WEIGHT_BYTES (LOTS * HALVES * GROUPS * TILE_BYTES)
#define STAGE_BYTES (WEIGHT_BYTES + LOTS * ROWS * LOT)
#define STEPS (INPUTS / (COLUMNS * LOTS))
#define THREADS (GROUPS * 128 + 32)
#define BARRIER_BYTES 1024
#define FACTORS (HALVES * OWN)  // scales of outputs, and as many biases
#define FACTOR_BYTES (((2 * FACTORS + ROWS) * 4 + 1023) / 1024 * 1024)
// Lines of a copy: heads need pairs of outputs half a head apart.
#define COPY_LINES (HEAD_DIM ? OWN / 2 : OWN)
#define PAIRS ((ROWS * OWN / 2 + GROUPS * 128 - 1) / (GROUPS * 128))  // of a thread

KERNEL(THREADS) multiply_few_rows(TENSOR_MAP weights, TENSOR_MAP x, const float* x_scales, const float* scales,
                                const bfloat* bias, bfloat* out,
#if HEAD_DIM
                                const float* cosines, const float* sines, const i64* slots, bfloat* keys, bfloat* values,
                                i64 plane_stride,
#endif
                                int rows, int outputs) {
  SHARED;
  const int warp = same_in_warp(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int part = blockIdx.x % PARTS, block = blockIdx.x / PARTS;
  const u32 full = address(shared), empty = full + 8 * STAGES;
  const u32 factors = full + BARRIER_BYTES, ring = factors + FACTOR_BYTES;
#if HEAD_DIM
  const int head = block * OWN / HEAD_DIM, first_pair = block % (HEAD_DIM / OWN) * (OWN / 2);
  const int first = head * HEAD_DIM + first_pair, second = first + HEAD_DIM / 2;
#else
  const int first = block * OWN, second = outputs + first;
#endif
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      make_barrier(full + 8 * i, 1);
      make_barrier(empty + 8 * i, GROUPS * 4);
    }
    end_barriers();
  }
  meet_block();

  if (warp == GROUPS * 4) {
    if (lane) return;
    auto copy_weights = [&](int step, int stage) {
      const u32 to = ring + stage * STAGE_BYTES;
      expect_bytes(full + 8 * stage, STAGE_BYTES);
#pragma unroll
      for (int i = 0; i < LOTS; i++) {
        const int column = ((part * STEPS + step) * LOTS + i) * COLUMNS;
        copy_tile(to + i * HALVES * GROUPS * TILE_BYTES, weights, column, first, full + 8 * stage);
        if (GATED || HEAD_DIM)
          copy_tile(to + i * HALVES * GROUPS * TILE_BYTES + COPY_LINES * LOT, weights, column, second, full + 8 * stage);
      }
    };
    auto copy_rows = [&](int step, int stage) {
#pragma unroll
      for (int i = 0; i < LOTS; i++)
        copy_tile(ring + stage * STAGE_BYTES + WEIGHT_BYTES + i * ROWS * LOT, x,
                  ((part * STEPS + step) * LOTS + i) * COLUMNS, 0, full + 8 * stage);
    };
#pragma unroll 1
    for (int i = 0; i < min(STAGES, STEPS); i++) copy_weights(i, i);
    wait_for_kernel_before();
    let_next_kernel_start();
#pragma unroll 1
    for (int i = 0; i < min(STAGES, STEPS); i++) copy_rows(i, i);
    int stage = 0, turn = 0;
#pragma unroll 1
    for (int step = STAGES; step < STEPS; step++) {
      wait_for_phase(empty + 8 * stage, turn);
      copy_weights(step, stage);
      copy_rows(step, stage);
      if (++stage == STAGES) stage = 0, turn ^= 1;
    }
    return;
  }

  // What is needed last is loaded first.
  if (ITEM == 1 || HAS_BIAS)
#pragma unroll 1
    for (int i = threadIdx.x; i < FACTORS; i += GROUPS * 128) {
      const int line = i % OWN, is_second = HEAD_DIM ? line / (OWN / 2) : i / OWN;
      const int n = (is_second ? second : first) + (HEAD_DIM ? line % (OWN / 2) : line);
      const bool is_output = HEAD_DIM || first + line < outputs;
      if (ITEM == 1) store4(factors + i * 4, is_output ? load_float(scales + n) : 0.0f);
      if (HAS_BIAS) store4(factors + (FACTORS + i) * 4, is_output ? to_float(bias[n]) : 0.0f);
    }
  wait_for_kernel_before();
  if (ITEM == 1 && threadIdx.x < rows) store4(factors + (2 * FACTORS + threadIdx.x) * 4, load_float(x_scales + threadIdx.x));
#if HEAD_DIM
  float cosines_of[PAIRS], sines_of[PAIRS];
  i64 slots_of[PAIRS];
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const int index = threadIdx.x + i * GROUPS * 128, row = min(index / (OWN / 2), rows - 1);
    const int angle = row * HEAD_DIM + first_pair + index % (OWN / 2);
    cosines_of[i] = load_float(cosines + angle);
    sines_of[i] = load_float(sines + angle + HEAD_DIM / 2);  // where sines have their own sign
    slots_of[i] = load_long(slots + row);
  }
#endif
  const int group = warp / 4;
  float sums[HALVES][4] = {};
  int stage = 0, turn = 0, before = 0;
#pragma unroll 1
  for (int step = 0; step < STEPS; step++) {
    wait_for_phase(full + 8 * stage, turn);
    begin_products();
    const u32 at = ring + stage * STAGE_BYTES;
#pragma unroll
    for (int i = 0; i < LOTS; i++)
#pragma unroll
      for (int k = 0; k < LOT; k += 32)
#pragma unroll
        for (int h = 0; h < HALVES; h++)
          multiply_tile<ITEM>(sums[h], at + ((i * HALVES + h) * GROUPS + group) * TILE_BYTES + k,
                                    at + WEIGHT_BYTES + i * ROWS * LOT + k);
    end_products();
    wait_for_products<1>();
    if (step && lane == 0) arrive(empty + 8 * before);
    before = stage;
    if (++stage == STAGES) stage = 0, turn ^= 1;
  }
  wait_for_products<0>();

  // Sums take the place of the tiles, [half][row][output].
  meet_threads(GROUPS * 128);
#pragma unroll
  for (int h = 0; h < HALVES; h++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int line = warp % 4 * 16 + lane / 4 + i / 2 * 8, row = lane % 4 * 2 + i % 2;
      if (line < LINES && row < rows) store4(ring + ((h * ROWS + row) * OWN + group * LINES + line) * 4, sums[h][i]);
    }
  meet_threads(GROUPS * 128);

  // An output before its activation, as the library rounds it.
  auto finished = [&](int h, int row, int line) {
    const u32 factor = factors + (h * OWN + line) * 4;
    float x = as_float(load4(ring + ((h * ROWS + row) * OWN + line) * 4));
    if (ITEM == 1) {
      const float scaled = multiplied(x, as_float(load4(factor)));
      x = to_float(rounded(multiplied(scaled, as_float(load4(factors + (2 * FACTORS + row) * 4)))));
    }
    return HAS_BIAS ? added(x, as_float(load4(factor + FACTORS * 4))) : x;
  };
#if HEAD_DIM
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const int index = threadIdx.x + i * GROUPS * 128, row = index / (OWN / 2), line = index % (OWN / 2);
    if (row >= rows) continue;
    const bfloat low = rounded(finished(0, row, line)), high = rounded(finished(0, row, line + OWN / 2));
    const float x = to_float(low), y = to_float(high), cosine = cosines_of[i], sine = sines_of[i];
    const bfloat turned_low = rounded(multiplied_added(x, cosine, -multiplied(y, sine)));
    const bfloat turned_high = rounded(multiplied_added(y, cosine, multiplied(x, sine)));
    const bool is_query = head < Q_HEADS, is_value = head >= Q_HEADS + KV_HEADS;
    bfloat* to = out + (row * Q_HEADS + head) * HEAD_DIM;
    if (!is_query) to = (is_value ? values : keys) + (head - Q_HEADS) % KV_HEADS * plane_stride + slots_of[i] * HEAD_DIM;
    to += first_pair + line;
    to[0] = is_value ? low : turned_low, to[HEAD_DIM / 2] = is_value ? high : turned_high;
  }
#else
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * OWN; i += GROUPS * 128) {
    const int row = i / OWN, line = i % OWN, n = first + line;
    if (n >= outputs) continue;
    if (PARTS > 1) {
      ((float*)out)[((i64)part * rows + row) * outputs + n] = as_float(load4(ring + (row * OWN + line) * 4));
      continue;
    }
    float x = finished(0, row, line);
    if (GATED) x = multiplied(silu(to_float(rounded(x))), to_float(rounded(finished(1, row, line))));
    out[(i64)row * outputs + n] = rounded(x);
  }
#endif
}
