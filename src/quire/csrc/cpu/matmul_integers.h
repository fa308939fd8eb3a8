// Vectors of 32-bit integers, as far as products with packed weights need them.
#pragma once

#include "matmul.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

#if defined(__AVX512F__)

using vi = __m512i;
QUIRE_INLINE vi load_integers(const void* p) { return _mm512_loadu_si512(p); }
QUIRE_INLINE vi all_lanes(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
QUIRE_INLINE vi shift_left(vi a, int n) { return _mm512_slli_epi32(a, n); }
QUIRE_INLINE vi shift_right(vi a, int n) { return _mm512_srli_epi32(a, n); }
QUIRE_INLINE vi shift_right_signed(vi a, int n) { return _mm512_srai_epi32(a, n); }
QUIRE_INLINE vf as_float(vi a) { return _mm512_castsi512_ps(a); }
QUIRE_INLINE vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
QUIRE_INLINE vi to_nearest(vf a) { return _mm512_cvtps_epi32(a); }
QUIRE_INLINE vi select_or(vi a, vi mask, vi b) { return _mm512_ternarylogic_epi32(a, mask, b, 0xea); }  // a & mask | b
QUIRE_INLINE void store_bytes(int8_t* p, vi a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a));
}

// The bytes of a table, again and again, and those of its entries that the bytes of `codes` name.
QUIRE_INLINE vi sixteen_bytes(const void* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
QUIRE_INLINE vi look_up(vi table, vi codes) { return _mm512_shuffle_epi8(table, codes); }

#else

using vi = __m256i;
QUIRE_INLINE vi load_integers(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
QUIRE_INLINE vi all_lanes(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
QUIRE_INLINE vi shift_left(vi a, int n) { return _mm256_slli_epi32(a, n); }
QUIRE_INLINE vi shift_right(vi a, int n) { return _mm256_srli_epi32(a, n); }
QUIRE_INLINE vi shift_right_signed(vi a, int n) { return _mm256_srai_epi32(a, n); }
QUIRE_INLINE vf as_float(vi a) { return _mm256_castsi256_ps(a); }
QUIRE_INLINE vf to_float(vi a) { return _mm256_cvtepi32_ps(a); }
QUIRE_INLINE vi to_nearest(vf a) { return _mm256_cvtps_epi32(a); }
QUIRE_INLINE vi select_or(vi a, vi mask, vi b) { return (a & mask) | b; }
QUIRE_INLINE void store_bytes(int8_t* p, vi a) {
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(halves, halves));
}

QUIRE_INLINE vi sixteen_bytes(const void* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
QUIRE_INLINE vi look_up(vi table, vi codes) { return _mm256_shuffle_epi8(table, codes); }

#endif

// Two vectors of codes: with eight bits the words of 2 * W columns side by side, with four the two halves of every byte.
template <WeightFormat F> struct Codes;
template <> struct Codes<WeightFormat::int8> {
  static constexpr int distance = W;  // of the columns of both vectors
  static constexpr int step = 2 * W;  // from a pass over a panel to the next
  static constexpr int64_t word_bytes = PANEL_COLUMNS * 4;
  vi bytes[2];
  QUIRE_INLINE Codes load(const char* p) { return {{load_integers(p), load_integers(p + W * 4)}}; }
};
template <> struct Codes<WeightFormat::int4> {
  static constexpr int distance = PANEL_COLUMNS / 2;
  static constexpr int step = W;
  static constexpr int64_t word_bytes = PANEL_COLUMNS * 2;
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

// Four products of an unsigned and a signed byte in every lane, added to c. Without an instruction for that, words of x
// come as two words of 16-bit values: the bytes 0 and 2, and the bytes 1 and 3. The result is the same integer.
#if defined(__AVX512VNNI__)
constexpr int X_WORDS = 1;
struct Inputs {  // a word of one row, for all columns
  vi word;
};
QUIRE_INLINE Inputs inputs_at(const int32_t* x, int) { return {all_lanes(static_cast<uint32_t>(*x))}; }
QUIRE_INLINE void add_dot(vi& c, vi w, const Inputs& x) {
  // Not the intrinsic: its types make GCC 12 move accumulators around and out of the registers.
  asm("vpdpbusd %2, %1, %0" : "+v"(c) : "v"(w), "v"(x.word));
}
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
#if defined(__AVX512F__)
  c = _mm512_add_epi32(c, _mm512_madd_epi16(even, x.even));
  c = _mm512_add_epi32(c, _mm512_madd_epi16(odd, x.odd));
#else
  c = _mm256_add_epi32(c, _mm256_madd_epi16(even, x.even));
  c = _mm256_add_epi32(c, _mm256_madd_epi16(odd, x.odd));
#endif
}
#endif

}  // namespace quire::QUIRE_ISA
