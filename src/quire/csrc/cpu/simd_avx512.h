// Vectors of AVX-512; simd_avx2.h has the same names, and simd_neon.h. What they mean is said here.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd_types.h"

namespace quire::QUIRE_ISA {

using vf = __m512;
constexpr int W = 16;      // lanes
constexpr int NV = 4;      // vectors side by side in a micro-kernel: 6 x 4 accumulators fit into 32 registers
QUIRE_INLINE vf zero() { return _mm512_setzero_ps(); }
// Lanes 2 i and 2 i + 1 exchanged; lane i in both of them; a * b - c in even lanes, a * b + c in odd ones.
QUIRE_INLINE vf swap_pairs(vf a) { return _mm512_permute_ps(a, 0xb1); }
QUIRE_INLINE vf spread_pairs(vf a) {
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), a);
}
QUIRE_INLINE vf fma_subtract_add(vf a, vf b, vf c) { return _mm512_fmaddsub_ps(a, b, c); }
QUIRE_INLINE vf set1(float x) { return _mm512_set1_ps(x); }
QUIRE_INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
QUIRE_INLINE vf fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
QUIRE_INLINE vf max(vf a, vf b) { return _mm512_max_ps(a, b); }  // b if either is NaN
QUIRE_INLINE vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
QUIRE_INLINE float hmax(vf a) { return _mm512_reduce_max_ps(a); }
QUIRE_INLINE float hsum(vf a) { return _mm512_reduce_add_ps(a); }
QUIRE_INLINE vf round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
QUIRE_INLINE vf scale_by_power(vf a, vf n) { return _mm512_scalef_ps(a, n); }
QUIRE_INLINE vf zero_below(vf a, vf x, float bound) {  // a, but 0 where x < bound
  return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(x, set1(bound), _CMP_LT_OQ), zero());
}
QUIRE_INLINE vf keep_lanes(vf a, int first, int last, vf other) {  // a in lanes [first, last), else other
  const uint32_t below_last = last >= W ? 0xffffu : last <= 0 ? 0u : (1u << last) - 1;
  const uint32_t below_first = first >= W ? 0xffffu : first <= 0 ? 0u : (1u << first) - 1;
  return _mm512_mask_mov_ps(other, static_cast<__mmask16>(below_last & ~below_first), a);
}
QUIRE_INLINE vf load(const float* p) { return _mm512_loadu_ps(p); }
QUIRE_INLINE vf widen(bf16, __m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }
QUIRE_INLINE vf widen(fp16, __m256i h) { return _mm512_cvtph_ps(h); }
QUIRE_INLINE __m256i narrow(bf16, vf a) {
  const __m512i u = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));  // to nearest, ties to even
  r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
}
QUIRE_INLINE __m256i narrow(fp16, vf a) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
template <class T> QUIRE_INLINE vf load(const T* p) {
  return widen(T{}, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
QUIRE_INLINE void store(float* p, vf a) { _mm512_storeu_ps(p, a); }
template <class T> QUIRE_INLINE void store(T* p, vf a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(T{}, a));
}

QUIRE_INLINE void transpose(vf r[W]) {
  vf t[W];
#pragma GCC unroll 8
  for (int i = 0; i < W; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < W; i += 4) {
    const auto pd = [](vf a) { return _mm512_castps_pd(a); };
    r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(t[i]), pd(t[i + 2])));
    r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(t[i]), pd(t[i + 2])));
    r[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(t[i + 1]), pd(t[i + 3])));
    r[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(t[i + 1]), pd(t[i + 3])));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Within each four lanes of the result: sums over four lanes, (0 + 2) + (1 + 3), of a, b, c and d.
