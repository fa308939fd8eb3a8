// How a batch is cut into work for the threads.
#pragma once

#include <vector>

#include "attention_args.h"
#include "step.h"

namespace quire {

class AttentionPlan {
 public:
  // What a thread takes at a time: some key heads of a tile, and some of its keys.
  struct Unit {
    int tile, kv_head, num_kv_heads;
    int64_t first_key, end_key;
  };

  // Reads lengths, starts and block tables, which must have been checked.
  void make(const AttentionArgs& args, const Extent& extent, int threads);

  const std::vector<Unit>& units() const { return units_; }
  int64_t num_shared_units() const { return num_shared_units_; }  // of the first units, whose states others begin with
  int64_t num_floats() const { return num_floats_; }              // of all states
  int64_t num_tiles() const { return static_cast<int64_t>(tiles_.size()); }
  // A tile whose units leave states that must be combined.
  bool is_cut(int64_t tile) const { return tiles_[tile].is_cut; }

  Work work_of(const Unit& unit, float* states) const;
  // All keys of a tile, for one key head: to combine.
  Work whole(int64_t tile, int kv_head, float* states) const;

 private:
  // Query rows for all key heads, and the keys that they see, without those that a shared tile has.
  struct Tile {
    QueryTile rows;
    int64_t first_key, end_key;
    double cost;
    bool is_shared, is_cut;
    int64_t states;                    // where its states begin, if it leaves any
    int shared_tile;                   // or -1
    int64_t first_row_of_shared_tile;  // the tile's own first row there
  };

  void share(int64_t sequences);
  int64_t sharing_keys(int64_t sequence) const;
  int64_t common_keys(int64_t one, int64_t other) const;
  void add_shared(int64_t begin, int64_t end, int64_t keys);
  void add_sequence(int64_t sequence);
  void add_tile(const QueryTile& rows, int64_t first_key, int64_t end_key);
  void add_units(int tile, double share);
  States states_of(const Tile& tile, int kv_head, int64_t partition, float* states) const;

  const AttentionArgs* args_ = nullptr;
  const Tokens* wanted_ = nullptr;
  std::vector<Tile> tiles_;
  std::vector<Unit> units_;
  std::vector<int> shared_tile_;  // by sequence, or -1
  int64_t num_shared_units_ = 0, num_floats_ = 0;
};

}  // namespace quire
