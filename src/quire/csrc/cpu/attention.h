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
  // A tile of query rows for all key heads, and the partitions that its rows see.
  struct Tile {
    Work work;
    double cost;
    int64_t states;  // where its states begin, if it is cut into pieces of partitions
    bool is_cut;
  };
  // What a thread takes at a time: some key heads of a tile, and some partitions.
  struct Unit {
    int tile, kv_head, num_kv_heads;
    int64_t first_partition, end_partition;
  };
  struct Plan {
    std::vector<Tile> tiles;
    std::vector<Unit> units;
    int64_t floats;  // of all states
  };

  void make_plan(int64_t sequences, int threads) const;
  void add_tiles(int64_t sequence) const;
  void cut(Tile& tile, double share) const;
  Work work_of(const Unit& unit, float* states) const;

  AttentionArgs args_;
  std::vector<float> sinks_;
  mutable Plan plan_;  // of this run
};

}  // namespace quire
