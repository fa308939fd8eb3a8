#pragma once

#include <vector>

#include "attention_plan.h"
#include "step.h"

namespace quire {

// Attention of the newest tokens of each sequence over its blocks. Of the lengths, starts and block tables only the
// addresses are kept: what is in them is read in every run.
class AttentionStep final : public Step {
 public:
  AttentionStep(const AttentionArgs& args, std::vector<float> sinks, std::vector<float> slopes,
                std::vector<float> bias);

  int64_t work(const Extent& extent) const override;
  void check(const Extent& extent) const override;
  void run(const Extent& extent, Crew& crew) const override;
  bool needs_all_tokens() const override { return true; }

 private:
  void check_ends(int64_t sequence) const;

  AttentionArgs args_;
  std::vector<float> sinks_, slopes_, bias_;
  mutable AttentionPlan plan_;  // of this run
};

}  // namespace quire
