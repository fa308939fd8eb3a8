#pragma once

#include <vector>

#include "attention_args.h"
#include "step.h"

namespace quire {

// Attention of the newest tokens of each sequence over its blocks. Of the lengths, starts and block tables only the
// addresses are kept: what is in them is read in every run.
class AttentionStep final : public Step {
 public:
  AttentionStep(const AttentionArgs& args, std::vector<float> sinks);

  int64_t work(const Extent& extent) const override;
  void check(const Extent& extent) const override;
  void run(const Extent& extent, Crew& crew) const override;

 private:
  // A tile of query rows, for every key head alike, and the partitions that its rows see or some of these.
  struct Piece {
    Work work;  // of key head 0
    double cost;
    int64_t partials;  // where the states of key head 0 begin, or -1: the piece is whole and writes the output
    int64_t stride;    // from there to those of the next key head
  };
  struct Plan {
    std::vector<Piece> tiles, pieces;
    int64_t floats;  // of all states
  };

  void make_plan(int64_t sequences, int threads) const;
  void cut(double share) const;

  AttentionArgs args_;
  std::vector<float> sinks_;
  mutable Plan plan_;  // of this run
};

}  // namespace quire
