// A program: the steps of a model's forward pass, recorded once and run for any number of tokens without Python.
#pragma once

#include <memory>
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
  void run(const Extent& extent) const;

 private:
  // Neighbours that run token by token, or one step of another kind.
  using Stage = std::vector<std::unique_ptr<Step>>;
  static void run_stage(const Stage& stage, const Extent& extent, Crew& crew);

  int64_t max_tokens_, num_steps_ = 0;
  std::vector<Stage> stages_;
  std::shared_ptr<Arena> arena_ = std::make_shared<Arena>();
};

}  // namespace quire
