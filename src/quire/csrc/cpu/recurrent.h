// Recurrent layers: what their operators hand to the kernels. The formulas stand in kernels/reference.
//
// A kernel gets a part of one sequence's state (a head, or some columns or channels of it) in scratch that stays in the
// first-level cache, and takes the sequence's tokens [begin, end) one after the other. Every sum has one order, so bits
// do not depend on how many tokens, or whose, a step has, nor on how a state is cut into parts.
#pragma once

#include "kernels.h"

namespace quire {

// A tensor of the model, [tokens, heads, size], whose last dimension is contiguous.
struct HeadRows {
  const void* data;
  int64_t token_stride, head_stride;
};

// The tokens of a sequence that a kernel takes at once.
struct Span {
  int64_t begin, end;
  // the state has absorbed the first of them already
  bool reads_first;
};

struct ConvArgs {
  DType dtype;  // of x and out
  HeadRows x;
  const float* weight;  // [width, channels]
  const float* bias;    // null: 0
  void* out;            // [tokens, channels]
  int64_t channels, width;
  bool has_silu;
};

struct DeltaRuleArgs {
  DType dtype;
  HeadRows query, key, value, a, b;  // heads of a and b are elements
  const float *a_log, *dt_bias;
  void* out;  // [tokens, heads, value_dim]
  int64_t heads, num_shared, key_dim, value_dim;  // num_shared: heads of values that a head of keys has
};

struct ScanArgs {
  DType dtype;
  HeadRows x, dt, b, c;  // heads of dt are elements
  const float *dt_bias, *a_log, *skip;
  void* out;  // [tokens, heads, head_dim]
  int64_t heads, num_shared, head_dim, state_size;
  float least_dt, most_dt;
};

struct RecurrentKernels {
  // Channels [first, first + count) of a convolution; `window` is [width, stride], the oldest input in row `oldest`,
  // later ones in the rows behind it, round about. Returns where the oldest is afterwards.
  int64_t (*conv)(const ConvArgs&, int64_t first, int64_t count, Span, float* window, int64_t stride, int64_t oldest);
  // Columns [first, first + rule_columns) of a head, in as far as it has them; `state` is [key_dim, rule_columns].
  void (*delta_rule)(const DeltaRuleArgs&, int64_t head, int64_t first, Span, float* state, float* scratch);
  // Rows [first, first + count) of a head; `state` is [count rounded up to SCAN_ROWS, stride of a row].
  void (*scan)(const ScanArgs&, int64_t head, int64_t first, int64_t count, Span, float* state, float* scratch);
  int64_t rule_columns;
  // what state_size and channels are rounded up to
  int64_t lanes;
};

// Rows of a state that a scan takes side by side.
constexpr int64_t SCAN_ROWS = 4;
// What rows in scratch are rounded up to.
constexpr int64_t MOST_LANES = 16;
// Floats of scratch that the kernels want besides the state.
inline int64_t rule_scratch(const DeltaRuleArgs& args) { return 2 * round_up(args.key_dim, MOST_LANES); }
inline int64_t scan_scratch(const ScanArgs& args, int64_t rows) {
  return 2 * round_up(args.state_size, MOST_LANES) + 3 * round_up(rows, MOST_LANES);
}

}  // namespace quire
