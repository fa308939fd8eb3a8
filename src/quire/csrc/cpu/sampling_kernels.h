// What sampling does with whole vectors of logits, and how a row and a token are written down for it.
//
// A row is cut into chunks. What is summed is summed within a chunk in the order of lanes, and chunk by chunk: a row's
// token is the same alone and among others, on one thread and on many, with every instruction set.
#pragma once

#include "kernels.h"

namespace quire {

// Compiled for every instruction set, so no copy of them may be left for the linker to choose from.
#define QUIRE_INLINED inline __attribute__((always_inline))

struct LogitRow {
  DType dtype;
  const void* logits;
  int64_t size, chunk;

  QUIRE_INLINED int64_t num_chunks() const { return (size + chunk - 1) / chunk; }
};
// Small vocabularies have small chunks: the greatest logits of the chunks are to bound the k-th greatest of all.
constexpr int64_t SMALL_CHUNK = 32, LARGE_CHUNK = 256;
QUIRE_INLINED int64_t chunk_for(int64_t size) { return size > (1 << 14) ? LARGE_CHUNK : SMALL_CHUNK; }

// The weight of a logit is exp((logit - greatest) / temperature), or 0 if that is below min_p. The best token has 1.
struct Weighing {
  float greatest, temperature, min_p;
};

// One token: the order of its value in the upper half, of its id in the lower one. Greater entries come first.
QUIRE_INLINED uint64_t entry_of(float value, int64_t id) {
  value += 0.0f;  // -0.0 and 0.0 are equal
  int32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  const uint32_t key = static_cast<uint32_t>(bits ^ ((bits >> 31) & 0x7fffffff)) ^ 0x80000000u;
  return static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(id);
}
QUIRE_INLINED int64_t id_of(uint64_t entry) { return ~static_cast<uint32_t>(entry); }
QUIRE_INLINED float value_of(uint64_t entry) {
  const int32_t key = static_cast<int32_t>(static_cast<uint32_t>(entry >> 32) ^ 0x80000000u);
  const int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// What is compiled for each instruction set. Chunks are [begin, end); arrays begin with what belongs to the first one.
struct SamplingKernels {
  // The greatest logit of each chunk, NaN if there is one.
  void (*find_maxima)(const LogitRow&, int64_t begin, int64_t end, float* maxima);
  // Weights of chunks and their sums. Where the bound of a chunk is 0 its sum is 0, and no weight is written. `weights`
  // may be null.
  void (*weigh)(const LogitRow&, const Weighing&, int64_t begin, int64_t end, const float* bounds, float* sums,
                float* weights);
  // The weights of some values, each for itself.
  void (*weigh_each)(const float* values, int64_t count, const Weighing&, float* weights);
  // Logits [begin, end) as float32.
  void (*widen)(const LogitRow&, int64_t begin, int64_t end, float* values);
  // Entries of the values that are at least `least` and below `limit`, in the order of ids, which begin with `first`.
  int64_t (*collect)(const float* values, int64_t count, float least, float limit, int64_t first, uint64_t* entries);
  // How many of the logits [begin, end) are above the value, or equal to it if these count, too.
  int64_t (*count_above)(const LogitRow&, int64_t begin, int64_t end, float value, bool or_equal);
};

}  // namespace quire
