// How numbers of the cache reach the arithmetic: vectors of words, whatever the cache holds.
//
// A word is what one multiply-add takes from a row: a float, or two numbers as bfloat16 where the processor multiplies
// such pairs. Codes of one byte become bfloat16 or float without their scale, and exactly.
#pragma once

#include "attention_args.h"
#include "simd.h"
#include "tuning.h"

namespace quire::QUIRE_ISA {

struct i8 { int8_t code; };
struct e4m3 { uint8_t code; };

#if defined(QUIRE_MULTIPLIES_PAIRS)
constexpr int PAIR = 2;
#else
constexpr int PAIR = 1;
#endif

template <class C> struct Format;
template <> struct Format<float> {
  static constexpr int per_word = 1;
  static constexpr bool has_scales = false;
  static constexpr float factor_in = 1, factor_out = 1;
};
template <> struct Format<fp16> : Format<float> {};
template <> struct Format<bf16> : Format<float> {
  static constexpr int per_word = PAIR;
};
template <> struct Format<i8> {
  static constexpr int per_word = PAIR;
  static constexpr bool has_scales = true;
  static constexpr float factor_in = 1, factor_out = 1;
};
// The bits of an e4m3 code, moved to where floats have theirs, are the number times 2^-120. What it is multiplied with
// is brought to 2^64 times its size, so that products stay far from the smallest floats, and the sum to 2^56 times its.
// Codes with an exponent of 0, other than zero, are never written (cache_rows.cpp).
template <> struct Format<e4m3> {
  static constexpr int per_word = PAIR;
  static constexpr bool has_scales = true;
  static constexpr float factor_in = 0x1p64f, factor_out = 0x1p56f;
};

// load_words: W words of a row that has n more numbers at p; what is not there is 0.
QUIRE_INLINE vf load_words(const float* p, int64_t n) { return load_upto(p, n); }
QUIRE_INLINE vf load_words(const fp16* p, int64_t n) { return load_upto(p, n); }

#if defined(__AVX512BF16__)

QUIRE_INLINE __mmask32 first_lanes(int64_t n) { return n >= 32 ? 0xffffffffu : (1u << n) - 1; }
QUIRE_INLINE __m256i load_codes(const void* p, int64_t n) {
  if (n >= 2 * W) return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  return _mm256_maskz_loadu_epi8(first_lanes(n), p);
}
QUIRE_INLINE vf load_words(const bf16* p, int64_t n) {
  if (n >= 2 * W) return _mm512_loadu_ps(p);
  return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(first_lanes(n), p));
}
QUIRE_INLINE vf load_words(const i8* p, int64_t n) {
  const auto floats = [](__m128i codes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)); };
  if (n >= 2 * W) {
    const __m128i* halves = reinterpret_cast<const __m128i*>(p);
    return pairs_of(floats(_mm_loadu_si128(halves)), floats(_mm_loadu_si128(halves + 1)));
  }
  const __m256i codes = load_codes(p, n);
  return pairs_of(floats(_mm256_castsi256_si128(codes)), floats(_mm256_extracti128_si256(codes, 1)));
}
QUIRE_INLINE vf load_words(const e4m3* p, int64_t n) {
  const __m512i extended = _mm512_cvtepi8_epi16(load_codes(p, n));  // sign in bits 7 to 15
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_slli_epi16(extended, 4), _mm512_set1_epi16(static_cast<int16_t>(0x87f0))));
}

// Rows of two keys as words of one number of each. Four numbers by turns: `in_order` undoes what that does to sums.
QUIRE_INLINE void interleave(vf a, vf b, vf* out) {
  const __m512i x = _mm512_castps_si512(a), y = _mm512_castps_si512(b);
  out[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(x, y));
  out[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(x, y));
}
template <int PER_WORD> QUIRE_INLINE void in_order(vf* x) {
  if constexpr (PER_WORD == 1) return;
  const vf low = _mm512_shuffle_f32x4(x[0], x[1], 0x44), high = _mm512_shuffle_f32x4(x[0], x[1], 0xee);
  x[0] = _mm512_shuffle_f32x4(low, low, 0xd8);
  x[1] = _mm512_shuffle_f32x4(high, high, 0xd8);
}

#elif defined(QUIRE_MULTIPLIES_PAIRS)  // NEON with BF16

QUIRE_INLINE vf load_words(const bf16* p, int64_t n) {
  if (n >= 2 * W) return load(reinterpret_cast<const float*>(p));
  bf16 all[2 * W] = {};
  memcpy(all, p, n * sizeof(bf16));
  return load(reinterpret_cast<const float*>(all));
}
QUIRE_INLINE int8x16_t load_codes(const void* p, int64_t n) {
  if (n >= 2 * W) return vld1q_s8(static_cast<const int8_t*>(p));
  int8_t all[2 * W] = {};
  memcpy(all, p, n);
  return vld1q_s8(all);
}
QUIRE_INLINE vf load_words(const i8* p, int64_t n) {
  const int8x16_t codes = load_codes(p, n);
  const auto floats = [](int16x8_t x) {
    return vf{vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), vcvtq_f32_s32(vmovl_high_s16(x))};
  };
  return pairs_of(floats(vmovl_s8(vget_low_s8(codes))), floats(vmovl_high_s8(codes)));
}
QUIRE_INLINE vf load_words(const e4m3* p, int64_t n) {
  const int8x16_t codes = load_codes(p, n);
  const auto pairs = [](int16x8_t extended) {  // sign in bits 7 to 15
    return vreinterpretq_f32_u16((vreinterpretq_u16_s16(extended) << 4) & vdupq_n_u16(0x87f0));
  };
  return {pairs(vmovl_s8(vget_low_s8(codes))), pairs(vmovl_high_s8(codes))};
}

