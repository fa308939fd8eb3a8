// Adapters (LoRA): what is added to the output of a linear layer for tokens that have one.
//
//     low[t, p, j] = sum over c of a[slot(t), p, j, c] * x[t, c]           j < ranks[slot(t)]
//     y[t, n]     += sum over j of b[slot(t), j, n] * low[t, part(n), j]   rounded once
//
// Everything is summed in float32 and in one order for each element, whoever else is in the step.
#pragma once

#include "kernels.h"

namespace quire {

// Parts of a merged layer: query, key and value are the most.
constexpr int MOST_PARTS = 4;

struct AdapterArgs {
  DType dtype;
  const void* x;
  void* y;
  const void* a;  // [slots, parts, most_rank, columns]
  const void* b;  // [slots, most_rank, rows]
  const int32_t* slots;  // of each token; -1: none
  const int32_t* ranks;  // of each slot
  int64_t x_stride, y_stride, columns, rows, most_rank, num_slots;
  int num_parts;
  int64_t part_ends[MOST_PARTS];  // of the output
};

// Tokens of one slot that are computed together, so that a and b are read once for all of them.
constexpr int64_t ADAPTER_TOKENS = 4;

struct AdapterKernels {
  // Both for `count` <= ADAPTER_TOKENS tokens of one slot; `low` has a row of num_parts * most_rank floats for each.
  // The rows [begin, end) of a, over all parts.
  void (*shrink)(const AdapterArgs&, const int32_t* tokens, int64_t count, int64_t begin, int64_t end, float* low);
  // The columns [begin, end) of the output.
  void (*expand)(const AdapterArgs&, const int32_t* tokens, int64_t count, int64_t begin, int64_t end,
                 const float* low);
};

}  // namespace quire