QUIRE_INLINE vf sum_by_fours(vf a, vf b, vf c, vf d) {
  const auto pd = [](vf x) { return _mm512_castps_pd(x); };
  const vf ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
  const vf cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
  return _mm512_castpd_ps(_mm512_unpacklo_pd(pd(ab), pd(cd))) + _mm512_castpd_ps(_mm512_unpackhi_pd(pd(ab), pd(cd)));
}
// Sums over the fours of W / 4 such results: lane i belongs to vector i of those that went in.
QUIRE_INLINE vf sum_of_fours(const vf* x) {
  const vf a = _mm512_shuffle_f32x4(x[0], x[1], 0x88) + _mm512_shuffle_f32x4(x[0], x[1], 0xdd);
  const vf b = _mm512_shuffle_f32x4(x[2], x[3], 0x88) + _mm512_shuffle_f32x4(x[2], x[3], 0xdd);
  return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
}
// The sum of all lanes of one vector, in the same order.
QUIRE_INLINE float sum_lanes(vf a) {
  a = a + _mm512_permute_ps(a, 0x4e);
  a = a + _mm512_permute_ps(a, 0xb1);
  a = a + _mm512_shuffle_f32x4(a, a, 0xb1);
  a = a + _mm512_shuffle_f32x4(a, a, 0x4e);
  return _mm512_cvtss_f32(a);
}

// A bit for each lane.
using vmask = __mmask16;
QUIRE_INLINE vmask is_nan(vf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
QUIRE_INLINE vmask at_least(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
QUIRE_INLINE vmask above(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }

// -------------------------------------------------------------------------------- vectors of 32-bit integers

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
// Pieces of 32 bytes that lie so far apart, as many as fill a vector; and 16 bytes each, twice.
QUIRE_INLINE vi load_pieces(const char* p, int distance) {
  const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + distance));
  return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}
QUIRE_INLINE vi load_halves_twice(const char* p, int distance) {
  const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + distance));
  return _mm512_mask_broadcast_i32x4(sixteen_bytes(p), 0xff00, second);
}
// The second 16 of each 32 bytes, as 32-bit integers.
QUIRE_INLINE vi shift_second_halves(vi a, int n) { return _mm512_mask_srli_epi32(a, 0xf0f0, a, n); }

QUIRE_INLINE vi as_integers(vf a) { return _mm512_castps_si512(a); }
QUIRE_INLINE vi plus(vi a, vi b) { return _mm512_add_epi32(a, b); }
// Four words again and again.
QUIRE_INLINE vi four_words(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return _mm512_set4_epi32(static_cast<int>(d), static_cast<int>(c), static_cast<int>(b), static_cast<int>(a));
}
// W bytes as integers with their sign, and back: the lowest byte of each of the first n lanes.
QUIRE_INLINE vi load_signed_bytes(const void* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
QUIRE_INLINE void store_lowest_bytes(char* to, vi a, int64_t n) {
  const __mmask16 mask = n >= W ? 0xffff : static_cast<__mmask16>((1u << n) - 1);
  _mm512_mask_cvtepi32_storeu_epi8(to, mask, a);
}

// Two products of 16 bits in every lane, added to c; four of an unsigned and a signed byte, where there are such.
QUIRE_INLINE void add_sums_of_two(vi& c, vi a, vi b) { c = plus(c, _mm512_madd_epi16(a, b)); }
#if defined(__AVX512VNNI__)
#define QUIRE_SUMS_OF_FOUR
QUIRE_INLINE void add_sums_of_four(vi& c, vi a, vi b) {
  // Not the intrinsic: its types make GCC 12 move accumulators around and out of the registers.
  asm("vpdpbusd %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
}
#endif

#if defined(__AVX512BF16__)
// A word is a pair of bfloat16 where products of such pairs are one instruction: a sum of two products in each lane.
#define QUIRE_MULTIPLIES_PAIRS
QUIRE_INLINE vf fma_pairs(vf a, vf b, vf c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
// Two vectors of floats as bfloat16, a first.
QUIRE_INLINE vf pairs_of(vf a, vf b) { return (vf)_mm512_cvtne2ps_pbh(b, a); }
// One instruction instead of eight; values below 1e-38 become zero.
QUIRE_INLINE void store_narrowed(bf16* p, vf a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a));
}
#endif

}  // namespace quire::QUIRE_ISA
