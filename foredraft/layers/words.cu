// Products with weights of 4 bits for few rows; `words_native` launches them.
//
// A warp has 16 outputs and one part of the inputs. It copies their units of words to shared memory,
// STAGES ahead, the first ones before the kernel ahead of this one has ended, since weights do not
// depend on it. A block has all parts of its outputs and adds them up in their order, so that a row
// has the bits of `words_kernels`, beside any number of others.
//
// Macros: PARTS; TILES, 16 outputs each, that a block computes at a time; GATED, whether their
// second half is the up projection of the first; GROUPS, pairs of factors of an output in a unit;
// CHANNEL, whether one pair is for all inputs; STAGES, units in shared memory; COLUMN_TILES, 8 rows
// of x each; HAS_BIAS.
#define WARPS (PARTS * TILES)
#define OWN (GATED ? TILES / 2 : TILES)  // tiles that a block writes
#define THREADS (WARPS * 32)
#define CHUNK 4  // units whose rows of x are copied at a time
#define WORD_BYTES 2048
#define FACTOR_BYTES (CHANNEL ? 0 : 64 * GROUPS)
#define STAGE_BYTES (WORD_BYTES + FACTOR_BYTES)

KERNEL(THREADS) multiply_words(const bfloat* x, const u32* words, const u32* factors, const bfloat* bias,
                      bfloat* out, int rows, int outputs, int line_words) {
  SHARED;
  // Lane 4 g + t has outputs g and g + 8, and inputs 2 t, 2 t + 1, and these plus 8, of 16.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int part = warp / TILES, tile = warp % TILES;
  int first = (blockIdx.x * OWN + tile % OWN) * 16;
  if (first >= outputs) first = outputs - 16;  // another warp's again, not written
  const int line_units = line_words / 32, units = line_units / PARTS, begin = part * units;
  const long long source = (tile / OWN * outputs + first) / 16, unit_from = source * line_units + begin;

  const u32 base = address(shared), barriers = base + warp * (STAGES * 8);
  const u32 ring = base + (WARPS * STAGES * 8 + 127) / 128 * 128 + warp * (STAGES * STAGE_BYTES);
  auto copy = [&](int unit, int stage) {
    const u32 to = ring + stage * STAGE_BYTES, barrier = barriers + stage * 8;
    expect_bytes(barrier, STAGE_BYTES);
    copy_piece(to, words + (unit_from + unit) * 512, WORD_BYTES, barrier);
    if (!CHANNEL) copy_piece(to + WORD_BYTES, factors + (unit_from + unit) * (GROUPS * 16), FACTOR_BYTES, barrier);
  };
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < STAGES; i++) make_barrier(barriers + i * 8);
    end_barriers();
    for (int i = 0; i < STAGES && i < units; i++) copy(i, i);
  }
  u32 both[GROUPS][2];
  if (CHANNEL)
#pragma unroll
    for (int r = 0; r < 2; r++) both[0][r] = load_word(factors + source * 16 + g + r * 8);
  meet_warp();

  wait_for_kernel_before();
  let_next_kernel_start();
  // Rows of x of CHUNK units of each part, twice; 16 bytes more of a row against bank conflicts.
  const int row_bytes = PARTS * CHUNK * 512 + 16, rows_bytes = rows * row_bytes;
  const u32 x_at = base + (WARPS * STAGES * 8 + 127) / 128 * 128 + WARPS * STAGES * STAGE_BYTES;
  auto copy_rows = [&](int unit, int half) {
    constexpr int pieces = CHUNK * 32;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * PARTS * pieces; i += THREADS) {
      const int piece = i % pieces, own = i / pieces % PARTS, row = i / (pieces * PARTS);
      if (unit + piece / 32 < units)
        copy16(x_at + half * rows_bytes + row * row_bytes + own * (CHUNK * 512) + piece * 16,
               x + ((long long)row * line_units + own * units + unit) * 256 + piece * 8);
    }
    end_copies();
  };
  copy_rows(0, 0);

  u32 pairs_at[4], columns_at[COLUMN_TILES];
