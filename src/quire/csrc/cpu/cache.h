#pragma once

#include <cstdint>
#include <vector>

#include "attention_args.h"
#include "step.h"

namespace quire {

// Rows of `row_bytes` from a tensor [tokens, heads, row] into a cache [blocks, heads, block_size, row]. In bytes.
struct CacheWrite {
  const char* from;
  char* cache;
  int64_t token_stride, head_stride;
  int64_t block_stride, cache_head_stride;
  int64_t row_bytes;
};

// Keys and values of the tokens go to their slots; which these are is read in every run.
class WriteStep final : public TokenStep {
 public:
  WriteStep(const CacheWrite& key, const CacheWrite& value, Indices slots, int64_t heads, int64_t block_size,
            int64_t num_slots)
      : key_(key), value_(value), slots_(slots), heads_(heads), block_size_(block_size), num_slots_(num_slots) {}

  int64_t work(const Extent& extent) const override;
  void check(const Extent& extent) const override;
  void run_tokens(int64_t begin, int64_t end) const override;

 private:
  CacheWrite key_, value_;
  Indices slots_;
  int64_t heads_, block_size_, num_slots_;
};

// Blocks of one tensor that go to blocks of another, or of the same.
struct BlockCopy {
  const char* from;
  char* to;
  int64_t from_stride, to_stride, block_bytes;
};

// Pairs take effect in order: a destination may be the source of a later one.
void copy_blocks(const std::vector<BlockCopy>& copies, const int64_t* pairs, int64_t num_pairs);

// Pairs are independent of each other.
void move_blocks(const std::vector<BlockCopy>& copies, const int64_t* pairs, int64_t num_pairs);

}  // namespace quire
