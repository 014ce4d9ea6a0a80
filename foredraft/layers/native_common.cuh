// Instructions of Hopper GPUs as functions; compiled in front of each kernel in CUDA C++.
typedef unsigned int u32;
typedef unsigned long long u64;
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

DEVICE void copy4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

DEVICE void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LATER> DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

DEVICE void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

DEVICE void meet_block() { __syncthreads(); }

DEVICE void meet_warp() { __syncwarp(); }

DEVICE void load8(u32& first, u32& second, u32 at) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "r"(at) : "memory");
}

DEVICE u32 load4(u32 at) {
  u32 word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
  return word;
}

DEVICE void load_matrices(u32* r, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

DEVICE u32 select_bytes(u32 a, u32 b, u32 which) { return __byte_perm(a, b, which); }

// (number - zero) * scale as bfloat16 of the numbers in bits 0 to 3 and 16 to 19, rounded once;
// `zeros` holds -(128 + zero point), `scales` the scale, twice each.
DEVICE u32 weights_of(u32 numbers, u32 zeros, u32 scales) {
  u32 both;
  asm("{\n.reg .b32 t;\nlop3.b32 t, %1, 0x000f000f, 0x43004300, 0xea;\n"
      "fma.rn.bf16x2 t, t, %4, %2;\nfma.rn.bf16x2 %0, t, %3, %5;\n}"
      : "=r"(both) : "r"(numbers), "r"(zeros), "r"(scales), "r"(0x3f803f80u), "r"(0x80008000u));
  return both;
}

// sum += a b for bfloat16, 16 x 16 by 16 x 8.
DEVICE void multiply_add(float* sum, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LATER> DEVICE void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
}

// sum += a b for 8-bit floats in shared memory, 64 x 32 by 32 x WIDTH; a and b are descriptors.
#define FOUR(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
template <int WIDTH> DEVICE void multiply_add_fp8(float* sum, u64 a, u64 b) {
  if constexpr (WIDTH == 8)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, 1, 1, 1;"
        : FOUR(0) : "l"(a), "l"(b));
  else if constexpr (WIDTH == 16)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, "
        "%8, %9, 1, 1, 1;"
        : FOUR(0), FOUR(4) : "l"(a), "l"(b));
  else
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, 1, 1, 1;"
        : FOUR(0), FOUR(4), FOUR(8), FOUR(12) : "l"(a), "l"(b));
}

DEVICE float to_float(bfloat bits) { return __uint_as_float((u32)bits << 16); }

DEVICE bfloat rounded(float x) {
  bfloat bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

// a * b, never fused with an addition.
DEVICE float product(float a, float b) { return __fmul_rn(a, b); }

// The instructions that Triton makes of x / (1 + exp(-x)).
DEVICE float silu(float x) {
  float power, result;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(0.0f - x, __uint_as_float(0x3fb8aa3bu))));
  asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(__fadd_rn(1.0f, power)));
  return result;
}
