// What the attention step (attention.cpp) hands to the kernels of an instruction set (attention_tile.cpp).
#pragma once

#include "kernels.h"

namespace quire {

// Keys are handled in tiles at multiples of KEY_TILE, tiles in partitions at multiples of PARTITION. Both are counted
// from position 0 of the sequence, never from the start of the work: sums are formed in the same order whatever the
// block size, the other sequences, the length of the chunk and the number of threads.
constexpr int KEY_TILE = 64;
constexpr int PARTITION = 512;
// Query rows (tokens times heads of a group) that share one pass over the keys.
constexpr int MAX_ROWS = 96;
// Rows of float scratch are padded to whole vectors of the widest instruction set.
constexpr int LANES = 16;

// Integers in memory that may change between two runs of a step: int32 or int64, as they come.
struct Indices {
  const void* data;
  bool is_wide;

  int64_t operator[](int64_t i) const {
    return is_wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

struct AttentionArgs {
  DType dtype;
  const void* query;
  const void* k_cache;
  const void* v_cache;
  void* out;
  Indices block_tables, seq_lens, query_starts;
  const float* sinks;  // one per query head, or null
  // Strides in elements.
  int64_t query_token_stride, query_head_stride;
  int64_t out_token_stride, out_head_stride;
  int64_t k_block_stride, k_head_stride;
  int64_t v_block_stride, v_head_stride;
  int64_t table_stride;
  int64_t num_blocks, blocks_in_row;  // of the cache; of a row of the block tables
  int num_kv_heads, group_size, head_dim, value_dim, block_size;
  int64_t sliding_window;  // 0: everything before the query
  float scale, soft_cap;   // soft_cap 0: none
};

// A tile of query rows: some tokens of one sequence times some heads of one group.
struct QueryTile {
  int sequence, kv_head;
  int first_head, num_heads;      // within the group
  int64_t first_row, num_tokens;  // rows of the query tensor
  int64_t first_position;         // of the first token, in its sequence
};

// What one thread does at a time: a tile of query rows and the partitions of its keys [first, end).
struct Work {
  QueryTile tile;
  int64_t first_partition, end_partition;
};

inline int64_t first_visible(const AttentionArgs& args, int64_t position) {
  return args.sliding_window > 0 ? max64(0, position - args.sliding_window + 1) : 0;
}
inline int64_t first_visible(const AttentionArgs& args, const QueryTile& tile) {
  return first_visible(args, tile.first_position);
}

// State of all rows of a tile after one partition: values, then maximum and sum.
inline int64_t partial_floats(const AttentionArgs& args, int64_t rows) {
  return rows * (round_up(args.value_dim, LANES) + 2);
}

// Scratch of one thread, in the order in which attention_tile.cpp lays it out.
inline int64_t scratch_floats(const AttentionArgs& args) {
  const int64_t d = round_up(args.head_dim, LANES), e = round_up(args.value_dim, LANES);
  const int64_t zeros = d > e ? d : e;
  return MAX_ROWS * (d + KEY_TILE + 2 * e + LANES + 8) + KEY_TILE * (d + e) + zeros;
}

}  // namespace quire
