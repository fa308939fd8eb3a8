// How the inputs of a quantised weight are cut.
#pragma once

#include "matmul_micro.h"

namespace quire::QUIRE_ISA {

// Inputs that share a scale of the weight, and 128 at most, are a segment: what is summed before it is scaled. Segments
// are the same for every kind of arithmetic. Activations in 8 bits have one scale in each of them.
constexpr int64_t SEGMENT_WORDS = QUANTIZED_TOGETHER / 4;

// The segment that begins with this word ends before the word that is returned.
QUIRE_INLINE int64_t end_of_segment(const PackedView& w, int64_t word) {
  const int64_t block = (word / SEGMENT_WORDS + 1) * SEGMENT_WORDS;
  const int64_t group = (word / w.group_words + 1) * w.group_words;
  return min64(min64(block, group), w.words);
}

static int64_t num_segments(const PackedView& w) {
  if (w.words == 0) return 0;
  if (w.num_groups == 1 || w.group_words % SEGMENT_WORDS == 0) return (w.words + SEGMENT_WORDS - 1) / SEGMENT_WORDS;
  int64_t count = 0;
  for (int64_t i = 0; i < w.words; i = end_of_segment(w, i)) ++count;
  return count;
}

QUIRE_INLINE vf load_half(const char* p) { return load(reinterpret_cast<const fp16*>(p)); }

}  // namespace quire::QUIRE_ISA
