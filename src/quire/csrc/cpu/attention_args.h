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
// Rows of float scratch are padded to this many floats: what one load of two bfloat16 vectors fills.
constexpr int LANES = 32;

// How the cache holds numbers. The last two are codes of one byte; after the codes of all places of a block and head
// come their scales, a float for each place: number = code * scale.
enum class CacheFormat { float32, bfloat16, float16, int8, fp8 };
constexpr int SCALE_BYTES = 4;

inline bool has_scales(CacheFormat format) { return format == CacheFormat::int8 || format == CacheFormat::fp8; }

// Up to so many rows of one key head, keys and values are multiplied as they lie in the cache, and the work on a tile
// of keys goes through several key heads: what these have of a block lies side by side.
inline int few_rows(CacheFormat format) { return has_scales(format) ? 4 : 12; }

// Integers in memory that may change between two runs of a step: int32 or int64, as they come.
struct Indices {
  const void* data;
  bool is_wide;

  int64_t operator[](int64_t i) const {
    return is_wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// The ranks that share the keys and values of each sequence (context parallelism): position p is kept by rank
// p % size, as the key p / size of those that it keeps. Positions are those of the sequence, keys those of this rank.
struct KeyShare {
  int64_t rank = 0, size = 1;

  // Of the keys of the positions below this one, how many are kept here.
  int64_t below(int64_t position) const { return size == 1 ? position : (position + size - 1 - rank) / size; }
};

struct AttentionArgs {
  DType dtype;      // of the query
  DType out_dtype;
  KeyShare share;
  bool is_part;  // after the values of each row and head stands the logarithm of what they were divided by
  CacheFormat format;
  const void* query;
  const char* k_cache;
  const char* v_cache;
  void* out;
  Indices block_tables, seq_lens, query_starts;
  Indices ends;        // of each row of the query: it sees keys below this, more than its own; null: up to its own
  const float* sinks;  // one per query head, or null
  const float* slopes;  // the same; times the position of a key, it is added to scores
  Indices begins;       // of each sequence: its rows see keys from this position on; null: from the first
  const float* bias;    // one per query head and distance of a key, added to scores, or null
  int64_t bias_size;    // distances; the last is that of all greater ones
  // Strides in elements, those of the caches in bytes.
  int64_t query_token_stride, query_head_stride;
  int64_t out_token_stride, out_head_stride;
  int64_t k_block_stride, k_head_stride;
  int64_t v_block_stride, v_head_stride;
  int64_t table_stride;
  int64_t num_blocks, blocks_in_row;  // of the cache; of a row of the block tables
  int num_kv_heads, group_size, head_dim, value_dim, block_size;  // block_size: places of this rank
  int v_row_dim;  // numbers in a row of the cache of values, which begins with the value: rows may be those of keys
  int64_t sliding_window;  // 0: everything before the query
  bool is_chunked;         // the window begins at multiples of itself
  float scale, soft_cap;   // soft_cap 0: none
};

// A tile of query rows: some tokens of one sequence times some heads of one group.
struct QueryTile {
  int sequence;
  int first_head, num_heads;      // within the group
  int64_t first_row, num_tokens;  // rows of the query tensor
  int64_t first_position;         // of the first token, in its sequence
};

// States of the rows of a tile after each of some partitions, from the first on: values, then maximum and sum, of all
// rows. Those of the next key head begin `head_stride` floats further on.
struct States {
  float* at;
  int64_t head_stride;
  int64_t num_rows, first_row;  // of the tile that left them; and which of its rows is the first one here
};

// What one thread does at a time: a tile of query rows for some key heads, and the keys [first, end); the first is a
// multiple of KEY_TILE.
struct Work {
  QueryTile tile;
  int kv_head, num_kv_heads;
  int64_t first_key, end_key;
  // Where it leaves the states of its partitions, with `at` for the first of them and for kv_head. Null: the work has
  // all keys of its tile that are not shared, and writes the output.
  States states;
  // Keys [0, shared_keys) are shared with other sequences and have been seen to: these are the states of the rows after
  // partitions 0, 1, ... of them, for kv_head. The last may lack keys, which come first in this work.
  States shared;
  int64_t shared_keys;
  bool follows;  // the call before this one on the same scratch was told that this work comes next
};

// Rows of keys or values [tokens, heads, dim] that go to their slots of a cache [blocks, heads, block_size, dim].
struct StoreArgs {
  DType dtype;
  CacheFormat format;
  const void* rows;
  char* cache;
  Indices slots;  // block * block_size * share.size + position in the block; negative: the row is kept nowhere
  KeyShare share;
  // Strides in elements, those of the cache in bytes.
  int64_t token_stride, head_stride;
  int64_t block_stride, cache_head_stride;
  int heads, dim, block_size;
};

struct AttentionKernels {
  // `next` (or null) is what the same thread does next.
  void (*attend)(const AttentionArgs&, const Work&, const Work* next, float* scratch);
  // Folds the states of all partitions of a tile in order and writes the output; `work` has all its keys.
  void (*combine)(const AttentionArgs&, const Work&, float* scratch);
  void (*store_rows)(const StoreArgs&, int64_t begin, int64_t end);  // of tokens [begin, end)
};

// The first key that a position of a sequence sees.
inline int64_t first_visible(const AttentionArgs& args, int64_t sequence, int64_t position) {
  int64_t first = args.begins.data == nullptr ? 0 : args.begins[sequence];
  if (args.sliding_window > 0) {
    const int64_t window = args.sliding_window;
    first = max64(first, args.is_chunked ? position / window * window : position - window + 1);
  }
  return args.share.below(max64(0, first));
}
inline int64_t first_visible(const AttentionArgs& args, const QueryTile& tile) {
  return first_visible(args, tile.sequence, tile.first_position);
}

// The end of the keys that a token of the tile sees. Within a sequence it never falls.
inline int64_t end_visible(const AttentionArgs& args, const QueryTile& tile, int64_t token) {
  const bool sees_more = args.ends.data != nullptr;
  return args.share.below(sees_more ? args.ends[tile.first_row + token] : tile.first_position + token + 1);
}

inline int64_t num_rows(const QueryTile& tile) { return tile.num_tokens * tile.num_heads; }

// State of `rows` rows after one partition: values, then maximum and sum.
inline int64_t partial_floats(const AttentionArgs& args, int64_t rows) {
  return rows * (round_up(args.value_dim, LANES) + 2);
}

// Room for what `Ahead` remembers (attention_words.h).
constexpr int AHEAD_PIECES = 8 * KEY_TILE;
constexpr int AHEAD_FLOATS = 4 * AHEAD_PIECES + 16;

// Scratch of one thread, in the order in which attention_tile.cpp lays it out.
inline int64_t scratch_floats(const AttentionArgs& args) {
  const int64_t d = round_up(args.head_dim, LANES), e = round_up(args.value_dim, LANES);
  const int64_t zeros = d > e ? d : e;
  return AHEAD_FLOATS + MAX_ROWS * (d + KEY_TILE + 2 * e + 5) + KEY_TILE * (d + e) + zeros;
}

}  // namespace quire
