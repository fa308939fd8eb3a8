// 16-bit floats of a panel decoded into a small piece of memory, where no instruction multiplies them as they are.
#pragma once

#include "matmul_micro.h"

namespace quire::QUIRE_ISA {

// Where a value lies in a word of two 16-bit floats: bits of both halves, moved to the place they have in a float.
QUIRE_INLINE vf lower_half(bf16, vi w) { return as_float(shift_left(w, 16)); }
QUIRE_INLINE vf upper_half(bf16, vi w) { return as_float(w & all_lanes(0xffff0000)); }
// The exponent of a float16 needs another bias: that is a multiplication by 2^112, exact for all finite values.
QUIRE_INLINE vf upper_half(fp16, vi w) {
  return as_float(shift_right_signed(w, 3) & all_lanes(0x8fffe000)) * set1(5.192296858534828e33f);
}
QUIRE_INLINE vf lower_half(fp16, vi w) { return upper_half(fp16{}, shift_left(w, 16)); }

// `words` stored words of a panel to twice as many words of one float.
template <class T> static void decode_halves(const char* from, int64_t words, float* to) {
  for (int64_t i = 0; i < words; ++i, from += PANEL_COLUMNS * 4, to += 2 * PANEL_COLUMNS) {
#pragma GCC unroll 4
    for (int c = 0; c < PANEL_COLUMNS; c += W) {
      const vi w = load_integers(from + c * 4);
      store(to + c, lower_half(T{}, w));
      store(to + PANEL_COLUMNS + c, upper_half(T{}, w));
    }
  }
}

static void decode_floats(WeightFormat format, const char* from, int64_t words, float* to) {
  if (format == WeightFormat::bfloat16) return decode_halves<bf16>(from, words, to);
  decode_halves<fp16>(from, words, to);
}

}  // namespace quire::QUIRE_ISA
