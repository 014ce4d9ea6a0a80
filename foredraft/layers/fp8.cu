// Products of 8-bit floats for few rows, with a scale for each row of x and each output; `fp8_native`
// launches them.
//
// A block has 64 outputs, whose weights the matrix units take from shared memory. It copies them
// there many units ahead, and before the kernel ahead of this one has ended, since weights do not
// depend on it. The inputs are added up in one pass, as by `fp8_kernels`.
//
// Macros: COLUMNS, rows of x that the matrix units take, 8, 16 or 32; GATED, whether the second half
// of the outputs is the up projection of the first; SPANS, 128 inputs each, of a unit; STAGES, units
// in shared memory; HAS_BIAS.
#define HALVES (GATED ? 2 : 1)
#define WEIGHT_BYTES 8192  // of 64 outputs and 128 inputs
#define ROW_BYTES (COLUMNS * 128)
#define STAGE_BYTES (SPANS * (HALVES * WEIGHT_BYTES + ROW_BYTES))

// Describes rows of 128 bytes to the matrix units, swizzled by 16 bytes; 8 rows are 1024 bytes.
DEVICE u64 descriptor(u32 at) { return (u64)(at >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

KERNEL(128) multiply_fp8(const unsigned char* x, const float* x_scales, const unsigned char* w,
                         const float* scales, const bfloat* bias, bfloat* out, int rows, int outputs,
                         int inputs) {
  SHARED;
  const int thread = threadIdx.x, line = thread / 8, chunk = thread % 8;
  const int first = blockIdx.x * 64, units = inputs / (128 * SPANS);
  const u32 base = (address(shared) + 1023) & ~1023u;

  // A thread copies 16 bytes of every 16th row.
  const u32 to = line * 128 + (chunk ^ line % 8) * 16;
  const unsigned char* weights_from[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int n = first + i * 16 + line;
    weights_from[i] = w + (long long)(n < outputs ? n : 0) * inputs + chunk * 16;
  }
  const long long second = (long long)outputs * inputs;
  auto copy_weights = [&](int unit, int stage) {
#pragma unroll
    for (int span = 0; span < SPANS; span++)
#pragma unroll
      for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          copy16(base + stage * STAGE_BYTES + (span * HALVES + half) * WEIGHT_BYTES + i * 2048 + to,
                      weights_from[i] + half * second + (unit * SPANS + span) * 128);
  };
  auto copy_rows = [&](int unit, int stage) {
    const u32 at = base + stage * STAGE_BYTES + SPANS * HALVES * WEIGHT_BYTES;
#pragma unroll
    for (int span = 0; span < SPANS; span++)
#pragma unroll
      for (int row = line; row < COLUMNS; row += 16)
        if (row < rows)
          copy16(at + span * ROW_BYTES + (row - line) * 128 + to,
                 x + (long long)row * inputs + chunk * 16 + (unit * SPANS + span) * 128);
  };

  let_next_kernel_start();
#pragma unroll
  for (int i = 0; i < STAGES - 2; i++) {
    if (i < units) copy_weights(i, i);
    end_copies();
  }
  wait_for_kernel_before();
#pragma unroll
  for (int i = 0; i < STAGES - 2; i++) {
    if (i < units) copy_rows(i, i);
    end_copies();
  }

  float sums[HALVES][COLUMNS / 2] = {};
  int stage = 0, next = STAGES - 2;
  for (int unit = 0; unit < units; unit++) {
    wait_for_copies<STAGES - 3>();
    meet_block();
    begin_products();
    const u32 weights_at = base + stage * STAGE_BYTES, rows_at = weights_at + SPANS * HALVES * WEIGHT_BYTES;
#pragma unroll
    for (int span = 0; span < SPANS; span++)
#pragma unroll
      for (int k = 0; k < 128; k += 32)
#pragma unroll
        for (int half = 0; half < HALVES; half++)
          multiply_add_fp8<COLUMNS>(sums[half], descriptor(weights_at + (span * HALVES + half) * WEIGHT_BYTES + k),
                                    descriptor(rows_at + span * ROW_BYTES + k));
    end_products();
    // The products of the unit before the last have ended in every warp.
    if (unit + STAGES - 2 < units) {
      copy_weights(unit + STAGES - 2, next);
      copy_rows(unit + STAGES - 2, next);
    }
    end_copies();
    wait_for_products<1>();
    stage = stage == STAGES - 1 ? 0 : stage + 1;
    next = next == STAGES - 1 ? 0 : next + 1;
  }
  wait_for_products<0>();

#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) {
    const int n = first + thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
    const int row = i / 4 * 8 + thread % 4 * 2 + i % 2;
    if (row < rows && n < outputs) {
      float totals[2];
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        const float scaled = product(product(sums[half][i], scales[half * outputs + n]), x_scales[row]);
        totals[half] = to_float(rounded(scaled));
        if (HAS_BIAS) totals[half] += to_float(bias[half * outputs + n]);
      }
      float result = totals[0];
      if (GATED) result = silu(to_float(rounded(totals[0]))) * to_float(rounded(totals[GATED]));
      out[(long long)row * outputs + n] = rounded(result);
    }
  }
}
