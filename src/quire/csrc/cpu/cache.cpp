// Writing into the paged cache: new tokens, and whole blocks from within it or from elsewhere. Bytes only, so dtypes do not matter here.

#include "cache.h"

#include <omp.h>

#include <algorithm>
#include <cstring>

namespace quire {
namespace {

constexpr int64_t BYTES_WORTH_A_THREAD = 64 * 1024;

int threads_for(int64_t bytes, int max_threads) {
  return static_cast<int>(std::clamp<int64_t>(bytes / BYTES_WORTH_A_THREAD, 1, max_threads));
}

void write_row(const CacheWrite& write, int64_t token, int64_t heads, int64_t block, int64_t place) {
  const char* from = write.from + token * write.token_stride;
  char* to = write.cache + block * write.block_stride + place * write.row_bytes;
  for (int64_t h = 0; h < heads; ++h) {
    std::memcpy(to + h * write.cache_head_stride, from + h * write.head_stride, write.row_bytes);
  }
}

int64_t all_bytes(const std::vector<BlockCopy>& copies, int64_t num_pairs) {
  int64_t bytes = 0;
  for (const BlockCopy& copy : copies) bytes += copy.block_bytes * num_pairs;
  return bytes;
}

}  // namespace

void write_kv(const CacheWrite& key, const CacheWrite& value, const int64_t* slots, int64_t tokens, int64_t heads,
              int64_t block_size, int max_threads) {
  const int threads = threads_for(tokens * heads * (key.row_bytes + value.row_bytes), max_threads);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t t = 0; t < tokens; ++t) {
    if (slots[t] < 0) continue;
    const int64_t block = slots[t] / block_size, place = slots[t] % block_size;
    write_row(key, t, heads, block, place);
    write_row(value, t, heads, block, place);
  }
}

void copy_blocks(const std::vector<BlockCopy>& copies, const int64_t* pairs, int64_t num_pairs, int max_threads) {
  int64_t largest = 0;
  for (const BlockCopy& copy : copies) largest = std::max(largest, copy.block_bytes);
  const int threads = threads_for(all_bytes(copies, num_pairs), max_threads);
  // A thread takes a slice of a tensor's blocks and goes through all pairs in order: a later pair may read what an
  // earlier one wrote. Few tensors are cut into more slices.
  const int64_t num_copies = static_cast<int64_t>(copies.size());
  const int64_t slices = std::max<int64_t>(1, std::min(2 * threads / std::max<int64_t>(1, num_copies), largest / 4096));
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1) schedule(dynamic, 1)
  for (int64_t c = 0; c < num_copies; ++c) {
    for (int64_t slice = 0; slice < slices; ++slice) {
      const BlockCopy& copy = copies[c];
      const int64_t begin = copy.block_bytes * slice / slices, end = copy.block_bytes * (slice + 1) / slices;
      for (int64_t i = 0; i < num_pairs; ++i) {
        const char* from = copy.from + pairs[2 * i] * copy.from_stride + begin;
        char* to = copy.to + pairs[2 * i + 1] * copy.to_stride + begin;
        if (from != to) std::memcpy(to, from, end - begin);
      }
    }
  }
}

void move_blocks(const std::vector<BlockCopy>& copies, const int64_t* pairs, int64_t num_pairs, int max_threads) {
  const int threads = threads_for(all_bytes(copies, num_pairs), max_threads);
  const int64_t num_copies = static_cast<int64_t>(copies.size());
  // Pair by pair: on the host, the parts of a block lie one after the other.
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t i = 0; i < num_pairs; ++i) {
    for (int64_t c = 0; c < num_copies; ++c) {
      const BlockCopy& copy = copies[c];
      std::memcpy(copy.to + pairs[2 * i + 1] * copy.to_stride, copy.from + pairs[2 * i] * copy.from_stride,
                  copy.block_bytes);
    }
  }
}

}  // namespace quire
