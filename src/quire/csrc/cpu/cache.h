#pragma once

#include <cstdint>
#include <vector>

namespace quire {

// Rows of `row_bytes` from a tensor [tokens, heads, row] into a cache [blocks, heads, block_size, row]. In bytes.
struct CacheWrite {
  const char* from;
  char* cache;
  int64_t token_stride, head_stride;
  int64_t block_stride, cache_head_stride;
  int64_t row_bytes;
};

void write_kv(const CacheWrite& key, const CacheWrite& value, const int64_t* slots, int64_t tokens, int64_t heads,
              int64_t block_size, int max_threads);

// Blocks of one tensor that go to blocks of another, or of the same.
struct BlockCopy {
  const char* from;
  char* to;
  int64_t from_stride, to_stride, block_bytes;
};

// Pairs take effect in order: a destination may be the source of a later one.
void copy_blocks(const std::vector<BlockCopy>& copies, const int64_t* pairs, int64_t num_pairs, int max_threads);

// Pairs are independent of each other.
void move_blocks(const std::vector<BlockCopy>& copies, const int64_t* pairs, int64_t num_pairs, int max_threads);

}  // namespace quire
