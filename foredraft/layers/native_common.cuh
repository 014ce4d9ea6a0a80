// Instructions of Hopper GPUs as functions; compiled in front of each kernel in CUDA C++.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short bfloat;  // bits of a bfloat16

#define DEVICE __device__ __forceinline__
#define SHARED extern __shared__ __align__(1024) unsigned char shared[]
#define KERNEL(THREADS) extern "C" __global__ void __launch_bounds__(THREADS)

DEVICE u32 address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// Without a hint for the L2 cache: ptxas of CUDA 13.0 makes illegal instructions of some copies with
// one.
DEVICE void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Not `ld.global.nc`: ptxas moves such loads behind the wait for the kernel before.
DEVICE u32 load_word(const u32* from) {
  u32 word;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}

DEVICE float load_float(const float* from) { return __uint_as_float(load_word((const u32*)from)); }

DEVICE i64 load_long(const i64* from) {
  i64 number;
  asm volatile("ld.global.s64 %0, [%1];" : "=l"(number) : "l"(from) : "memory");
  return number;
}

// Barriers: a phase ends when `count` have arrived and the bytes that they expect have come.
DEVICE void make_barrier(u32 at, u32 count = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

DEVICE void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }

DEVICE void end_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void expect_bytes(u32 barrier, u32 count) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

DEVICE void copy_piece(u32 to, const void* from, u32 count, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(count), "r"(barrier) : "memory");
}

// Part of a matrix: 128 bytes of some lines, which the copy engine lays so that the matrix units can read it.
struct __align__(64) TensorMap {
  u64 words[16];
};
#define TENSOR_MAP const __grid_constant__ TensorMap

DEVICE void copy_tile(u32 to, const TensorMap& map, int column, int line, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(to), "l"(&map), "r"(column), "r"(line), "r"(barrier) : "memory");
}

DEVICE void wait_for_phase(u32 barrier, u32 phase) {
  asm volatile("{\n.reg .pred p;\nAGAIN%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra AGAIN%=;\n}"
               ::"r"(barrier), "r"(phase) : "memory");
}

DEVICE void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LATER> DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

DEVICE void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

DEVICE void meet_block() { __syncthreads(); }

// The first `count` threads of the block.
DEVICE void meet_threads(u32 count) { asm volatile("bar.sync 1, %0;" ::"r"(count) : "memory"); }

DEVICE void meet_warp() { __syncwarp(); }

// A number that all lanes have in common, as the compiler then knows.
DEVICE u32 same_in_warp(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }

DEVICE void load8(u32* into, u32 at) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(into[0]), "=r"(into[1]) : "r"(at) : "memory");
}

DEVICE u32 load4(u32 at) {
  u32 word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
  return word;
}

DEVICE void store4(u32 at, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory"); }

DEVICE float as_float(u32 word) { return __uint_as_float(word); }

DEVICE void load_matrices(u32* r, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

DEVICE u32 select_bytes(u32 a, u32 b, u32 which) { return __byte_perm(a, b, which); }

// a b + c for two bfloat16 each, rounded once; also those below the smallest normal one.
DEVICE u32 multiply_add_pair(u32 a, u32 b, u32 c) {
  u32 both;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(both) : "r"(a), "r"(b), "r"(c));
  return both;
}

// sum += a b for bfloat16, 16 x 16 by 16 x 8.
DEVICE void multiply_add(float* sum, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// What the matrix units need to know of a tile of lines of 128 bytes, of eight lines each 1,024 bytes.
DEVICE u64 tile_at(u32 at) { return (u64)(at >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LATER> DEVICE void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
}

// sums += a b^T for 64 lines of a, 8 lines of b and 32 bytes of columns of so many bytes each, by four
// warps: a thread has the sums of the line of a fourth of its lane, and 16 for each warp, with two lines
// of b, then those of the line 8 further.
template <int BYTES> DEVICE void multiply_tile(float* sums, u32 a, u32 b) {
  if (BYTES == 1)
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, p, 1, 1;\n}"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "l"(tile_at(a)), "l"(tile_at(b)) : "memory");
  else
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0;\n}"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "l"(tile_at(a)), "l"(tile_at(b)) : "memory");
}

DEVICE float multiplied(float x, float y) { return __fmul_rn(x, y); }

DEVICE float added(float x, float y) { return __fadd_rn(x, y); }

DEVICE float multiplied_added(float x, float y, float z) { return __fmaf_rn(x, y, z); }

DEVICE float to_float(bfloat bits) { return __uint_as_float((u32)bits << 16); }

DEVICE bfloat rounded(float x) {
  bfloat bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

// The instructions that Triton makes of x / (1 + exp(-x)).
DEVICE float silu(float x) {
  float power, result;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(0.0f - x, __uint_as_float(0x3fb8aa3bu))));
  asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(__fadd_rn(1.0f, power)));
  return result;
}
