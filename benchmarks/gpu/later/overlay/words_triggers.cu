#ifndef TRIGGER
#define TRIGGER 0
#endif
// Products with weights of 4 bits for few rows; `words_cuda` launches them.
//
// A warp has 16 outputs and one part of the inputs. It copies their words to shared memory, many
// units ahead, and before the kernel ahead of this one has ended, since weights do not depend on
// it. Then it makes 16-bit floats of them in registers, in the layout of the matrix units, whose
// columns are the rows of x. A block has all parts of its outputs and adds them up in their order,
// so that a row has the bits of `words_kernels`, beside any number of others.
//
// Macros: PARTS; TILES, 16 outputs each, that a block computes at a time; GATED, whether their
// second half is the up projection of the first; GROUPS, pairs of factors of an output in a unit;
// CHANNEL, whether one pair is for all inputs; STAGES, units in shared memory; COLUMN_TILES, 8 rows
// of x each; HAS_BIAS.
#define WARPS (PARTS * TILES)
#define OWN (GATED ? TILES / 2 : TILES)  // tiles that a block writes
// Bytes of a stage: the words of a warp, its factors, and a row of x, 16 bytes of it against bank
// conflicts.
#define WORD_BYTES 2048
#define FACTOR_BYTES (64 * GROUPS)
#define ROW_BYTES 528

KERNEL(WARPS * 32) multiply_words(const bfloat* x, const u32* words, const u32* factors, const bfloat* bias,
                      bfloat* out, int rows, int outputs, int line_words) {
  SHARED;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int part = warp / TILES, tile = warp % TILES;
  int first = (blockIdx.x * OWN + tile % OWN) * 16;
  if (first >= outputs) first = outputs - 16;  // another warp's again, not written
  const int all_outputs = GATED ? 2 * outputs : outputs;
  const int source = tile / OWN * outputs + first;
  const int share = line_words / PARTS, units = share / 32;
  const int begin = part * share;  // the part's first word
  const int x_bytes = rows * ROW_BYTES, stage_bytes = WARPS * (WORD_BYTES + FACTOR_BYTES) + PARTS * x_bytes;

  const u32 base = address(shared);
  const u32 words_at = base + warp * WORD_BYTES;
  const u32 factors_at = base + WARPS * WORD_BYTES + warp * FACTOR_BYTES;
  const u32 x_at = base + WARPS * (WORD_BYTES + FACTOR_BYTES) + part * x_bytes;

  // A lane copies 16 bytes of every fourth output, swizzled so that `load8` has no bank conflicts.
  const int line = lane / 8, chunk = lane % 8;
  const u32* words_from = words + (long long)(source + line) * line_words + begin + chunk * 4;
  const u32 words_to = words_at + line * 128 + (chunk ^ (line * 2)) * 16;
  const u32* factors_from = factors + source + lane % 16;
  auto copy_words = [&](int unit, int stage) {
    const u32 offset = stage * stage_bytes;
#pragma unroll
    for (int i = 0; i < 4; i++)
      copy16(words_to + offset + i * 512, words_from + i * 4 * line_words + unit * 32);
    const int group = CHANNEL ? 0 : (begin / 32 + unit) * GROUPS;
#pragma unroll
    for (int i = lane / 16; i < GROUPS; i += 2)
      copy4(factors_at + offset + i * 64 + lane % 16 * 4, factors_from + (long long)(group + i) * all_outputs);
  };
  auto copy_rows = [&](int unit, int stage) {
    const bfloat* from = x + begin * 8 + unit * 256;
    for (int i = tile * 32 + lane; i < rows * 32; i += TILES * 32)
      copy16(x_at + stage * stage_bytes + i / 32 * ROW_BYTES + i % 32 * 16,
             from + (long long)(i / 32) * line_words * 8 + i % 32 * 8);
  };

#if TRIGGER == 0
  let_next_kernel_start();
#endif
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (i < units) copy_words(i, i);
    end_copies();
  }
  wait_for_kernel_before();
#if TRIGGER == 1
  let_next_kernel_start();
#endif
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (i < units) copy_rows(i, i);
    end_copies();
  }

  // Lane 4 g + t has outputs g and g + 8, and inputs 2 t, 2 t + 1, and these plus 8, of 16.
  const int g = lane / 4, t = lane % 4;
  u32 pairs_at[4], columns_at[COLUMN_TILES];
#pragma unroll
  for (int i = 0; i < 4; i++) pairs_at[i] = words_at + g * 128 + ((i ^ g % 4) * 2 + t / 2) * 16 + t % 2 * 8;
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++) {
    const int row = n * 8 + lane % 8;  // sums of rows that are not there are not written
    columns_at[n] = x_at + (row < rows ? row : 0) * ROW_BYTES + lane / 8 * 16;
  }
  float sums[COLUMN_TILES][4] = {};
  u32 offset = 0, last = (STAGES - 1) * stage_bytes;
  for (int unit = 0; unit < units; unit++) {
    wait_for_copies<STAGES - 2>();
    if (TILES > 1)
      meet_block();
    else
      meet_warp();
    // The stage of the unit before is free now.
    if (unit + STAGES - 1 < units) {
      const int stage = (unit + STAGES - 1) % STAGES;
      copy_words(unit + STAGES - 1, stage);
      copy_rows(unit + STAGES - 1, stage);
    }
    end_copies();

    u32 pairs[2][4][2];  // of outputs g and g + 8: low and high halves of words 8 i + 2 t and the next
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 a, b;
        load8(a, b, pairs_at[i] + offset + r * 1024);
        pairs[r][i][0] = select_bytes(a, b, 0x5410);
        pairs[r][i][1] = select_bytes(a, b, 0x7632);
      }
    u32 zeros[2], scales[2];
#pragma unroll
    for (int plane = 0; plane < 8; plane++) {
      if (plane * GROUPS % 8 == 0) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const u32 both = load4(factors_at + offset + plane * GROUPS / 8 * 64 + (g + 8 * r) * 4);
          zeros[r] = select_bytes(both, both, 0x3232);
          scales[r] = select_bytes(both, both, 0x1010);
        }
      }
      u32 columns[COLUMN_TILES][4];
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) load_matrices(columns[n], columns_at[n] + offset + plane * 64);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 a[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
          a[i] = weights_of(pairs[i % 2][2 * half + i / 2][plane / 4] >> 4 * (plane % 4), zeros[i % 2], scales[i % 2]);
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++)
          multiply_add(sums[n], a, columns[n][2 * half], columns[n][2 * half + 1]);
      }
    }
    offset = offset == last ? 0 : offset + stage_bytes;
  }

#if TRIGGER == 2
  let_next_kernel_start();
#endif
  float* parts = (float*)(shared + STAGES * stage_bytes);  // [part][tile][row][16 outputs]
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = n * 8 + 2 * t + i % 2;
      if (row < rows) parts[(warp * rows + row) * 16 + g + i / 2 * 8] = sums[n][i];
    }
  meet_block();
  for (int i = threadIdx.x; i < OWN * rows * 16; i += WARPS * 32) {
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
