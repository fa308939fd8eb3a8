// Writing into the paged cache: new tokens (cache_rows.cpp), and whole blocks from within it or from elsewhere, which
// are bytes whatever the cache holds.

#include "cache.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace quire {
namespace {

constexpr int64_t BYTES_WORTH_A_THREAD = 64 * 1024;

int threads_for(int64_t bytes) {
  return static_cast<int>(std::clamp<int64_t>(bytes / BYTES_WORTH_A_THREAD, 1, crew_size()));
}

int64_t all_bytes(const std::vector<BlockCopy>& copies, int64_t num_pairs) {
  int64_t bytes = 0;
  for (const BlockCopy& copy : copies) bytes += copy.block_bytes * num_pairs;
  return bytes;
}

}  // namespace

int64_t WriteStep::work(const Extent& extent) const {
  int64_t numbers = 0;
  for (const StoreArgs& store : stores_) numbers += store.heads * store.dim;
  return extent.tokens * numbers;
}

void WriteStep::check(const Extent& extent) const {
  for (int64_t t = 0; t < extent.tokens; ++t) {
    const int64_t slot = stores_[0].slots[t];
    if (slot < num_slots_) continue;
    throw std::runtime_error("slot " + std::to_string(slot) + " is beyond the cache of " +
                             std::to_string(num_slots_));
  }
}

void WriteStep::run_tokens(int64_t begin, int64_t end) const {
  for (const StoreArgs& store : stores_) kernels()->attention->store_rows(store, begin, end);
}

void copy_blocks(const std::vector<BlockCopy>& copies, const int64_t* pairs, int64_t num_pairs) {
  int64_t largest = 0;
  for (const BlockCopy& copy : copies) largest = std::max(largest, copy.block_bytes);
  const int threads = threads_for(all_bytes(copies, num_pairs));
  // A thread takes a slice of a tensor's blocks and goes through all pairs in order: a later pair may read what an
  // earlier one wrote. Few tensors are cut into more slices.
  const int64_t num_copies = static_cast<int64_t>(copies.size());
  const int64_t slices = std::max<int64_t>(1, std::min(2 * threads / std::max<int64_t>(1, num_copies), largest / 4096));
  const auto copy_slice = [&](const BlockCopy& copy, int64_t slice) {
    const int64_t begin = copy.block_bytes * slice / slices, end = copy.block_bytes * (slice + 1) / slices;
    for (int64_t i = 0; i < num_pairs; ++i) {
      const char* from = copy.from + pairs[2 * i] * copy.from_stride + begin;
      char* to = copy.to + pairs[2 * i + 1] * copy.to_stride + begin;
      if (from != to) std::memcpy(to, from, end - begin);
    }
  };
  run_crew(threads, [&](Crew& crew) {
    crew.for_each(num_copies * slices, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) copy_slice(copies[i / slices], i % slices);
    });
  });
}

void move_blocks(const std::vector<BlockCopy>& copies, const int64_t* pairs, int64_t num_pairs) {
  const int threads = threads_for(all_bytes(copies, num_pairs));
  // Pair by pair: on the host, the parts of a block lie one after the other.
  run_crew(threads, [&](Crew& crew) {
    crew.for_each(num_pairs, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        for (const BlockCopy& copy : copies) {
          std::memcpy(copy.to + pairs[2 * i + 1] * copy.to_stride, copy.from + pairs[2 * i] * copy.from_stride,
                      copy.block_bytes);
        }
      }
    });
  });
}

}  // namespace quire
