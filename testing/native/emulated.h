// Stands in for native_common.cuh: runs kernels on a CPU, a thread for each thread of a block, one
// block after the other. Copies are done at once, so that it shows wrong indexes, not wrong waits.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short bfloat;

#define DEVICE inline
#define SHARED unsigned char* shared = shared_memory
#define KERNEL(THREADS) \
  const int num_threads = THREADS; \
  void

struct Index {
  int x;
};

// What the lanes of a warp hand to each other.
struct Warp {
  std::barrier<> all{32};
  u32 addresses[32], a[32][4], b[32][2];
};

thread_local Index threadIdx, blockIdx;
alignas(1024) unsigned char shared_memory[1 << 18];
std::vector<std::unique_ptr<Warp>> warps;
std::unique_ptr<std::barrier<>> block, most;  // of all threads, and of all but the last warp

Warp& own_warp() { return *warps[threadIdx.x / 32]; }

u32 address(const void* at) { return (u32)((const unsigned char*)at - shared_memory); }
void copy16(u32 to, const void* from) {
  if ((to | (uintptr_t)from) % 16) abort();
  memcpy(shared_memory + to, from, 16);
}
u32 load_word(const u32* from) { return *from; }
float load_float(const float* from) { return *from; }
i64 load_long(const i64* from) { return *from; }

// Its phase ends when enough threads have arrived, and the bytes that they expect have come.
struct Barrier {
  u32 count;
  long pending = count, missing = 0;
  std::atomic<u32> phase = 0;
  void end_if_done() {
    if (pending < 0) abort();
    if (pending || missing) return;
    pending = count, phase ^= 1;
    phase.notify_all();
  }
};
std::mutex barriers_lock;
std::map<u32, Barrier> barriers_by_address;

void make_barrier(u32 at, u32 count = 1) {
  if (at % 8) abort();
  std::lock_guard lock(barriers_lock);
  barriers_by_address.erase(at);
  barriers_by_address.try_emplace(at, count);
}
void end_barriers() {}
void arrive(u32 at) {
  std::lock_guard lock(barriers_lock);
  Barrier& barrier = barriers_by_address.at(at);
  barrier.pending--;
  barrier.end_if_done();
}
void expect_bytes(u32 at, u32 count) {
  std::lock_guard lock(barriers_lock);
  Barrier& barrier = barriers_by_address.at(at);
  barrier.missing += count, barrier.pending--;
  barrier.end_if_done();
}
void copy_piece(u32 to, const void* from, u32 count, u32 at) {
  if ((to | (uintptr_t)from | count) % 16) abort();
  std::lock_guard lock(barriers_lock);
  memcpy(shared_memory + to, from, count);
  Barrier& barrier = barriers_by_address.at(at);
  barrier.missing -= count;
  barrier.end_if_done();
}

// 16 bytes of tiles change places within eight lines of 128 bytes.
u32 placed(u32 at) { return at ^ (at >> 7 & 7) << 4; }

struct TensorMap {
  const unsigned char* from;
  int num_lines, line_bytes, lines;
};
#define TENSOR_MAP const TensorMap&

// Columns are numbers of ITEM bytes.
#define copy_tile(to, map, column, line, at) copy_lines(to, map, (column) * ITEM, line, at)
void copy_lines(u32 to, const TensorMap& map, int first_byte, int line, u32 at) {
  if (to % 1024 || first_byte < 0 || line < 0 || map.lines > 256) abort();
  std::lock_guard lock(barriers_lock);
  for (int i = 0; i < map.lines * 128; i++) {
    const int byte = first_byte + i % 128, own = line + i / 128;
    const bool is_there = byte < map.line_bytes && own < map.num_lines;
    shared_memory[placed(to + i)] = is_there ? map.from[(i64)own * map.line_bytes + byte] : 0;
  }
  Barrier& barrier = barriers_by_address.at(at);
  barrier.missing -= map.lines * 128;
  barrier.end_if_done();
}
void wait_for_phase(u32 at, u32 phase) {
  Barrier* barrier;
  {
    std::lock_guard lock(barriers_lock);
    barrier = &barriers_by_address.at(at);
  }
  barrier->phase.wait(phase);
}
void end_copies() {}
template <int LATER> void wait_for_copies() {}
void wait_for_kernel_before() {}
void let_next_kernel_start() {}
void meet_block() { block->arrive_and_wait(); }
void meet_threads(u32) { most->arrive_and_wait(); }
void meet_warp() { own_warp().all.arrive_and_wait(); }
int same_in_warp(int x) { return x; }

