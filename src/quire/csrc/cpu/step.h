// A step is one operation of the model with its arguments: pointers and strides, everything but the number of tokens.
//
// An operator (operators_*.cpp) checks its tensors, makes a step of them and hands it to `perform`. That runs it at
// once, or, while a program is recorded, appends it to the program (program.cpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "crew.h"

namespace quire {

// Some tokens, by ascending numbers.
struct Tokens {
  const int64_t* numbers;
  int64_t count;

  bool has_one_in(int64_t begin, int64_t end) const {
    const int64_t* const first = std::lower_bound(numbers, numbers + count, begin);
    return first != numbers + count && *first < end;
  }
};

// What differs between two runs of a recorded program.
struct Extent {
  int64_t tokens;
  int64_t sequences;
  const Tokens* wanted = nullptr;  // those whose results are read; null: all
};

class Step {
 public:
  virtual ~Step() = default;

  // Some number that grows with the work for so many tokens, about one for each multiply-add or element touched: what
  // is small runs on one thread.
  virtual int64_t work(const Extent& extent) const = 0;

  // Throws (STD_TORCH_CHECK) if the inputs of this run are wrong (positions, slots, lengths). Called before every run:
  // they may have changed since the step was made, and a wrong one would write outside of the tensors.
  virtual void check(const Extent&) const {}

  // Called on every thread of the crew; ends with a barrier if another thread may read what this one wrote.
  virtual void run(const Extent& extent, Crew& crew) const = 0;

  // Steps that treat every token by itself say so. Neighbours in a program then run one after the other on a few tokens
  // at a time, while these are in the cache, with no barrier between them: this is how small operations are fused.
  virtual bool is_by_token() const { return false; }

  // Steps that keep something of every token, or let tokens see each other, say so. Behind the last of them a program
  // may go on with those tokens alone whose results are read.
  virtual bool needs_all_tokens() const { return false; }
};

class TokenStep : public Step {
 public:
  bool is_by_token() const final { return true; }
  virtual void run_tokens(int64_t begin, int64_t end) const = 0;
  void run(const Extent& extent, Crew& crew) const final {
    const int64_t grain = extent.tokens / (8 * crew.size) + 1;
    crew.for_each(extent.tokens, grain, [this](int64_t begin, int64_t end) { run_tokens(begin, end); });
  }
};

// Runs the step for so many tokens (and sequences), or records it. `tokens` is the length of the first dimension.
void perform(std::unique_ptr<Step> step, const Extent& extent);

// Whether this thread records a program.
bool is_recording();

}  // namespace quire
