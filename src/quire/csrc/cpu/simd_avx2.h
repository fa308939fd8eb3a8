// Vectors of AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "simd_types.h"

namespace quire::QUIRE_ISA {

using vf = __m256;
constexpr int W = 8;
constexpr int NV = 2;  // 6 x 2 accumulators fit into 16 registers
QUIRE_INLINE vf zero() { return _mm256_setzero_ps(); }
QUIRE_INLINE vf swap_pairs(vf a) { return _mm256_permute_ps(a, 0xb1); }
QUIRE_INLINE vf spread_pairs(vf a) { return _mm256_permutevar8x32_ps(a, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)); }
QUIRE_INLINE vf fma_subtract_add(vf a, vf b, vf c) { return _mm256_fmaddsub_ps(a, b, c); }
QUIRE_INLINE vf set1(float x) { return _mm256_set1_ps(x); }
QUIRE_INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
QUIRE_INLINE vf fnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
QUIRE_INLINE vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
QUIRE_INLINE vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
QUIRE_INLINE float hmax(vf a) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
QUIRE_INLINE float hsum(vf a) {
  __m128 m = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_add_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_add_ss(m, _mm_movehdup_ps(m)));
}
QUIRE_INLINE vf round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
QUIRE_INLINE vf scale_by_power(vf a, vf n) {
  return _mm256_mul_ps(
      a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23)));
}
QUIRE_INLINE vf zero_below(vf a, vf x, float bound) {
  return _mm256_andnot_ps(_mm256_cmp_ps(x, set1(bound), _CMP_LT_OQ), a);
}
QUIRE_INLINE vf keep_lanes(vf a, int first, int last, vf other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i inside = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane),
                                             _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane));
  return _mm256_blendv_ps(other, a, _mm256_castsi256_ps(inside));
}
QUIRE_INLINE vf load(const float* p) { return _mm256_loadu_ps(p); }
QUIRE_INLINE vf widen(bf16, __m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
QUIRE_INLINE vf widen(fp16, __m128i h) { return _mm256_cvtph_ps(h); }
QUIRE_INLINE __m128i narrow(bf16, vf a) {
  const __m256i u = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  r = _mm256_srli_epi32(_mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc00000), nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
QUIRE_INLINE __m128i narrow(fp16, vf a) { return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
template <class T> QUIRE_INLINE vf load(const T* p) {
  return widen(T{}, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
QUIRE_INLINE void store(float* p, vf a) { _mm256_storeu_ps(p, a); }
template <class T> QUIRE_INLINE void store(T* p, vf a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(T{}, a));
}

QUIRE_INLINE void transpose(vf r[W]) {
  vf t[W];
#pragma GCC unroll 4
  for (int i = 0; i < W; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < W; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < W; ++i) r[i] = t[i];
}

QUIRE_INLINE vf floor(vf a) { return _mm256_floor_ps(a); }
QUIRE_INLINE vf sum_by_fours(vf a, vf b, vf c, vf d) {
  const vf ab = _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b);
  const vf cd = _mm256_unpacklo_ps(c, d) + _mm256_unpackhi_ps(c, d);
  return _mm256_shuffle_ps(ab, cd, 0x44) + _mm256_shuffle_ps(ab, cd, 0xee);
}
QUIRE_INLINE vf sum_of_fours(const vf* x) {
  return _mm256_permute2f128_ps(x[0], x[1], 0x20) + _mm256_permute2f128_ps(x[0], x[1], 0x31);
}
QUIRE_INLINE float sum_lanes(vf a) {
  a = a + _mm256_permute_ps(a, 0x4e);
  a = a + _mm256_permute_ps(a, 0xb1);
  a = a + _mm256_permute2f128_ps(a, a, 1);
  return _mm256_cvtss_f32(a);
}

using vmask = uint32_t;
QUIRE_INLINE vmask is_nan(vf a) { return _mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
QUIRE_INLINE vmask at_least(vf a, vf b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
QUIRE_INLINE vmask above(vf a, vf b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }

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
QUIRE_INLINE vi load_pieces(const char* p, int) { return load_integers(p); }
QUIRE_INLINE vi load_halves_twice(const char* p, int) { return sixteen_bytes(p); }
QUIRE_INLINE vi shift_second_halves(vi a, int n) {
  return _mm256_srlv_epi32(a, _mm256_setr_epi32(0, 0, 0, 0, n, n, n, n));
}

QUIRE_INLINE vi as_integers(vf a) { return _mm256_castps_si256(a); }
QUIRE_INLINE vi plus(vi a, vi b) { return _mm256_add_epi32(a, b); }
QUIRE_INLINE vi load_signed_bytes(const void* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
}
QUIRE_INLINE void store_lowest_bytes(char* to, vi a, int64_t n) {
  const vi first = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                    0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const vi bytes = _mm256_shuffle_epi8(a, first);  // four in each half
  const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
  const int64_t all = _mm_cvtsi128_si64(_mm_unpacklo_epi32(low, high));
  memcpy(to, &all, n >= W ? W : n);
}

QUIRE_INLINE void add_sums_of_two(vi& c, vi a, vi b) { c = plus(c, _mm256_madd_epi16(a, b)); }
// AVX-VNNI. A compiler that does not know it makes the kernels of avx2 once more, which have the same bits.
#if defined(QUIRE_AVX_VNNI) && __has_include(<avxvnniintrin.h>)
#define QUIRE_SUMS_OF_FOUR
#if defined(QUIRE_EMULATE_AVX_VNNI)
#define QUIRE_ENCODING "%{evex%} "
#else
#define QUIRE_ENCODING "%{vex%} "
#endif
QUIRE_INLINE void add_sums_of_four(vi& c, vi a, vi b) {
  asm(QUIRE_ENCODING "vpdpbusd %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
}
#endif

}  // namespace quire::QUIRE_ISA
