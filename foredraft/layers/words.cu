// Products with weights of 4 bits for few rows; `words_native` launches them.
//
// A warp has 16 outputs and one part of the inputs. It loads their words to registers, units ahead,
// the first ones before the kernel ahead of this one has ended, since weights do not depend on it.
// The words lie in the order in which the matrix units take them, so that a warp's loads are of one
// piece of memory. A block has all parts of its outputs and adds them up in their order, so that a
// row has the bits of `words_kernels`, beside any number of others.
//
// Macros: PARTS; TILES, 16 outputs each, that a block computes at a time; GATED, whether their
// second half is the up projection of the first; GROUPS, pairs of factors of an output in a unit;
// CHANNEL, whether one pair is for all inputs; AHEAD, units in registers; COLUMN_TILES, 8 rows of x
// each; HAS_BIAS.
#define WARPS (PARTS * TILES)
#define OWN (GATED ? TILES / 2 : TILES)  // tiles that a block writes
#define THREADS (WARPS * 32)

struct Unit {
  u32 pairs[4][2][2];  // words 8 i + 2 t and the next of outputs g and g + 8
  u32 factors[GROUPS][2];
};

KERNEL(THREADS) multiply_words(const bfloat* x, const u32* words, const u32* factors, const bfloat* bias,
                      bfloat* out, int rows, int outputs, int line_words) {
  SHARED;
  // Lane 4 g + t has outputs g and g + 8, and inputs 2 t, 2 t + 1, and these plus 8, of 16.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int part = warp / TILES, tile = warp % TILES;
  int first = (blockIdx.x * OWN + tile % OWN) * 16;
  if (first >= outputs) first = outputs - 16;  // another warp's again, not written
  const int line_units = line_words / 32, units = line_units / PARTS, begin = part * units;
  const long long source = (tile / OWN * outputs + first) / 16;

  const u32* words_from = words + (source * line_units + begin) * 512 + lane * 2;
  const u32* factors_from = factors + g;
  if (CHANNEL)
    factors_from += source * 16;
  else
    factors_from += (source * line_units + begin) * (GROUPS * 16);
  auto load = [&](Unit& into, int unit) {
    const u32* from = words_from + unit * 512;
#pragma unroll
    for (int i = 0; i < 8; i++) load_words(into.pairs[i / 2][i % 2], from + i * 64);
    const u32* own = factors_from + (CHANNEL ? 0 : unit * (GROUPS * 16));
#pragma unroll
    for (int i = 0; i < GROUPS * 2; i++) into.factors[i / 2][i % 2] = load_word(own + i * 8);
  };
  Unit ahead[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (i < units) load(ahead[i], i);

  wait_for_kernel_before();
  let_next_kernel_start();
  // Rows of x of AHEAD units of each part, twice; 16 bytes more of a row against bank conflicts.
  const int row_bytes = PARTS * AHEAD * 512 + 16, stage_bytes = rows * row_bytes;
  const u32 x_at = address(shared);
  auto copy_rows = [&](int unit, int stage) {
    constexpr int pieces = AHEAD * 32;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * PARTS * pieces; i += THREADS) {
      const int piece = i % pieces, own = i / pieces % PARTS, row = i / (pieces * PARTS);
      if (unit + piece / 32 < units)
        copy16(x_at + stage * stage_bytes + row * row_bytes + own * (AHEAD * 512) + piece * 16,
               x + ((long long)row * line_units + own * units + unit) * 256 + piece * 8);
    }
    end_copies();
  };
  copy_rows(0, 0);

  u32 columns_at[COLUMN_TILES];
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++) {
    const int row = n * 8 + lane % 8;  // sums of rows that are not there are not written
    columns_at[n] = x_at + (row < rows ? row : 0) * row_bytes + lane / 8 * 16 + part * (AHEAD * 512);
  }
  float sums[COLUMN_TILES][4] = {};
  auto multiply = [&](const Unit& unit, int offset) {
#pragma unroll
    for (int plane = 0; plane < 8; plane++) {
      u32 columns[COLUMN_TILES][4];
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) load_matrices(columns[n], columns_at[n] + offset + plane * 64);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const u32 both = unit.factors[plane * GROUPS / 8][i % 2];
          const u32* pair = unit.pairs[2 * half + i / 2][i % 2];
          const u32 numbers = select_bytes(pair[0], pair[1], plane < 4 ? 0x5410 : 0x7632);
          a[i] = weights_of(numbers >> 4 * (plane % 4), select_bytes(both, both, 0x3232), select_bytes(both, both, 0x1010));
        }
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++)
          multiply_add(sums[n], a, columns[n][2 * half], columns[n][2 * half + 1]);
      }
    }
  };
  int stage = 0;
  for (int unit = 0; unit < units; unit += AHEAD) {
    wait_for_copies<0>();
    meet_block();  // rows have arrived, and those of the units before are free
    if (unit + AHEAD < units) copy_rows(unit + AHEAD, 1 - stage);
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      if (unit + i < units) {
        multiply(ahead[i], stage * stage_bytes + i * 512);
        if (unit + i + AHEAD < units) load(ahead[i], unit + i + AHEAD);
      }
    stage = 1 - stage;
  }

  float* parts = (float*)(shared + 2 * stage_bytes);  // [part][tile][row][16 outputs]
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
