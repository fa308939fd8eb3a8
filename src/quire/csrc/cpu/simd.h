// One vector of floats and what the kernels do with it, for AVX2 and for AVX-512. Included once per instruction set.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define QUIRE_INLINE static inline __attribute__((always_inline))

namespace quire::QUIRE_ISA {

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

#if defined(__AVX512F__)

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

#else  // AVX2, FMA and F16C

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

#endif

// The first n < W elements; the other lanes are 0 (load) or left alone (store). Tails only: not made for speed.
template <class T> QUIRE_INLINE vf load_part(const T* p, int n) {
  T full[W] = {};
  memcpy(full, p, n * sizeof(T));
  return load(full);
}
template <class T> QUIRE_INLINE void store_part(T* p, vf a, int n) {
  T full[W];
  store(full, a);
  memcpy(p, full, n * sizeof(T));
}
template <class T> QUIRE_INLINE vf load_upto(const T* p, int64_t n) {
  return n >= W ? load(p) : load_part(p, static_cast<int>(n));
}
template <class T> QUIRE_INLINE void store_upto(T* p, vf a, int64_t n) {
  n >= W ? store(p, a) : store_part(p, a, static_cast<int>(n));
}

// Results of products.
template <class T> QUIRE_INLINE void store_result(T* p, vf a) { store(p, a); }
#if defined(__AVX512BF16__)
// One instruction instead of eight; it differs in values below 1e-38, which become zero.
QUIRE_INLINE void store_result(bf16* p, vf a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a));
}
#endif

// To the precision of T and back, as if it had been stored.
QUIRE_INLINE vf rounded(const float*, vf a) { return a; }
template <class T> QUIRE_INLINE vf rounded(const T*, vf a) { return widen(T{}, narrow(T{}, a)); }

// exp(x) to about 1e-7 relative; exactly 1 at 0, exactly 0 below -87.3, NaN stays NaN. Not for x > 88.
QUIRE_INLINE vf exp(vf x) {
  const vf in = max(set1(-87.3f), min(set1(88.0f), x));  // this order of arguments keeps NaN
  const vf n = round(in * set1(1.44269504f));
  vf r = fnma(n, set1(0.693359375f), in);  // ln 2 in two parts
  r = fnma(n, set1(-2.12194440e-4f), r);
  // Coefficients of exp on [-ln 2 / 2, ln 2 / 2], minimax of degree 6 with the first two terms fixed.
  vf p = set1(1.38146131e-3f);
  p = fma(p, r, set1(8.36870996e-3f));
  p = fma(p, r, set1(4.16683874e-2f));
  p = fma(p, r, set1(1.66665207e-1f));
  p = fma(p, r, set1(4.99999935e-1f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return zero_below(scale_by_power(p, n), x, -87.3f);
}

QUIRE_INLINE vf tanh(vf x) {  // absolute error about 1e-7
  const vf e = exp(max(set1(-20.0f), min(set1(20.0f), x + x)));
  return set1(1.0f) - set1(2.0f) / (e + set1(1.0f));
}

}  // namespace quire::QUIRE_ISA
