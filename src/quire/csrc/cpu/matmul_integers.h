// Codes of packed weights, and the products of whole numbers with them.
#pragma once

#include "matmul.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

// Two vectors of codes: of eight bits the words of 2 * W columns side by side, of fewer those in both halves of a byte.
template <WeightFormat F> struct Codes;
template <> struct Codes<WeightFormat::int8> {
  static constexpr int distance = W;  // of the columns of both vectors
  static constexpr int step = 2 * W;  // from a pass over a panel to the next
  static constexpr int64_t word_bytes = PANEL_COLUMNS * 4, pass_bytes = step * 4;  // from word to word, pass to pass
  vi bytes[2];
  QUIRE_INLINE Codes load(const char* p) { return {{load_integers(p), load_integers(p + W * 4)}}; }
};
template <> struct Codes<WeightFormat::int4> {
  static constexpr int distance = PANEL_COLUMNS / 2;
  static constexpr int step = W;
  static constexpr int64_t word_bytes = PANEL_COLUMNS * 2, pass_bytes = step * 4;
  vi bytes[2];
  QUIRE_INLINE Codes load(const char* p) {
    const vi both = load_integers(p), mask = all_lanes(0x0f0f0f0f);
    return {{both & mask, shift_right(both, 4) & mask}};
  }
};
template <> struct Codes<WeightFormat::fp4> : Codes<WeightFormat::int4> {
  QUIRE_INLINE Codes load(const char* p) {
    const auto halves = Codes<WeightFormat::int4>::load(p);
    const vi table = sixteen_bytes(FP4_CODES);
    return {{{look_up(table, halves.bytes[0]), look_up(table, halves.bytes[1])}}};
  }
};
template <> struct Codes<WeightFormat::int6> : Codes<WeightFormat::int4> {
  static constexpr int64_t word_bytes = PANEL_COLUMNS * 3, pass_bytes = word_bytes / 2;
  QUIRE_INLINE Codes load(const char* p) {
    const vi lower = load_pieces(p, pass_bytes), lower_mask = all_lanes(0x0f0f0f0f), upper_mask = all_lanes(0x30303030);
    // of each byte bits 0 and 1 belong to the value in the lower half, 4 and 5 to the one in the upper half
    const vi upper = shift_second_halves(load_halves_twice(p + 32, pass_bytes), 2);
    return {{{select_or(shift_left(upper, 4), upper_mask, lower & lower_mask),
              select_or(upper, upper_mask, shift_right(lower, 4) & lower_mask)}}};
  }
};

// What codes are multiplied as, and how much less than the code that is. Where an instruction takes signed bytes alone
// that is 128 for codes of eight bits.
#if defined(QUIRE_MULTIPLIES_SIGNED)
template <WeightFormat F> constexpr int TAKEN_FROM_CODES = F == WeightFormat::int8 ? 128 : 0;
#else
template <WeightFormat F> constexpr int TAKEN_FROM_CODES = 0;
#endif
template <WeightFormat F> QUIRE_INLINE vi factors_of(vi codes) {
  return TAKEN_FROM_CODES<F> > 0 ? vi(codes ^ all_lanes(0x80808080)) : codes;
}

// Four products of an unsigned and a signed byte in every lane, added to c. Without an instruction for that, words of x
// come as two words of 16-bit values: the bytes 0 and 2, and the bytes 1 and 3. The result is the same integer.
#if defined(QUIRE_SUMS_OF_FOUR)
constexpr int X_WORDS = 1;
struct Inputs {  // a word of one row, for all columns
  vi word;
};
QUIRE_INLINE Inputs inputs_at(const int32_t* x, int) { return {all_lanes(static_cast<uint32_t>(*x))}; }
QUIRE_INLINE void add_dot(vi& c, vi w, const Inputs& x) { add_sums_of_four(c, w, x.word); }
#else
constexpr int X_WORDS = 2;
struct Inputs {
  vi even, odd;
};
QUIRE_INLINE Inputs inputs_at(const int32_t* x, int stride) {
  return {all_lanes(static_cast<uint32_t>(x[0])), all_lanes(static_cast<uint32_t>(x[stride]))};
}
QUIRE_INLINE void add_dot(vi& c, vi w, const Inputs& x) {
  const vi bytes = all_lanes(0x00ff00ff);
  const vi even = w & bytes, odd = shift_right(w, 8) & bytes;
  add_sums_of_two(c, even, x.even);
  add_sums_of_two(c, odd, x.odd);
}
#endif

}  // namespace quire::QUIRE_ISA
