// Adapters (LoRA): what is added to the output of a linear layer for tokens that have one.
//
//     low[t, p, j] = sum over c of a[slot(t), p, j, c] * x[t, c]           j < ranks[slot(t)]
//     y[t, n]     += sum over j of b[slot(t), j, n] * low[t, part(n), j]   rounded once
//
// Everything is summed in float32 and in one order for each element, whoever else is in the step. What lies between the
// products is in float32, or in bfloat16 where the processor multiplies that.
//
// Both matrices of a slot are read once in a step for all of its tokens, so they lie as they are read: panels of 16
// columns, which hold word 0 of each column, then word 1. A word has 32 bits, two bfloat16 values; of the other types
// it is one value.
//
//   a:  a column for each (part, j), the ranks of one part behind those of the other      words of x, up to whole steps
//   b:  a column for each output of a part, the last panel of a part filled up with zeros  words of j
//
// A slot is as long as most_rank makes it. An adapter of a lesser rank takes its beginning and leaves the rest alone.
#pragma once

#include "kernels.h"

namespace quire {

// Parts of a merged layer: query, key and value are the most.
constexpr int MOST_PARTS = 4;
constexpr int64_t ADAPTER_COLUMNS = 16;  // of a panel
constexpr int64_t STEP_OF_WORDS = 16;    // a matrix unit takes so many at once

struct AdapterArgs {
  DType dtype;
  DType y_dtype;  // that of the others, or float32: a sum that is not finished
  const void* x;
  void* y;
  const void *a, *b;     // [slots, elements]
  const int32_t* slots;  // of each token; -1: none
  const int32_t* ranks;  // of each slot
  int64_t x_stride, y_stride, a_stride, b_stride, columns, rows, most_rank, num_slots;
  int num_parts;
  int64_t part_ends[MOST_PARTS];  // of the output

  int64_t values_of_word() const { return dtype == DType::bfloat16 ? 2 : 1; }
  int64_t word_bytes() const { return dtype == DType::float16 ? 2 : 4; }
  int64_t line_bytes() const { return ADAPTER_COLUMNS * word_bytes(); }
  // Of a column of a.
  int64_t input_words() const {
    return round_up((columns + values_of_word() - 1) / values_of_word(), STEP_OF_WORDS);
  }
  // Of a column of b: whole steps, or less than one.
  int64_t rank_words(int64_t rank) const {
    const int64_t words = (rank + values_of_word() - 1) / values_of_word();
    return words < STEP_OF_WORDS ? words : round_up(words, STEP_OF_WORDS);
  }
  int64_t a_panels(int64_t rank) const {
    return (num_parts * rank_words(rank) * values_of_word() + ADAPTER_COLUMNS - 1) / ADAPTER_COLUMNS;
  }
  int64_t b_panels() const {
    int64_t panels = 0, first = 0;
    for (int p = 0; p < num_parts; first = part_ends[p++]) panels += panels_of(part_ends[p] - first);
    return panels;
  }
  int64_t a_elements() const { return a_panels(most_rank) * ADAPTER_COLUMNS * input_words() * values_of_word(); }
  int64_t b_elements() const { return b_panels() * ADAPTER_COLUMNS * rank_words(most_rank) * values_of_word(); }

  static int64_t panels_of(int64_t width) { return (width + ADAPTER_COLUMNS - 1) / ADAPTER_COLUMNS; }
};

// Tokens of one slot that are computed together, `count` <= AdapterKernels::tokens of them.
struct AdapterBlock {
  const int32_t* tokens;
  int64_t count;
  int32_t slot;
  int64_t rank;    // above 0
  char* prepared;  // rows of x as the products take them
  char* low;       // what lies between the products, a row after the other
};

struct AdapterKernels {
  int64_t tokens;
  // Of one token.
  int64_t (*prepared_bytes)(const AdapterArgs&);
  int64_t (*low_bytes)(const AdapterArgs&);
  void (*prepare)(const AdapterArgs&, const AdapterBlock&);
  // Panels [begin, end) of a, and of b.
  void (*shrink)(const AdapterArgs&, const AdapterBlock&, int64_t begin, int64_t end);
  void (*expand)(const AdapterArgs&, const AdapterBlock&, int64_t begin, int64_t end);
  // Null, or what computes the types that these do not.
  const AdapterKernels* other_types;
};

}  // namespace quire