QUIRE_INLINE void interleave(vf a, vf b, vf* out) {
  const auto first = [](float32x4_t x, float32x4_t y) {
    return vreinterpretq_f32_u16(vzip1q_u16(vreinterpretq_u16_f32(x), vreinterpretq_u16_f32(y)));
  };
  const auto second = [](float32x4_t x, float32x4_t y) {
    return vreinterpretq_f32_u16(vzip2q_u16(vreinterpretq_u16_f32(x), vreinterpretq_u16_f32(y)));
  };
  out[0] = {first(a.low, b.low), second(a.low, b.low)};
  out[1] = {first(a.high, b.high), second(a.high, b.high)};
}
template <int PER_WORD> QUIRE_INLINE void in_order(vf*) {}

#else

QUIRE_INLINE vi load_codes(const void* p, int64_t n) {  // each extended with its sign
  if (n >= W) return load_signed_bytes(p);
  char all[W] = {};
  memcpy(all, p, n);
  return load_signed_bytes(all);
}
QUIRE_INLINE vf load_words(const i8* p, int64_t n) { return to_float(load_codes(p, n)); }
QUIRE_INLINE vf load_words(const e4m3* p, int64_t n) {
  return as_float(shift_left(load_codes(p, n), 20) & all_lanes(0x87f00000));
}
QUIRE_INLINE vf load_words(const bf16* p, int64_t n) { return load_upto(p, n); }
template <int PER_WORD> QUIRE_INLINE void in_order(vf*) {}

#endif

template <int PER_WORD> QUIRE_INLINE vf multiply_add(vf a, vf b, vf c) {
#if defined(QUIRE_MULTIPLIES_PAIRS)
  if constexpr (PER_WORD == 2) return fma_pairs(a, b, c);
#endif
  return fma(a, b, c);
}
// W words, from vectors of floats.
template <int PER_WORD> QUIRE_INLINE void store_words(float* p, const vf* x) {
#if defined(QUIRE_MULTIPLIES_PAIRS)
  if constexpr (PER_WORD == 2) return store(p, pairs_of(x[0], x[1]));
#endif
  store(p, x[0]);
}

// Asks for memory ahead of its use, line by line between other work. Blocks are scattered over pages, and a prefetcher
// of the hardware that watches loads begins anew with each; requests in bursts would queue up. Lines go into the
// second-level cache, for the first holds what is in use.
class Ahead {
 public:
  void clear() { begin_ = next_ = end_ = 0, at_ = until_ = nullptr; }

  // Memory that is used after all that was added before.
  void add(const void* begin, int64_t bytes) {
    const char* from = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(begin) & ~uintptr_t{63});
    pieces_[end_++ % AHEAD_PIECES] = {from, static_cast<const char*>(begin) + bytes};
  }

  // What has been added since the last call is in use from now on; what was added before is not any more.
  void use() {
    if (static_cast<int>(next_ - begin_) <= 0) {  // not asked for yet
      next_ = begin_, turn();
      for (int64_t i = 0; i < tuning.attention_lines; i += 8) fetch_lines<8>();
    }
    begin_ = end_;
  }

  template <int LINES> __attribute__((always_inline)) void fetch_lines() {
    if (at_ >= until_) turn();
    const char* p = at_;
#pragma GCC unroll 8
    for (int i = 0; i < LINES; ++i) fetch_line(p + 64 * i);
    at_ = p + 64 * LINES;
  }

  // To be called whenever so many vectors of words are loaded.
  template <class C, int VECTORS> __attribute__((always_inline)) void fetch() {
    constexpr int bytes = VECTORS * W * Format<C>::per_word * static_cast<int>(sizeof(C));
    fetch_lines<(bytes < 64 ? 1 : bytes / 64)>();
  }

 private:
  __attribute__((always_inline)) void turn() {
    if (next_ == end_) return;
    at_ = pieces_[next_ % AHEAD_PIECES].begin, until_ = pieces_[next_ % AHEAD_PIECES].end, ++next_;
  }

  const char *at_, *until_;
  unsigned begin_, next_, end_;
  struct { const char *begin, *end; } pieces_[AHEAD_PIECES];
};
static_assert(sizeof(Ahead) <= AHEAD_FLOATS * sizeof(float), "Ahead does not fit");

}  // namespace quire::QUIRE_ISA
