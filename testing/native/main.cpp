// Runs KERNEL_NAME of KERNEL_FILE on blocks of its arguments, and writes their tensors back: number of
// blocks, then tensors as `file`, matrices as `file lines line_bytes lines_of_a_tile`, integers as `= number`.
#include <cstdio>
#include <string>

#include "emulated.h"
#include KERNEL_FILE

// An argument, as the kernel's parameter wants it.
struct Argument {
  std::vector<char> content;
  i64 number = 0;
  TensorMap map = {};
  template <typename T> operator T*() { return (T*)content.data(); }
  operator int() const { return number; }
  operator i64() const { return number; }
  operator const TensorMap&() {
    map.from = (unsigned char*)content.data();
    return map;
  }
};

std::vector<char> read(const std::string& path) {
  FILE* file = fopen(path.c_str(), "rb");
  fseek(file, 0, SEEK_END);
  std::vector<char> found(ftell(file));
  rewind(file);
  if (fread(found.data(), 1, found.size(), file) != found.size()) abort();
  fclose(file);
  return found;
}

template <size_t... I> void run(int blocks, std::vector<Argument>& all, std::index_sequence<I...>) {
  run_blocks(blocks, num_threads, [&] { KERNEL_NAME(all[I]...); });
}

int main(int count, char** words) {
  std::vector<Argument> all(NUM_ARGUMENTS);
  std::vector<std::string> paths(NUM_ARGUMENTS);
  for (int i = 0; i < NUM_ARGUMENTS; i++) {
    char path[1000] = {};
    Argument& one = all[i];
    if (sscanf(words[2 + i], "= %lld", &one.number) == 1) continue;
    sscanf(words[2 + i], "%999s %d %d %d", path, &one.map.num_lines, &one.map.line_bytes, &one.map.lines);
    one.content = read(paths[i] = path);
  }
  run(std::stoi(words[1]), all, std::make_index_sequence<NUM_ARGUMENTS>());
  for (int i = 0; i < NUM_ARGUMENTS; i++) {
    if (paths[i].empty()) continue;
    FILE* file = fopen(paths[i].c_str(), "wb");
    fwrite(all[i].content.data(), 1, all[i].content.size(), file);
    fclose(file);
  }
}