u32 load4(u32 at) {
  u32 word;
  memcpy(&word, shared_memory + at, 4);
  return word;
}
void load8(u32* into, u32 at) {
  if (at % 8) abort();
  into[0] = load4(at), into[1] = load4(at + 4);
}
float as_float(u32 word) {
  float x;
  memcpy(&x, &word, 4);
  return x;
}
void store4(u32 at, float x) { memcpy(shared_memory + at, &x, 4); }
using std::min;
void load_matrices(u32* r, u32 at) {
  Warp& warp = own_warp();
  const int lane = threadIdx.x % 32;
  warp.addresses[lane] = at;
  meet_warp();
  for (int i = 0; i < 4; i++) r[i] = load4(warp.addresses[8 * i + lane / 4] + lane % 4 * 4);
  meet_warp();
}
u32 select_bytes(u32 a, u32 b, u32 which) {
  const u64 both = (u64)b << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; i++) out |= (u32)(both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
  return out;
}

float to_float(bfloat bits) {
  const u32 word = (u32)bits << 16;
  float x;
  memcpy(&x, &word, 4);
  return x;
}
bfloat rounded(float x) {
  u32 word;
  memcpy(&word, &x, 4);
  return (word + 0x7fff + (word >> 16 & 1)) >> 16;
}
u32 multiply_add_pair(u32 a, u32 b, u32 c) {
  u32 out = 0;
  for (int i = 0; i < 32; i += 16)
    out |= (u32)rounded((double)to_float(a >> i) * to_float(b >> i) + to_float(c >> i)) << i;
  return out;
}
// Element (i, k) of a is in lane i % 8 * 4 + k % 8 / 2, element (k, j) of b in j * 4 + k % 8 / 2.
void multiply_add(float* sum, const u32* a, u32 b0, u32 b1) {
  Warp& warp = own_warp();
  const int lane = threadIdx.x % 32;
  memcpy(warp.a[lane], a, 16);
  warp.b[lane][0] = b0, warp.b[lane][1] = b1;
  meet_warp();
  for (int r = 0; r < 4; r++) {
    const int i = lane / 4 + r / 2 * 8, j = lane % 4 * 2 + r % 2;
    for (int k = 0; k < 16; k++) {
      const u32 left = warp.a[i % 8 * 4 + k % 8 / 2][i / 8 + k / 8 * 2];
      const u32 right = warp.b[j * 4 + k % 8 / 2][k / 8];
      sum[r] += to_float(left >> k % 2 * 16) * to_float(right >> k % 2 * 16);
    }
  }
  meet_warp();
}
float of_eight_bits(unsigned char bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  const float x = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
  return bits & 128 ? -x : x;
}
// Done at once, by each thread on its own; a warp's are done together.
void begin_products() {}
void end_products() {}
template <int LATER> void wait_for_products() { meet_warp(); }
template <int BYTES> void multiply_tile(float* sums, u32 a, u32 b) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  auto number = [](u32 at) {
    const unsigned char* from = shared_memory + placed(at);
    return BYTES == 1 ? of_eight_bits(*from) : to_float(from[0] | from[1] << 8);
  };
  for (int i = 0; i < 4; i++) {
    const u32 line = a + (warp * 16 + lane / 4 + i / 2 * 8) * 128, row = b + (lane % 4 * 2 + i % 2) * 128;
    for (int k = 0; k < 32; k += BYTES) sums[i] += number(line + k) * number(row + k);
  }
}
float multiplied(float x, float y) { return x * y; }
float added(float x, float y) { return x + y; }
float multiplied_added(float x, float y, float z) { return std::fma(x, y, z); }
float silu(float x) { return x / (1.0f + std::exp(-x)); }

template <typename Run> void run_blocks(int blocks, int threads, Run run) {
  for (int i = 0; i < threads / 32; i++) warps.push_back(std::make_unique<Warp>());
  block = std::make_unique<std::barrier<>>(threads);
  most = std::make_unique<std::barrier<>>(threads - 32);
  for (int b = 0; b < blocks; b++) {
    std::vector<std::thread> all;
    for (int i = 0; i < threads; i++)
      all.emplace_back([&, b, i] {
        threadIdx.x = i, blockIdx.x = b;
        run();
      });
    for (auto& one : all) one.join();
  }
}
