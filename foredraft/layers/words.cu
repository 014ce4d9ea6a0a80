// Products with weights of 4 bits for up to 8 rows; `words_native` launches them.
//
// A warp has 16 outputs and one part of the inputs. It copies their words to shared memory, STAGES
// units ahead, the first ones before the kernel ahead of this one has ended, since weights do not
// depend on it. A block has all parts of its outputs and adds them up in their order, so that a row
// has the bits of `words_kernels`, beside any number of others.
//
// A number in bits 0 to 3 of a half-word is a bfloat16 of so many times 2^-133, the smallest one, and in
// bits 4 to 7 of 16 times that, without a conversion. Factors are those of `words_cuda`.
//
// Macros: INPUTS; PARTS; TILES, 16 outputs each, that a block computes; GATED, whether their second
// half is the up projection of the first; GROUPS, pairs of factors of an output in a unit; CHANNEL,
// whether one pair is for all inputs; STAGES, units in shared memory; HAS_BIAS;
// FORM, see `words_factors`.
#define UNITS (INPUTS / 256 / PARTS)
#define LINE (INPUTS / 8)  // words of an output
#define WARPS (PARTS * TILES)
#define THREADS (WARPS * 32)
#define OWN (GATED ? TILES / 2 : TILES)  // tiles that a block writes
#define WORD_BYTES 2048
#define STAGE_BYTES (WORD_BYTES + (CHANNEL ? 0 : 64 * GROUPS))
#define BARRIER_BYTES 128
enum { STEPS, OFFSETS, LARGE_OFFSETS };
#define MINUS_ZERO 0x80008000u  // leaves a sum as it is