#pragma unroll
  for (int i = 0; i < 4; i++) pairs_at[i] = ring + g * 128 + (i + g) % 4 * 32 + t * 8;
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++) {
    const int row = n * 8 + lane % 8;  // sums of rows that are not there are not written
    columns_at[n] = x_at + (row < rows ? row : 0) * row_bytes + lane / 8 * 16 + part * (CHUNK * 512);
  }
  float sums[COLUMN_TILES][4] = {};
  int half = 0, stage = 0;
  u32 phase = 0;
  for (int unit = 0; unit < units; unit++) {
    if (unit % CHUNK == 0) {
      wait_for_copies<0>();
      meet_block();  // rows have arrived, and those of the chunk before are free
      if (unit) half = 1 - half;
      if (unit + CHUNK < units) copy_rows(unit + CHUNK, 1 - half);
    }
    wait_for_bytes(barriers + stage * 8, phase);
    u32 pairs[4][2][2];  // words 8 i + 2 t and the next of outputs g and g + 8
#pragma unroll
    for (int i = 0; i < 8; i++) load8(pairs[i / 2][i % 2], pairs_at[i / 2] + stage * STAGE_BYTES + i % 2 * 1024);
    if (!CHANNEL)
#pragma unroll
      for (int i = 0; i < GROUPS * 2; i++)
        both[i / 2][i % 2] = load4(ring + stage * STAGE_BYTES + WORD_BYTES + i / 2 * 64 + (g + i % 2 * 8) * 4);
    meet_warp();  // the stage is free
    if (lane == 0 && unit + STAGES < units) copy(unit + STAGES, stage);
    if (++stage == STAGES) stage = 0, phase ^= 1;

    const u32 offset = half * rows_bytes + unit % CHUNK * 512;
#pragma unroll
    for (int plane = 0; plane < 8; plane++) {
      u32 columns[COLUMN_TILES][4];
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) load_matrices(columns[n], columns_at[n] + offset + plane * 64);
#pragma unroll
      for (int k = 0; k < 2; k++) {
        u32 a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const u32 own = both[plane * GROUPS / 8][i % 2];
          const u32* pair = pairs[2 * k + i / 2][i % 2];
          const u32 numbers = select_bytes(pair[0], pair[1], plane < 4 ? 0x5410 : 0x7632);
          a[i] = weights_of(numbers >> 4 * (plane % 4), select_bytes(own, own, 0x3232), select_bytes(own, own, 0x1010));
        }
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) multiply_add(sums[n], a, columns[n][2 * k], columns[n][2 * k + 1]);
      }
    }
  }

  float* parts = (float*)(shared + (x_at - base) + 2 * rows_bytes);  // [part][tile][row][16 outputs]
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = n * 8 + 2 * t + i % 2;
      if (row < rows) parts[(warp * rows + row) * 16 + g + i / 2 * 8] = sums[n][i];
    }
  meet_block();
  for (int i = threadIdx.x; i < OWN * rows * 16; i += THREADS) {
    const int row = i / 16 % rows, own = i / (16 * rows), n = (blockIdx.x * OWN + own) * 16 + i % 16;
    float totals[2];
#pragma unroll
    for (int k = 0; k < (GATED ? 2 : 1); k++) {
      const float* from = parts + ((k * OWN + own) * rows + row) * 16 + i % 16;
      totals[k] = from[0];
#pragma unroll
      for (int p = 1; p < PARTS; p++) totals[k] += from[p * TILES * rows * 16];
      if (HAS_BIAS && n < outputs) totals[k] += to_float(bias[k * outputs + n]);
    }
    float result = totals[0];
    if (GATED) result = silu(to_float(rounded(totals[0]))) * to_float(rounded(totals[GATED]));
    if (n < outputs) out[(long long)row * outputs + n] = rounded(result);
  }
}
