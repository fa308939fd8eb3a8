// Products of quantised weights with activations that stay as they are (weight-only).
//
// Codes become small integers in float32 or bfloat16, which hold them exactly; the sum over a segment is scaled and
// added to the sums. A prepared tile of R rows holds, for each segment, the sum of the inputs [float x R] and the inputs
// [word x R] x words. Few rows decode the codes in registers; many rows share words that were decoded into memory.
#pragma once

#include "matmul_segments.h"

namespace quire::QUIRE_ISA {

constexpr int64_t CODES_HEAD = 1;
// Rows that decode for themselves.
constexpr int MOST_ROWS_TO_DECODE = 4;

// A stored word of four codes as words of the arithmetic. They hold code - zero_point + excess(); the products with the
// excess are taken off at the end of a segment.
template <class A, WeightFormat F> struct Decoder;

template <WeightFormat F> struct Decoder<Float32, F> {
  static constexpr int num_words = 4;
  QUIRE_INLINE float excess(const PackedView&) { return 0; }
  vf zero_point;
  static Decoder of(const PackedView& w) { return {set1(8388608.0f + static_cast<float>(w.zero_point))}; }
  // A byte below the exponent of 2^23 is 2^23 plus that byte.
  QUIRE_INLINE vf value(const Decoder& d, vi codes, int byte) {
    const vi bits = select_or(shift_right(codes, 8 * byte), all_lanes(0xff), all_lanes(0x4b000000));
    return as_float(bits) - d.zero_point;
  }
  QUIRE_INLINE void decode(const Decoder& d, vi codes, vf words[num_words]) {
#pragma GCC unroll 4
    for (int e = 0; e < 4; ++e) words[e] = value(d, codes, e);
  }
};

#if defined(QUIRE_MULTIPLIES_PAIRS)
template <> struct Decoder<BFloat16, WeightFormat::int8> {
  static constexpr int num_words = 2;
  QUIRE_INLINE float excess(const PackedView&) { return 0; }
  Decoder<Float32, WeightFormat::int8> floats;
  static Decoder of(const PackedView& w) { return {Decoder<Float32, WeightFormat::int8>::of(w)}; }
  // Integers up to 256 in size end in the upper half of a float.
  QUIRE_INLINE void decode(const Decoder& d, vi codes, vf words[num_words]) {
    vf v[4];
    Decoder<Float32, WeightFormat::int8>::decode(d.floats, codes, v);
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
      const vi lower = shift_right(as_integers(v[2 * p]), 16);
      words[p] = as_float(select_or(as_integers(v[2 * p + 1]), all_lanes(0xffff0000), lower));
    }
  }
};

// All formats of fewer bits: their codes are below 128.
template <WeightFormat F> struct Decoder<BFloat16, F> {
  static constexpr int num_words = 2;
  QUIRE_INLINE float excess(const PackedView& w) { return 128 + static_cast<float>(w.zero_point); }
  static Decoder of(const PackedView&) { return {}; }
  // A code below the exponent of 128 is 128 plus that code.
  QUIRE_INLINE void decode(const Decoder&, vi codes, vf words[num_words]) {
    const vi first = look_up(codes, spread(0)), second = look_up(codes, spread(2));
    words[0] = as_float(first | all_lanes(0x43004300));
    words[1] = as_float(second | all_lanes(0x43004300));
  }
  // Two neighbouring bytes of each word, with zeros above them.
  QUIRE_INLINE vi spread(int byte) {
    const uint32_t pair = 0x80018000 + byte * 0x00010001;
    return four_words(pair, pair + 0x00040004, pair + 0x00080008, pair + 0x000c000c);
  }
};
#endif

