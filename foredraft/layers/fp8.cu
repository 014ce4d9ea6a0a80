// Products with weights of 8-bit floats for up to 8 rows; `fp8_native` launches them.
//
// A block has TILES tiles of SIZE outputs, whose weights it copies to shared memory, STAGES units of
// STEP * 128 inputs ahead, the first ones before the kernel ahead of this one has ended. A tile is the
// left operand of the matrix units, which want 64 outputs: they read what lies behind those that are
// there, and make sums of it that nobody reads. The sums are in the order of `fp8_kernels`.
//
// Macros: SIZE, a multiple of 8; TILES; GATED, whether the second half of the tiles is the up
// projection of the first; STEP; STAGES; HAS_BIAS; ROUNDS, whether x is bfloat16, at most two rows,
// which each block rounds for itself as `quantize_rows` of `fp8_kernels` does.
#define LINES (SIZE * TILES)
#define OWN (GATED ? LINES / 2 : LINES)  // outputs that a block writes
#define ATOM_BYTES (LINES * 128)
#define STAGE_BYTES (STEP * ATOM_BYTES)
#define THREADS 128
#define PIECES ((LINES * 8 + THREADS - 1) / THREADS)  // of 16 bytes, that a thread copies of each atom

KERNEL(THREADS) multiply_fp8(const void* x, const float* x_scales, const unsigned char* weights,
                      const float* scales, const bfloat* bias, bfloat* out, int rows, int outputs, int inputs) {
  SHARED;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  int first = blockIdx.x * OWN;
  if (first + OWN > outputs) first = outputs - OWN;  // some of another block's again
  const int units = inputs / (STEP * 128);
  const u32 ring = address(shared), x_at = ring + STAGES * STAGE_BYTES;

  // Pieces of a line lie in the order that the matrix units read without bank conflicts.
  const int line = threadIdx.x / 8, piece = threadIdx.x % 8;
  const u32 to = ring + line * 128 + (piece ^ line % 8) * 16;
  const unsigned char* from = weights + (long long)(first + line) * inputs + piece * 16;
  auto copy_unit = [&](int unit) {
    if (unit < units) {
      const u32 stage = unit % STAGES * STAGE_BYTES;
#pragma unroll
      for (int step = 0; step < STEP; step++)
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
          const int own = line + i * 16;
          if (PIECES * 16 > LINES && own >= LINES) continue;
          const long long row = i * 16 + (GATED && own >= OWN ? outputs - OWN : 0);
          copy16(to + stage + step * ATOM_BYTES + i * 2048, from + row * inputs + (unit * STEP + step) * 128);
        }
    }
    end_copies();
  };
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) copy_unit(i);
  wait_for_kernel_before();
  let_next_kernel_start();
  // Pieces of 16 bytes of all rows lie together. The matrix units want eight rows: the others are
  // the pieces that follow, and nobody reads their sums.
  const int row_pieces = inputs / 16;
  float row_scales[2] = {};
  if (ROUNDS) {
    const bfloat* numbers = (const bfloat*)x;
    const u32 largest_at = x_at + rows * inputs;  // [row][warp]
    for (int row = 0; row < rows; row++) {
      u32 largest = 0;
#pragma unroll 4
      for (int i = threadIdx.x; i < row_pieces * 2; i += THREADS) {
        u32 words[4];
        load16(words, numbers + (long long)row * inputs + i * 8);
#pragma unroll
        for (int j = 0; j < 4; j++) largest = max(largest, max(words[j] & 0x7fff, words[j] >> 16 & 0x7fff));
      }
      largest = largest_of_warp(largest);
      if (lane == 0) store4(largest_at + (row * 4 + warp) * 4, to_float(largest));
    }
    meet_block();
#pragma unroll
    for (int row = 0; row < 2; row++) {
      if (row >= rows) break;
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; i++) largest = max(largest, as_float(load4(largest_at + (row * 4 + i) * 4)));
      row_scales[row] = max(divided(largest, 448.0f), 1e-12f);
    }
    meet_block();
#pragma unroll 2
    for (int i = threadIdx.x; i < rows * row_pieces; i += THREADS) {
      const int row = i / row_pieces, own = i % row_pieces;
      const float scale = row ? row_scales[1] : row_scales[0];
      u32 words[8], rounded_words[4];
      load16(words, numbers + (long long)i * 16);
      load16(words + 4, numbers + (long long)i * 16 + 8);
#pragma unroll
      for (int j = 0; j < 4; j++) rounded_words[j] = small_floats(words[2 * j], words[2 * j + 1], scale);
      store16(x_at + (own * rows + row) * 16, rounded_words);
    }
  } else {
#pragma unroll 4
    for (int i = threadIdx.x; i < rows * row_pieces; i += THREADS) {
      const int row = i / row_pieces, own = i % row_pieces;
      u32 words[4];
      load16(words, (const unsigned char*)x + (long long)i * 16);
      store16(x_at + (own * rows + row) * 16, words);
    }
  }

  float sums[TILES][4] = {};
  for (int unit = 0; unit < units; unit++) {
    wait_for_copies<STAGES - 3>();
    show_to_matrix_units();
    meet_block();  // the unit is here, and the one before the last is done with
    if (unit >= 2)
      copy_unit(unit - 2 + STAGES);
    else
      end_copies();
    begin_products();
    const u32 stage = ring + unit % STAGES * STAGE_BYTES, columns = x_at + unit * (STEP * 128) * rows;
#pragma unroll
    for (int step = 0; step < STEP; step++)
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int i = 0; i < TILES; i++)
          multiply_tile(sums[i], tile_at(stage + step * ATOM_BYTES + i * (SIZE * 128) + k * 32), columns_at(columns + (step * 128 + k * 32) * rows, rows));
    end_products();
    wait_for_products<1>();
  }
  wait_for_products<0>();

  constexpr int halves = GATED ? 2 : 1, own_tiles = TILES / halves;
#pragma unroll
  for (int i = 0; i < own_tiles; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int output = 16 * warp + g + j / 2 * 8, row = 2 * t + j % 2, n = first + i * SIZE + output;
      if (output >= SIZE || row >= rows) continue;
      const float row_scale = !ROUNDS ? x_scales[row] : row ? row_scales[1] : row_scales[0];
      float totals[2];
#pragma unroll
      for (int k = 0; k < halves; k++) {
        totals[k] = to_float(rounded(sums[k * own_tiles + i][j] * scales[k * outputs + n] * row_scale));
        if (HAS_BIAS) totals[k] += to_float(bias[k * outputs + n]);
      }
      float result = totals[0];
      if (GATED) result = silu(to_float(rounded(totals[0]))) * to_float(rounded(totals[halves - 1]));
      out[(long long)row * outputs + n] = rounded(result);
    }
}
