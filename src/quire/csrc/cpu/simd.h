// One vector of floats, `vf`, and of 32-bit integers, `vi`, and what the kernels do with them. Included once per
// instruction set. NEON's vectors are pairs: a vector of AVX2 and one of NEON have eight lanes, and all sums the same order.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_neon.h"
#endif

namespace quire::QUIRE_ISA {

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
#if defined(QUIRE_MULTIPLIES_PAIRS)
QUIRE_INLINE void store_result(bf16* p, vf a) { store_narrowed(p, a); }
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
