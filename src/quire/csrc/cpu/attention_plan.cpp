// Cuts a batch into tiles of query rows, and tiles into units of work.
//
// A tile is some tokens of one sequence times the heads that share a key head, so keys and values are read once for
// all of them. A tile that is much longer than its share of the work is cut along the key heads and the context; the
// states of its partitions are folded in the same order afterwards, so the cut does not show in the result.
//
// Neighbours in the batch whose block tables begin with the same blocks see the same keys there. If each has few
// tokens, their rows make one more tile for these keys, which are then read once for all; each goes on from the states
// of its rows. Again the order of sums is the same.

#include "attention_plan.h"

#include <algorithm>

#include "tuning.h"

namespace quire {
namespace {

// Rows up to which reading keys costs more than computing with them, and the fewest keys that are worth a shared tile.
constexpr int64_t SHARING_ROWS = 16;
constexpr int64_t LEAST_SHARED_KEYS = 2 * KEY_TILE;

int64_t num_partitions(int64_t first_key, int64_t end_key) {
  return (end_key + PARTITION - 1) / PARTITION - first_key / PARTITION;
}

template <class T> int64_t num_equal(const T* one, const T* other, int64_t count) {
  return std::mismatch(one, one + count, other).first - one;
}

}  // namespace

void AttentionPlan::make(const AttentionArgs& args, const Extent& extent, int threads) {
  const int64_t sequences = extent.sequences;
  args_ = &args, wanted_ = extent.wanted;
  tiles_.clear(), units_.clear();
  num_floats_ = num_shared_units_ = 0;
  shared_tile_.assign(sequences, -1);
  if (args.sliding_window == 0 && args.begins.data == nullptr && args.bias == nullptr && args.group_size <= SHARING_ROWS) share(sequences);
  const size_t num_shared_tiles = tiles_.size();
  for (int64_t s = 0; s < sequences; ++s) add_sequence(s);
  double cost = 0;
  for (const Tile& tile : tiles_) cost += tile.cost;
  const double share = threads == 1 ? cost + 1 : cost / static_cast<double>(tuning.attention_pieces * threads) + 1;
  for (size_t i = 0; i < tiles_.size(); ++i) {
    if (i == num_shared_tiles) num_shared_units_ = static_cast<int64_t>(units_.size());
    add_units(static_cast<int>(i), share);
  }
}

// Runs of neighbours that share keys. A neighbour joins if that saves more reading than what it takes from the run.
void AttentionPlan::share(int64_t sequences) {
  for (int64_t begin = 0, end; begin < sequences; begin = end) {
    int64_t keys = sharing_keys(begin);
    for (end = begin + 1; end < sequences && keys >= LEAST_SHARED_KEYS; ++end) {
      const int64_t common = min64(min64(keys, sharing_keys(end)), common_keys(end - 1, end));
      const int64_t others = end - begin;
      if (common < LEAST_SHARED_KEYS || common * others < keys * (others - 1)) break;
      keys = common;
    }
    if (end - begin > 1) add_shared(begin, end, keys);
  }
}

// Keys that every new token of the sequence sees, in whole tiles and not all that the first one sees; 0 for one that
// does not share.
int64_t AttentionPlan::sharing_keys(int64_t sequence) const {
  const int64_t count = args_->query_starts[sequence + 1] - args_->query_starts[sequence];
  if (count <= 0 || count * args_->group_size > SHARING_ROWS) return 0;
  return max64(0, args_->share.below(args_->seq_lens[sequence] - count + 1) - 1) / KEY_TILE * KEY_TILE;
}

int64_t AttentionPlan::common_keys(int64_t one, int64_t other) const {
  const Indices& tables = args_->block_tables;
  const int64_t a = one * args_->table_stride, b = other * args_->table_stride;
  if (tables[a] != tables[b]) return 0;
  const int64_t count = min64(sharing_keys(one), sharing_keys(other)) / args_->block_size;
  const int64_t equal = tables.is_wide ? num_equal(static_cast<const int64_t*>(tables.data) + a,
                                                   static_cast<const int64_t*>(tables.data) + b, count)
                                       : num_equal(static_cast<const int32_t*>(tables.data) + a,
                                                   static_cast<const int32_t*>(tables.data) + b, count);
  return equal * args_->block_size / KEY_TILE * KEY_TILE;
}

// Tiles for the shared keys of sequences [begin, end), whose rows follow each other.
void AttentionPlan::add_shared(int64_t begin, int64_t end, int64_t keys) {
  const Indices& starts = args_->query_starts;
  const int64_t most_tokens = MAX_ROWS / args_->group_size;
  for (int64_t s = begin, next; s < end; s = next) {
    for (next = s + 1; next < end && starts[next + 1] - starts[s] <= most_tokens; ++next) {}
    if (next - s == 1) continue;
    // A position from which all of these keys are seen.
    add_tile({static_cast<int>(s), 0, args_->group_size, starts[s], starts[next] - starts[s],
              keys * args_->share.size},
             0, keys);
    tiles_.back().is_shared = true;
    for (int64_t i = s; i < next; ++i) shared_tile_[i] = static_cast<int>(tiles_.size()) - 1;
  }
}

void AttentionPlan::add_sequence(int64_t sequence) {
  const int64_t begin = args_->query_starts[sequence], count = args_->query_starts[sequence + 1] - begin;
  if (count <= 0) return;
  const int heads_at_once = static_cast<int>(min64(args_->group_size, MAX_ROWS));
  const int64_t tokens_at_once = max64(1, MAX_ROWS / heads_at_once);
  for (int head = 0; head < args_->group_size; head += heads_at_once) {
    const int heads = static_cast<int>(min64(heads_at_once, args_->group_size - head));
    // The last tokens first: they see the longest context, and short pieces at the end keep all threads busy.
    for (int64_t t = (count - 1) / tokens_at_once * tokens_at_once; t >= 0; t -= tokens_at_once) {
      const int64_t tokens = min64(tokens_at_once, count - t), position = args_->seq_lens[sequence] - count + t;
      if (wanted_ != nullptr && !wanted_->has_one_in(begin + t, begin + t + tokens)) continue;
      const QueryTile rows{static_cast<int>(sequence), head, heads, begin + t, tokens, position};
      const int64_t end_key = max64(0, end_visible(*args_, rows, tokens - 1));
      const int64_t first_key = min64(end_key, first_visible(*args_, sequence, position)) / KEY_TILE * KEY_TILE;
      add_tile(rows, first_key, end_key);
      const int shared = shared_tile_[sequence];
      if (shared < 0) continue;
      Tile& tile = tiles_.back();
      tile.first_key = tiles_[shared].end_key;
      tile.shared_tile = shared;
      tile.first_row_of_shared_tile = (begin - tiles_[shared].rows.first_row) * args_->group_size;
    }
  }
}

void AttentionPlan::add_tile(const QueryTile& rows, int64_t first_key, int64_t end_key) {
  Tile tile{};
  tile.rows = rows;
  tile.first_key = first_key, tile.end_key = end_key;
  // Even a single row costs the reading of its keys: about as much as four rows more.
  tile.cost = static_cast<double>(end_key - first_key) * static_cast<double>(num_rows(rows) + 4) * args_->num_kv_heads;
  tile.shared_tile = -1;
  tiles_.push_back(tile);
}

// Makes units of about `share` of a tile: first along the key heads, then along the context.
void AttentionPlan::add_units(int index, double share) {
  Tile& tile = tiles_[index];
  const int64_t rows = num_rows(tile.rows), all_heads = args_->num_kv_heads;
  const int64_t wanted = static_cast<int64_t>(min64(1 << 20, static_cast<int64_t>(tile.cost / share))) + 1;
  int64_t heads = rows <= few_rows(args_->format) ? min64(all_heads, MAX_ROWS / rows) : 1;
  if (wanted > 1) heads = max64(1, min64(heads, all_heads / wanted));
  const int64_t head_units = (all_heads + heads - 1) / heads;
  const int64_t first = tile.first_key / PARTITION, count = num_partitions(tile.first_key, tile.end_key);
  const int64_t pieces = max64(1, min64(count, wanted / head_units));
  tile.is_cut = pieces > 1 && !tile.is_shared;
  if (tile.is_cut || tile.is_shared) {
    tile.states = num_floats_;
    num_floats_ += count * partial_floats(*args_, rows) * all_heads;
  }
  for (int64_t p = 0; p < pieces; ++p) {
    const int64_t begin = max64(tile.first_key, (first + count * p / pieces) * PARTITION);
    const int64_t end = min64(tile.end_key, (first + count * (p + 1) / pieces) * PARTITION);
    for (int64_t head = 0; head < all_heads; head += heads) {
      units_.push_back({index, static_cast<int>(head), static_cast<int>(min64(heads, all_heads - head)), begin, end});
    }
  }
}

Work AttentionPlan::work_of(const Unit& unit, float* states) const {
  const Tile& tile = tiles_[unit.tile];
  Work work{};
  work.tile = tile.rows;
  work.kv_head = unit.kv_head, work.num_kv_heads = unit.num_kv_heads;
  work.first_key = unit.first_key, work.end_key = unit.end_key;
  if (tile.is_cut || tile.is_shared) {
    work.states = states_of(tile, unit.kv_head, unit.first_key / PARTITION - tile.first_key / PARTITION, states);
  }
  if (tile.shared_tile >= 0) {
    const Tile& shared = tiles_[tile.shared_tile];
    work.shared = states_of(shared, unit.kv_head, 0, states);
    work.shared.first_row = tile.first_row_of_shared_tile;
    work.shared_keys = shared.end_key;
  }
  return work;
}

Work AttentionPlan::whole(int64_t tile, int kv_head, float* states) const {
  return work_of({static_cast<int>(tile), kv_head, 1, tiles_[tile].first_key, tiles_[tile].end_key}, states);
}

States AttentionPlan::states_of(const Tile& tile, int kv_head, int64_t partition, float* states) const {
  const int64_t rows = num_rows(tile.rows), size = partial_floats(*args_, rows);
  const int64_t head_stride = num_partitions(tile.first_key, tile.end_key) * size;
  return {states + tile.states + kv_head * head_stride + partition * size, head_stride, rows, 0};
}

}  // namespace quire