// chunk: units of each part whose columns of x are in shared memory at a time, twice if there are
// more.
KERNEL(THREADS) multiply_words(const bfloat* x, const u32* words, const u32* factors, const bfloat* bias,
                      bfloat* out, int rows, int outputs, int chunk) {
  SHARED;
  // Lane 4 g + t has outputs g and g + 8, and inputs 2 t, 2 t + 1, and these plus 8, of 16.
  const int lane = threadIdx.x % 32, warp = same_in_warp(threadIdx.x / 32), g = lane / 4, t = lane % 4;
  const int part = warp / TILES, tile = warp % TILES;
  int first = (blockIdx.x * OWN + tile % OWN) * 16;
  if (first >= outputs) first = outputs - 16;  // another warp's again, not written
  const int all_outputs = GATED ? 2 * outputs : outputs, source = tile / OWN * outputs + first;

  // A lane copies 16 bytes of every fourth output's line of 128, at places where reading has no bank
  // conflicts.
  const u32 barriers = address(shared), rings = barriers + BARRIER_BYTES, ring = rings + warp * (STAGES * STAGE_BYTES);
  const u32* words_from = words + (long long)(source + lane / 8) * LINE + part * UNITS * 32 + lane % 8 * 4;
  const u32 words_to = ring + lane / 8 * 128 + (lane % 8 ^ lane / 8 * 2) * 16;
  const u32* factors_from = factors + source;
  if (!CHANNEL) factors_from += (long long)(part * UNITS * GROUPS + lane / 4) * all_outputs + lane % 4 * 4;
  const u32 factors_to = ring + WORD_BYTES + lane * 16;
  const bool has_factors = !CHANNEL && lane < GROUPS * 4;
  auto copy_next_unit = [&](u32 stage) {
#pragma unroll
    for (int i = 0; i < 4; i++) copy16(words_to + stage + i * 512, words_from + i * 4 * LINE);
    if (has_factors) copy16(factors_to + stage, factors_from);
    words_from += 32;
    if (!CHANNEL) factors_from += GROUPS * all_outputs;
  };
#pragma unroll
  for (int i = 0; i < STAGES; i++) {
    if (i < UNITS) copy_next_unit(i * STAGE_BYTES);
    end_copies();
  }
  u32 both[GROUPS][2];
  if (CHANNEL)
#pragma unroll
    for (int r = 0; r < 2; r++) both[0][r] = load_word(factors + source + g + r * 8);
  if (threadIdx.x == 0) {
    make_barrier(barriers);
    make_barrier(barriers + 8);
    end_barriers();
  }

  wait_for_kernel_before();
  let_next_kernel_start();
  // Rows of x: 16 bytes more of each against bank conflicts.
  const u32 x_at = rings + WARPS * STAGES * STAGE_BYTES;
  const int row_bytes = PARTS * chunk * 512 + 16;
  auto copy_rows = [&](int unit, int half) {
    const int count = min(chunk, UNITS - unit), lot = rows * PARTS;
    const int together = chunk == UNITS ? PARTS : 1;  // parts that follow each other
    if (lane == 0) expect_bytes(barriers + half * 8, lot * count * 512);
    meet_warp();
#pragma unroll 1
    for (int i = lane * together; i < lot; i += 32 * together)
      copy_piece(x_at + (half * rows + i / PARTS) * row_bytes + i % PARTS * chunk * 512,
                 x + ((long long)i * UNITS + unit) * 256, together * count * 512, barriers + half * 8);
  };
  if (warp == 0) copy_rows(0, 0);

  u32 pairs_at[4];
#pragma unroll
  for (int i = 0; i < 4; i++) pairs_at[i] = ring + g * 128 + ((i ^ g % 4) * 2 + t / 2) * 16 + t % 2 * 8;
  const int own_row = lane % 8 < rows ? lane % 8 : 0;  // sums of rows that are not there are not written
  const u32 columns_at = x_at + own_row * row_bytes + part * chunk * 512 + lane / 8 * 16;
  float sums[4] = {};
  u32 stage = 0;  // bytes of the ring before the unit
#pragma unroll 1
  for (int begin = 0, turn = 0; begin < UNITS; begin += chunk, turn++) {
    const int half = turn & 1;
    meet_block();  // barriers are made, and the columns of the chunk before are free
    if (warp == 0 && begin + chunk < UNITS) copy_rows(begin + chunk, half ^ 1);
    wait_for_phase(barriers + half * 8, turn >> 1 & 1);
    const int end = min(begin + chunk, UNITS);
    u32 columns_of_unit = columns_at + half * rows * row_bytes;
#pragma unroll 1
    for (int unit = begin; unit < end; unit++) {
      wait_for_copies<STAGES - 1>();
      meet_warp();
      u32 pairs[4][2][2];  // words 8 i + 2 t and the next of outputs g and g + 8
#pragma unroll
      for (int i = 0; i < 8; i++) load8(pairs[i / 2][i % 2], pairs_at[i / 2] + stage + i % 2 * 1024);
      if (!CHANNEL)
#pragma unroll
        for (int i = 0; i < GROUPS * 2; i++)
          both[i / 2][i % 2] = load4(ring + stage + g * 4 + WORD_BYTES + i / 2 * 64 + i % 2 * 32);
      meet_warp();  // the stage is free
      if (unit + STAGES < UNITS) copy_next_unit(stage);
      end_copies();
      stage = stage == (STAGES - 1) * STAGE_BYTES ? 0 : stage + STAGE_BYTES;

      u32 offsets[GROUPS][2], scales_low[GROUPS][2], scales_high[GROUPS][2];  // twice each
#pragma unroll
      for (int i = 0; i < GROUPS * 2; i++) {
        const u32 own = both[i / 2][i % 2], scale = select_bytes(own, own, 0x1010);
        offsets[i / 2][i % 2] = select_bytes(own, own, 0x3232);
        scales_high[i / 2][i % 2] = scale;
        scales_low[i / 2][i % 2] = FORM == OFFSETS ? multiply_add_pair(scale, 0x41804180u, MINUS_ZERO) : scale;
      }
      u32 columns[2][4];  // of a plane and the next
      load_matrices(columns[0], columns_of_unit);
#pragma unroll
      for (int step = 0; step < 16; step++) {
        const int plane = step / 2, k = step % 2;
        if (k == 0 && plane < 7) load_matrices(columns[(plane + 1) % 2], columns_of_unit + (plane + 1) * 64);
        u32 a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int group = plane * GROUPS / 8;
          const u32* pair = pairs[2 * k + i / 2][i % 2];
          const u32 halves = select_bytes(pair[0], pair[1], plane < 4 ? 0x5410 : 0x7632);
          const bool is_high = FORM == LARGE_OFFSETS || plane % 2;  // bits 4 to 7 of a half-word, else 0 to 3
          const int shift = 4 * (plane % 4) - 4 * is_high;
          const u32 numbers = (shift < 0 ? halves << 4 : halves >> shift) & (is_high ? 0x00f000f0u : 0x000f000fu);
          const u32 scale = (is_high ? scales_high : scales_low)[group][i % 2], offset = offsets[group][i % 2];
          if (FORM == STEPS)  // first number - zero
            a[i] = multiply_add_pair(multiply_add_pair(numbers, is_high ? 0x7d007d00u : 0x7f007f00u, offset), scale, MINUS_ZERO);
          else
            a[i] = multiply_add_pair(numbers, scale, offset);
        }
        multiply_add(sums, a, columns[plane % 2][2 * k], columns[plane % 2][2 * k + 1]);
      }
      columns_of_unit += 512;
    }
  }

  // A warp's sums take the place of its words, [row][16 outputs].
  meet_warp();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = 2 * t + i % 2;
    if (row < rows) store4(ring + (row * 16 + g + i / 2 * 8) * 4, sums[i]);
  }
  meet_block();
  for (int i = threadIdx.x; i < OWN * rows * 16; i += THREADS) {
    const int own = i / (16 * rows), row = i / 16 % rows, n = (blockIdx.x * OWN + own) * 16 + i % 16;
    float totals[2];
#pragma unroll
    for (int k = 0; k < (GATED ? 2 : 1); k++) {
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        const u32 from = rings + (p * TILES + k * OWN + own) * (STAGES * STAGE_BYTES);
        const float sum = as_float(load4(from + (row * 16 + i % 16) * 4));
        totals[k] = p ? totals[k] + sum : sum;
      }
      if (HAS_BIAS && n < outputs) totals[k] += to_float(bias[k * outputs + n]);
    }
    float result = totals[0];
    if (GATED) result = silu(to_float(rounded(totals[0]))) * to_float(rounded(totals[GATED]));
    if (n < outputs) out[(long long)row * outputs + n] = rounded(result);
  }
}