// R rows times 2 * W columns, segments [first, last) in words, `distance` columns between both vectors. `load` gives the
// words that belong to the next stored word.
template <class A, int R, int NUM_WORDS, class Load>
QUIRE_INLINE void add_segments(const PackedView& w, const float* x, const char* head, int distance, int64_t first,
                               int64_t last, float* sums, float excess, Ahead ahead, Load load_words) {
  const bool is_scaled = w.group_head_bytes > 0, has_zeros = w.has_zeros;
  for (int64_t i = first, end; i < last; i = end) {
    if (i > first && i % w.group_words == 0) head += w.group_bytes;
    end = end_of_segment(w, i);
    const float* inputs = x + CODES_HEAD * R;
    vf acc[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero();
    int64_t k = i;
    do {
      if (k % WORDS_BETWEEN == 0) fetch(ahead);
      vf words[2][NUM_WORDS];
      load_words(k, words);
#pragma GCC unroll 4
      for (int s = 0; s < NUM_WORDS; ++s) {
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const vf a = set1(inputs[s * R + r]);
          acc[r][0] = A::multiply_add(a, words[0][s], acc[r][0]);
          acc[r][1] = A::multiply_add(a, words[1][s], acc[r][1]);
        }
      }
      inputs += NUM_WORDS * R;
    } while (++k < end);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const fp16* scales = reinterpret_cast<const fp16*>(head) + v * distance;
      const vf scale = is_scaled ? load(scales) : set1(1.0f);
      const vf surplus = has_zeros ? set1(excess) + load(scales + PANEL_COLUMNS) : set1(excess);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        float* to = sums + r * PANEL_COLUMNS + v * distance;
        const vf sum = fnma(surplus, set1(x[r]), acc[r][v]);
        store(to, fma(sum, scale, i == 0 ? zero() : load(to)));
      }
    }
    x = inputs;
  }
}

// Few rows, all segments: `panel` and `head` as add_integers has them.
template <class A, WeightFormat F, int R>
static void add_codes(const PackedView& w, const float* x, const char* head, const char* panel, float* sums,
                      Ahead ahead) {
  using D = Decoder<A, F>;
  const D decoder = D::of(w);
  const auto load_words = [&](int64_t k, vf words[2][D::num_words]) __attribute__((always_inline)) {
    if (k > 0 && k % w.group_words == 0) panel += w.group_head_bytes;
    const auto codes = Codes<F>::load(panel);
    D::decode(decoder, codes.bytes[0], words[0]);
    D::decode(decoder, codes.bytes[1], words[1]);
    panel += Codes<F>::word_bytes;
  };
  add_segments<A, R, D::num_words>(w, x, head, Codes<F>::distance, 0, w.words, sums, D::excess(w), ahead,
                                   load_words);
}

// One segment whose words were decoded.
template <class A, int R>
static void add_decoded(const PackedView& w, const float* x, const char* head, const float* decoded, int64_t first,
                        float* sums, float excess, Ahead ahead) {
  constexpr int NUM_WORDS = Decoder<A, WeightFormat::int8>::num_words;
  const auto load_words = [&](int64_t, vf words[2][NUM_WORDS]) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int s = 0; s < NUM_WORDS; ++s, decoded += PANEL_COLUMNS) {
      words[0][s] = load(decoded);
      words[1][s] = load(decoded + W);
    }
  };
  add_segments<A, R, NUM_WORDS>(w, x, head, W, first, end_of_segment(w, first), sums, excess, ahead, load_words);
}

// Stored words at `from` to words of the arithmetic, for all columns of a panel.
template <class A, WeightFormat F>
static void decode_codes(const PackedView& w, const char* from, int64_t words, float* to) {
  using D = Decoder<A, F>;
  const D decoder = D::of(w);
  for (int64_t i = 0; i < words; ++i, from += w.word_bytes, to += D::num_words * PANEL_COLUMNS) {
    for (int pass = 0; pass < PASSES; ++pass) {
      const int column = pass * Codes<F>::step;
      const auto codes = Codes<F>::load(from + pass * Codes<F>::pass_bytes);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        vf decoded[D::num_words];
        D::decode(decoder, codes.bytes[v], decoded);
#pragma GCC unroll 4
        for (int s = 0; s < D::num_words; ++s) {
          store(to + s * PANEL_COLUMNS + column + v * Codes<F>::distance, decoded[s]);
        }
      }
    }
  }
}

}  // namespace quire::QUIRE_ISA
