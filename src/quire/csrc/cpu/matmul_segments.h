// How the inputs of a quantised weight are cut.
#pragma once

#include <numeric>

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

// A segment begins at every block and at every group, and where both begin there is one. Each product asks, for a few
// panels at a time: counting them one by one took 4 % of a token with groups of 32.
static int64_t num_segments(const PackedView& w) {
  if (w.words == 0) return 0;
  const auto beginnings = [&](int64_t distance) { return (w.words + distance - 1) / distance; };
  return beginnings(SEGMENT_WORDS) + beginnings(w.group_words) - beginnings(std::lcm(SEGMENT_WORDS, w.group_words));
}

QUIRE_INLINE vf load_half(const char* p) { return load(reinterpret_cast<const fp16*>(p)); }

}  // namespace quire::QUIRE_ISA
