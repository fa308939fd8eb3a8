// What the operators (operators.cpp) hand to the kernels: plain structs and one table of functions per instruction set.
//
// The kernel sources are compiled once per instruction set, each time in a namespace of its own (QUIRE_ISA). They use
// nothing from the C++ library: an inline function of the library that one object compiled for AVX-512 could be the
// copy that the linker keeps for all, and a processor without AVX-512 would die in it.
#pragma once

#include <cstdint>

namespace quire {

enum class DType { float32, bfloat16, float16 };

// Keys are handled in tiles at multiples of KEY_TILE, tiles in partitions at multiples of PARTITION. Both are counted
// from position 0 of the sequence, never from the start of the work: sums are formed in the same order whatever the
// block size, the other sequences, the length of the chunk and the number of threads.
constexpr int KEY_TILE = 64;
constexpr int PARTITION = 512;
// Query rows (tokens times heads of a group) that share one pass over the keys.
constexpr int MAX_ROWS = 96;
// Rows of float scratch are padded to whole vectors of the widest instruction set.
constexpr int LANES = 16;

struct AttentionArgs {
  DType dtype;
  const void* query;
  const void* k_cache;
  const void* v_cache;
  void* out;
  const int32_t* block_tables;
  const float* sinks;  // one per query head, or null
  // Strides in elements.
  int64_t query_token_stride, query_head_stride;
  int64_t out_token_stride, out_head_stride;
  int64_t k_block_stride, k_head_stride;
  int64_t v_block_stride, v_head_stride;
  int64_t table_stride;
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

struct NormArgs {
  DType dtype;
  const void* x;
  const void* residual;  // null: plain norm
  const void* weight;
  void* out;
  void* total;  // x + residual
  int64_t outer, inner, width;
  int64_t x_outer_stride, x_inner_stride, residual_outer_stride, residual_inner_stride;
  float eps;
};

struct GateArgs {
  DType dtype;
  const void* x;
  void* out;
  int64_t rows, width, x_stride;
};

struct RotaryArgs {
  DType dtype;
  const int64_t* positions;
  void* x;
  const float* cos_sin;
  int64_t tokens, heads, token_stride, head_stride, cos_sin_stride;
  int half;  // rotary dimensions / 2
};

struct KernelTable {
  const char* isa;
  // With partials == null the work must hold all partitions of its tile, and the output is written; otherwise the
  // state of each partition is left there, one after the other. `next` (or null) is what the same thread does next.
  void (*attend)(const AttentionArgs&, const Work&, const Work* next, float* scratch, float* partials);
  // Folds `count` states, in order, into the output.
  void (*combine)(const AttentionArgs&, const QueryTile&, int64_t count, float* scratch, const float* partials);
  // Rows [begin, end) of what the arguments describe; the caller splits the work over threads.
  void (*rms_norm)(const NormArgs&, int64_t begin, int64_t end);
  void (*silu_and_mul)(const GateArgs&, int64_t begin, int64_t end);
  void (*rotary)(const RotaryArgs&, int64_t begin, int64_t end);
};

// The best table that this processor can run, or null; QUIRE_CPU_ISA names a lesser one. See isa.cpp.
const KernelTable* kernels();

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

inline int64_t first_visible(const AttentionArgs& args, const QueryTile& tile) {
  return args.sliding_window > 0 ? max64(0, tile.first_position - args.sliding_window + 1) : 0;
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
