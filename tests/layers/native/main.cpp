// Reads the tensors of a launch from files, runs KERNEL_NAME of KERNEL_FILE and writes the last one
// back: number of blocks, number of tensors, their files, integers.
#include <cstdio>
#include <string>

#include "emulated.h"
#include KERNEL_FILE

std::vector<char> content(const char* path) {
  FILE* file = fopen(path, "rb");
  fseek(file, 0, SEEK_END);
  std::vector<char> found(ftell(file));
  rewind(file);
  if (fread(found.data(), 1, found.size(), file) != found.size()) abort();
  fclose(file);
  return found;
}

// A pointer or an integer, as the kernel's parameter wants it.
struct Argument {
  std::vector<char>* tensor;
  int number;
  template <typename T> operator T*() const { return (T*)tensor->data(); }
  operator int() const { return number; }
};

template <size_t... I> void run(int blocks, const std::vector<Argument>& all, std::index_sequence<I...>) {
  run_blocks(blocks, num_threads, [&] { KERNEL_NAME(all[I]...); });
}

int main(int count, char** words) {
  const int num_tensors = std::stoi(words[2]);
  std::vector<std::vector<char>> tensors;
  for (int i = 0; i < num_tensors; i++) tensors.push_back(content(words[3 + i]));
  std::vector<Argument> all;
  for (int i = 3; i < count; i++)
    all.push_back(i < 3 + num_tensors ? Argument{&tensors[i - 3], 0} : Argument{nullptr, std::stoi(words[i])});
  run(std::stoi(words[1]), all, std::make_index_sequence<NUM_ARGUMENTS>());
  FILE* file = fopen(words[2 + num_tensors], "wb");
  fwrite(tensors.back().data(), 1, tensors.back().size(), file);
  fclose(file);
}
