// A program: the steps of a model's forward pass, recorded once and run for any number of tokens without Python.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "arena.h"
#include "step.h"

namespace quire {

class Program {
 public:
  // Every tensor of a recorded model begins with a dimension of so many tokens: memory is laid out for the largest run.
  explicit Program(int64_t max_tokens) : max_tokens_(max_tokens) {}

  int64_t max_tokens() const { return max_tokens_; }
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  void append(std::unique_ptr<Step> step);
  int64_t size() const { return num_steps_; }
  // Memory outside that steps read a row of for each token.
  void add_input(const TokenRows& rows) { inputs_.push_back(rows); }
  // Whether the rest of the steps can do with fewer tokens than the first ones.
  bool can_narrow() const { return !rest_.rows.empty() && !needs_all_; }
  // If `tokens` are said, in ascending order, only their results are read: those of a program that can narrow stand at
  // the beginning then.
  void run(const Extent& extent, const std::optional<Tokens>& wanted) const;

 private:
  // Neighbours that run token by token, or one step of another kind.
  using Stage = std::vector<std::unique_ptr<Step>>;
  // What follows the last step that needs all tokens, and what it reads of them.
  struct Rest {
    size_t first_stage;
    std::vector<TokenRows> rows;
  };
  static void run_stage(const Stage& stage, const Extent& extent, Crew& crew);

  void keep_only(const Tokens& wanted, Crew& crew) const;

  int64_t max_tokens_, num_steps_ = 0;
  // the last stage does
  bool needs_all_ = false;
  Rest rest_;
  std::vector<TokenRows> inputs_;
  std::vector<Stage> stages_;
  std::shared_ptr<Arena> arena_ = std::make_shared<Arena>();
};

// Keeps what was thrown as text, for a function that is called through ctypes: no exception crosses into C.
const char* kept_error(const std::exception& error);

// Null, or what `run` threw.
template <class Run> const char* error_of(const Run& run) {
  try {
    run();
    return nullptr;
  } catch (const std::exception& error) {
    return kept_error(error);
  }
}

}  // namespace quire
