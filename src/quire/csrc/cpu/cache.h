#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "attention_args.h"
#include "step.h"

namespace quire {

// Keys of the tokens, and values where they are no parts of keys, go to their slots; which these are is read in every
// run.
class WriteStep final : public TokenStep {
 public:
  WriteStep(std::vector<StoreArgs> stores, int64_t num_slots) : stores_(std::move(stores)), num_slots_(num_slots) {}

  int64_t work(const Extent& extent) const override;
  void check(const Extent& extent) const override;
  void run_tokens(int64_t begin, int64_t end) const override;
  bool needs_all_tokens() const override { return true; }

 private:
  std::vector<StoreArgs> stores_;
  int64_t num_slots_;
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
