// Memory for the intermediate results of a program, taken and given back while it is recorded.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace quire {

// A row for each token, one after the other.
struct TokenRows {
  char* data;
  int64_t row_bytes;
};

// A block is handed out again once the tensor that had it is gone: what follows in the program may overwrite it. Not at
// once, though: the steps of a stage run side by side on different tokens, so a block that one of them still reads
// becomes free only when the next stage begins.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  ~Arena();

  void* take(int64_t bytes);
  void give_back(void* data);
  void begin_stage();
  // What tensors of so many tokens lie in, a row of each after the other.
  std::vector<TokenRows> taken(int64_t num_tokens) const;

 private:
  enum class State { taken, given_back, free };
  struct Block {
    void* data;
    int64_t bytes, bytes_taken;
    State state;
  };
  std::vector<Block> blocks_;
};

// The arena of the program that this thread records, or null.
std::shared_ptr<Arena> recording_arena();

}  // namespace quire
